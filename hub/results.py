"""What an evaluation found, as evaluation metadata of a model card. The report is read as JSON; nothing is imported."""

import json
import math
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult

METRICS = {  # of `over_seeds` in an evaluator's report: what a card calls them
    "acceptance_length": "acceptance length",
    "speed_up": "speed-up over plain generate",
}


def read_results(path: str | Path, weights: str) -> list[EvalResult]:
    """Acceptance lengths and speed-ups by set and temperature, medians over seeds, of a drafter in a `report.json`.

    Args:
        path: the report that `lilicorr evaluate` wrote.
        weights: what tells the drafter's weights from others', as the evaluator's `fingerprint` gives it.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no such report, or one on other weights.
    """
    try:
        report = json.loads(Path(path).read_text("utf-8"))
        drafters = {name: drafter["weights"] for name, drafter in report["settings"]["drafters"].items()}
        plan, temperatures = report["settings"]["plan"], report["temperatures"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"{path} is no report of `lilicorr evaluate`; give its report.json.") from None
    names = [name for name, found in drafters.items() if found == weights]
    if not names:
        raise ValueError(
            f"{path} holds figures of other weights ({', '.join(drafters)}), not of this checkpoint's; evaluate the "
            "folder that is to be published."
        )
    name = names[0]
    found: list[EvalResult] = []
    for temperature, views in temperatures.items():
        for dataset, view in views["all"]["sets"].items():
            settings = {"temperature": float(temperature), "max_new_tokens": plan.get("max_new_tokens")}
            found += _figures(view["arms"].get(name, {}).get("over_seeds", {}), dataset, settings)
    return found


def _figures(over_seeds: dict[str, Any], dataset: str, settings: dict[str, Any]) -> list[EvalResult]:
    made = []
    for metric, title in METRICS.items():
        value = over_seeds.get(metric, {}).get("median")
        if value is not None and math.isfinite(value):
            made.append(
                EvalResult(
                    task_type="text-generation",
                    task_name="Speculative decoding",
                    dataset_type=dataset,
                    dataset_name=dataset,
                    dataset_args=settings,
                    metric_type=metric,
                    metric_name=title,
                    metric_value=round(value, 3),
                )
            )
    return made
