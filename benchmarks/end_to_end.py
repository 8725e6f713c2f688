"""Plain `generate` against one or more drafters on held-out prompts, alternating prompt by prompt in one run.

    python benchmarks/end_to_end.py --drafter lilicorr=<folder> --drafter none=<folder> --data <folder of JSONL files>

Every JSONL row holds `{"messages": [{"role": "user", "content": …}, …]}`; the first user turn is asked. Tokens/s
count new tokens by the wall clock of `generate`, prefill included. Acceptance lengths count the bonus token and weigh
every block the same. A drafter that adapts its draft lengths to the machine is also run with whole blocks, since only
acceptance lengths of equal drafts compare.
"""

import json
import os
import platform
import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from lilicorr.evaluation.compare import Answer, answer, decoding_options, encode, find_difference, warm_up
from lilicorr.evaluation.loading import LoadingError, Pair, load_pair
from lilicorr.evaluation.metrics import (
    acceptance_by_slot,
    acceptance_length,
    loops,
    mean_of_response_means,
    tokens_per_verification,
)
from lilicorr.hub.targets import TargetUnavailableError, smollm2
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

PLAIN = "plain"
WHOLE = ", whole blocks"
console = Console(width=None if sys.stdout.isatty() else 160)  # a table in a file must not wrap


