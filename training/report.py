"""`report.md` of a run: what `log.jsonl` says, in a table and in plots. Made anew from the log at any time."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .log import LOG_FILE, read_log
from .losses.registry import DENOMINATORS

Curve = tuple[Sequence[float], Sequence[float]]  # steps or slots, and values

LOSSES = tuple(DENOMINATORS)
LENGTHS = ("argmax", "walk", "oracle")
_MEANINGS = {
    "argmax": "each slot's most likely token",
    "walk": "the head's draft, which is what `generate` proposes",
    "oracle": "the best path there was among the candidates",
}


def write_report(output: Path) -> Path:
    """Write `report.md` and its plots (`report/*.png`) into `output`; returns the path of `report.md`.

    Without matplotlib the plots are left out and the report says so.

    Raises:
        ValueError: if there is no log, or it is empty or broken.
    """
    path = output / LOG_FILE
    lines = read_log(path) if path.exists() else []
    if not lines:
        raise ValueError(f"{path} holds no line to report on; give the output folder of a training run.")
    parts = [f"# Training of {output.resolve().name}", _summary(lines), _table(lines)]
    parts.append(_plots(output, lines))
    report = output / "report.md"
    unfinished = report.with_suffix(".tmp")
    unfinished.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    os.replace(unfinished, report)
    return report


def _summary(lines: list[dict[str, Any]]) -> str:
    """One sentence of what was seen, and one of the time."""
    seen = [f"{sum(line.get(name, 0) for line in lines):,.0f} {name}" for name in ("blocks", "tokens")]
    text = f"{lines[-1]['step']:,} steps, {' and '.join(seen)}."
    if "tokens_per_second" in lines[-1]:
        rates = sorted(line["tokens_per_second"] for line in lines if "tokens_per_second" in line)
        text += f" Median rate: {rates[len(rates) // 2]:,.0f} tokens a second."
    return text


def _table(lines: list[dict[str, Any]]) -> str:
    """First, last and best value of each loss and acceptance length."""
    rows = ["| figure | first | last | best |", "|---|---|---|---|"]
    for name in (*LOSSES, *(f"{kind}_length" for kind in LENGTHS)):
        values = [line[name] for line in lines if name in line]
        if values:
            best = (max if name.endswith("length") else min)(values)
            label = name.replace("_length", " acceptance length").replace("_", " ")
            rows.append(f"| {label} | {values[0]:.4f} | {values[-1]:.4f} | {best:.4f} |")
    meanings = "; ".join(f"{kind}: {text}" for kind, text in _MEANINGS.items() if f"{kind}_length" in lines[-1])
    return "\n".join(rows) + f"\n\nAcceptance lengths count the bonus token, on training blocks. {meanings}."


def _plots(output: Path, lines: list[dict[str, Any]]) -> str:
    """The plots' Markdown, after drawing them."""
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return "No plots: matplotlib is not installed (pip install 'lilicorr[train]')."
    folder = output / "report"
    folder.mkdir(exist_ok=True)
    steps = [line["step"] for line in lines]
    drawn = []

    def draw(name: str, title: str, x_label: str, curves: Mapping[str, Curve]) -> None:
        if not curves:
            return
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.add_subplot(xlabel=x_label, title=title)
        for label, (xs, ys) in curves.items():
            axes.plot(xs, ys, label=label, marker="." if len(xs) < 40 else None)
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(folder / f"{name}.png", dpi=110)
        drawn.append(f"![{title}](report/{name}.png)")

    def over_steps(names: dict[str, str]) -> dict[str, Curve]:
        return {label: (steps, [line[n] for line in lines]) for label, n in names.items() if all(n in x for x in lines)}

    draw("losses", "Losses", "step", over_steps({name.replace("_", " "): name for name in LOSSES}))
    draw("acceptance", "Acceptance length", "step", over_steps({kind: f"{kind}_length" for kind in LENGTHS}))
    by_slot = {"coverage": "coverage_by_slot"} | {f"accepted, {kind}": f"{kind}_by_slot" for kind in LENGTHS}
    curves = {label: lines[-1][name] for label, name in by_slot.items() if name in lines[-1]}
    slots = {label: (range(1, len(shares) + 1), shares) for label, shares in curves.items()}
    draw("coverage", "By slot, last log line: coverage and share of blocks accepted up to there", "slot", slots)
    return "\n\n".join(drawn)