def main(
    drafter: Annotated[list[str], typer.Option(help="name=folder; may be given several times.")],
    data: Annotated[Path, typer.Option(help="Folder of JSONL files of evaluation prompts.")],
    target: Annotated[str | None, typer.Option(help="The target; SmolLM2-135M-Instruct unless given.")] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts in all, spread evenly over the files.")] = 40,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    dtype: Annotated[str, typer.Option(help="auto, fp32 or bf16.")] = "auto",
    device: Annotated[str, typer.Option()] = "auto",
    seed: Annotated[int, typer.Option(help="Chooses the prompts.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write a JSON report here.")] = None,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code")] = False,
) -> None:
    """Run the benchmark and print its tables."""
    folders = dict(_named(text) for text in drafter)
    if len(folders) < len(drafter):
        raise SystemExit(f"Two drafters share a name in {', '.join(drafter)}; give each --drafter its own.")
    if out is not None and (out.is_dir() or not _writable(out.parent)):
        raise SystemExit(f"--out {out} cannot be written; name a file in a folder that can.")
    chosen = choose_prompts(data, prompts, seed)
    try:
        pair = load_pair(target or smollm2(), folders, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    except (LoadingError, TargetUnavailableError) as error:
        raise SystemExit(str(error)) from None
    settings = {
        "target": target or "SmolLM2-135M-Instruct",
        "drafters": folders,
        "prompts": len(chosen),
        "max_new_tokens": max_new_tokens,
        "dtype": str(pair.target.dtype),
        "seed": seed,
    }
    rows = list(measure(pair, chosen, max_new_tokens))
    report = {
        "settings": settings,
        "machine": machine(pair.target.device),
        "all": summarise(rows),
        "without_loops": summarise([row for row in rows if not row["loops"]]),
        "sets": {name: summarise([r for r in rows if r["set"] == name]) for name in sorted({r["set"] for r in rows})},
        "rows": [{**row, "arms": {name: asdict(run) for name, run in row["arms"].items()}} for row in rows],
    }
    show(report)
    if out is not None:
        write_json(out, report)


def _named(text: str) -> tuple[str, str]:
    name, separator, folder = text.partition("=")
    if not separator or not name or not folder or name == PLAIN:
        raise SystemExit(f"--drafter takes name=folder with a name other than {PLAIN!r}, got {text!r}.")
    return name, folder


def _writable(folder: Path) -> bool:
    """Whether a file can be put into `folder`, which may have to be made."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def choose_prompts(data: Path, count: int, seed: int) -> list[tuple[str, str]]:
    """`count` pairs of set name and first user turn, in turn from every JSONL file of `data`, shuffled by `seed`."""
    files = sorted(data.glob("*.jsonl"))
    if not files:
        raise SystemExit(
            f"{data} holds no *.jsonl files; give --data a folder with one file a set, each row "
            '{"messages": [{"role": "user", "content": "…"}]} (GSM8K, HumanEval, MT-Bench … in that form).'
        )
    queues = []
    for file in files:
        try:
            lines = enumerate(file.read_text(encoding="utf-8").split("\n"), start=1)
        except UnicodeDecodeError:
            raise SystemExit(f"{file} is not UTF-8 text; save it as UTF-8.") from None
        turns = [_first_turn(line, f"{file} line {number}") for number, line in lines if line.strip()]
        random.Random(seed).shuffle(turns)
        queues.append([(file.stem, turn) for turn in turns[:count]])
    if not any(queues):
        raise SystemExit(f"The *.jsonl files of {data} hold no rows; give --data a folder with prompts.")
    in_turn = [queue[i] for i in range(count) for queue in queues if i < len(queue)]
    return in_turn[:count]


def _first_turn(line: str, place: str) -> str:
    try:
        turn = next(m["content"] for m in json.loads(line)["messages"] if m["role"] == "user")
        if not isinstance(turn, str):
            raise TypeError
        return turn
    except (json.JSONDecodeError, KeyError, TypeError, StopIteration):
        raise SystemExit(f"{place} is not a JSON object with messages and a user turn; mend or remove it.") from None


def measure(pair: Pair, chosen: list[tuple[str, str]], max_new_tokens: int) -> Iterator[dict[str, Any]]:
    """Yield one row a prompt with an `Answer` of every arm; their order turns by one each prompt."""
    arms: list[tuple[str, Any, dict[str, Any]]] = [(PLAIN, None, {})]
    for name, drafter in pair.drafters.items():
        arms.append((name, drafter, {}))
        if drafter.config.draft_lengths == "adaptive" and pair.target.device.type == "cpu":
            arms.append((name + WHOLE, drafter, {"num_assistant_tokens": drafter.config.num_slots}))
    options = decoding_options(max_new_tokens)
    warm_up(pair.target, list(pair.drafters.values()), encode(pair.tokenizer, chosen[0][1], pair.target.device))
    for number, (name, prompt) in enumerate(track(chosen, description="prompts", console=console)):
        inputs = encode(pair.tokenizer, prompt, pair.target.device)
        start = number % len(arms)
        runs: dict[str, Answer] = {}
        for arm, drafter, lengths in arms[start:] + arms[:start]:
            runs[arm] = answer(pair.target, inputs, drafter, stages=True, **options, **lengths)
        plain = runs[PLAIN].token_ids
        differences = {
            arm: find_difference(pair.target, inputs, plain, run.token_ids) for arm, run in runs.items() if arm != PLAIN
        }
        yield {
            "set": name,
            "prompt_tokens": inputs["input_ids"].shape[1],
            "loops": loops(plain),
            "differences": {arm: asdict(found) for arm, found in differences.items() if found is not None},
            "arms": {arm: runs[arm] for arm, *_ in arms},
        }


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures of every arm over `rows`: speed, acceptance, equality with plain, milliseconds a target pass by stage."""
    arms = {}
    for arm in rows[0]["arms"] if rows else []:
        runs: list[Answer] = [row["arms"][arm] for row in rows]
        traces = [run.trace for run in runs if run.trace is not None]
        blocks = sum(trace.blocks for trace in traces)
        stages = {stage: 1000 * sum(run.stages.get(stage, 0.0) for run in runs) for stage in ("draft", "target")}
        gaps = [row["differences"][arm]["logit_gap"] for row in rows if arm in row["differences"]]
        arms[arm] = {
            "new_tokens": sum(len(run.token_ids) for run in runs),
            "tokens_per_second": sum(len(run.token_ids) for run in runs) / sum(run.seconds for run in runs),
            "equal": len(rows) - len(gaps),
            "largest_logit_gap": max((gap for gap in gaps if gap is not None), default=None),
        }
        if traces:
            passes = arms[arm]["new_tokens"] - sum(trace.accepted for trace in traces)  # each gives one token itself
            arms[arm] |= {
                "blocks": blocks,
                "acceptance_length": acceptance_length(traces),
                "mean_of_response_means": mean_of_response_means(traces),
                "tokens_per_verification": tokens_per_verification(traces),
                "acceptance_by_slot": acceptance_by_slot(traces),
                "drafted_per_pass": sum(trace.drafted for trace in traces) / passes,
                "milliseconds_per_pass": {stage: spent / passes for stage, spent in stages.items() if spent},
            }
    return {"answers": len(rows), "arms": arms}


def machine(device: torch.device) -> dict[str, Any]:
    """What the figures were measured on."""
    packages: dict[str, str | None] = {}
    for name in ("lilicorr", "torch", "transformers"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = None
    place = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {"device": place, "threads": torch.get_num_threads(), "python": platform.python_version(), **packages}


def show(report: dict[str, Any]) -> None:
    """Print the report as tables in Markdown form."""
    settings = report["settings"]
    console.print(
        f"{settings['target']}, {settings['dtype'].removeprefix('torch.')}, {settings['prompts']} prompts, "
        f"at most {settings['max_new_tokens']} new tokens; {report['machine']}",
        style="dim",
    )
    for title in ("all", "without_loops"):
        console.print(summary_table(f"{title.replace('_', ' ')}: {report[title]['answers']} answers", report[title]))
    console.print(sets_table(report["sets"]))
    for arm, figures in report["all"]["arms"].items():
        if "acceptance_by_slot" in figures:
            shares = " ".join(f"{share:.2f}" for share in figures["acceptance_by_slot"])
            console.print(f"accepted at least to slot 1, 2, … by {arm}: {shares}", soft_wrap=True)


def summary_table(title: str, summary: dict[str, Any]) -> Table:
    """One row an arm, with ratios to plain (speed) and to `none` with the same draft lengths (speed, acceptance)."""
    table = Table(title=title, box=box.MARKDOWN)
    table.add_column("arm")
    speed, lengths = ["tok/s", "to plain", "to none"], ["drafted a pass", "acceptance length", "to none"]
    for name in [*speed, *lengths, "draft ms", "target ms", "equal to plain"]:
        table.add_column(name, justify="right")
    arms = summary["arms"]
    plain = arms.get(PLAIN, {})
    for name, figures in arms.items():
        none = arms.get("none" + WHOLE if name.endswith(WHOLE) else "none", {})
        stages = figures.get("milliseconds_per_pass", {})
        equal = f"{figures['equal']} of {summary['answers']}"
        if figures["largest_logit_gap"] is not None:
            equal += f" (logit gap ≤ {figures['largest_logit_gap']:.2g})"
        table.add_row(
            name,
            f"{figures['tokens_per_second']:.1f}",
            _ratio(figures, plain, "tokens_per_second"),
            _ratio(figures, none, "tokens_per_second"),
            f"{figures['drafted_per_pass']:.2f}" if "drafted_per_pass" in figures else "",
            f"{figures['acceptance_length']:.3f}" if "acceptance_length" in figures else "",
            _ratio(figures, none, "acceptance_length"),
            *(f"{stages[stage]:.1f}" if stage in stages else "" for stage in ("draft", "target")),
            equal if name != PLAIN else "",
        )
    return table


def _ratio(figures: dict[str, Any], base: dict[str, Any], key: str) -> str:
    return f"{figures[key] / base[key]:.2f}×" if key in figures and key in base else ""


def sets_table(sets: dict[str, Any]) -> Table:
    """Acceptance length and speed-up of every arm by evaluation set."""
    table = Table(title="by set: acceptance length (speed to plain)", box=box.MARKDOWN)
    table.add_column("set")
    table.add_column("answers", justify="right")
    arms = [arm for arm in next(iter(sets.values()))["arms"] if arm != PLAIN]
    for arm in arms:
        table.add_column(arm, justify="right")
    for name, summary in sets.items():
        cells = []
        for arm in arms:
            figures = summary["arms"][arm]
            speed = _ratio(figures, summary["arms"][PLAIN], "tokens_per_second")
            cells.append(f"{figures['acceptance_length']:.2f} ({speed})")
        table.add_row(name, str(summary["answers"]), *cells)
    return table


def write_json(path: Path, report: dict[str, Any]) -> None:
    """Write `report` to `path`, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, delete=False) as file:
        json.dump(report, file, indent=1)
    os.replace(file.name, path)


if __name__ == "__main__":
    typer.run(main)
