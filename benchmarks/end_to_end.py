"""Plain `generate` against one or more drafters on held-out prompts, alternating prompt by prompt in one run.

    python benchmarks/end_to_end.py --drafter lilicorr=<folder> --drafter none=<folder> --data <folder of JSONL files>

Every JSONL row holds `{"messages": [{"role": "user", "content": …}, …]}`; the first user turn is asked. Tokens/s
count new tokens by the wall clock of `generate`, prefill included. Acceptance lengths count the bonus token and weigh
every block the same. `--arms` chooses among: a drafter's trees, named after it; trees without the text's own
continuation; the chain of Transformers' assisted loop; and what a person has without a drafter, Transformers'
`prompt_lookup_num_tokens`. Transformers' own DFlash, for one family of models on GPUs, is left out.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from lilicorr.evaluation.arms import Measured, arms_of, ask, differences, warm_up_arms
from lilicorr.evaluation.compare import decoding_options, encode
from lilicorr.evaluation.files import writable, write_json
from lilicorr.evaluation.loading import LoadingError, Pair, load_pair
from lilicorr.evaluation.machine import machine
from lilicorr.evaluation.metrics import loops
from lilicorr.evaluation.names import ALL, ARMS, PLAIN, chosen_arms, named_folders, suffix_of
from lilicorr.evaluation.sets import choose, load_sets
from lilicorr.evaluation.summary import arm_figures
from lilicorr.hub.targets import TargetUnavailableError, smollm2
from lilicorr.hub.terminal import loading, tracked
from record import about, write_rows
from rich import box
from rich.console import Console
from rich.table import Table

console = Console(width=None if sys.stdout.isatty() else 160)  # a table in a file must not wrap


def main(
    drafter: Annotated[list[str], typer.Option(help="name=folder; may be given several times.")],
    data: Annotated[Path, typer.Option(help="Folder of JSONL files of evaluation prompts.")],
    target: Annotated[str | None, typer.Option(help="The target; SmolLM2-135M-Instruct unless given.")] = None,
    arms: Annotated[list[str] | None, typer.Option(help=f"{', '.join(ARMS)}; {ALL} unless given.")] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Nodes of a tree; unless given what the drafters' configurations say.")
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts in all, spread evenly over the files.")] = 40,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 128,
    dtype: Annotated[str, typer.Option(help="auto, fp32, bf16 or fp16.")] = "auto",
    device: Annotated[str, typer.Option()] = "auto",
    seed: Annotated[int, typer.Option(help="Chooses the prompts.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write a JSON report here.")] = None,
    record: Annotated[Path | None, typer.Option(help="Write a CSV file of its figures, as in results, here.")] = None,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code")] = False,
) -> None:
    """Run the benchmark and print its tables."""
    try:
        folders, kinds = named_folders(drafter), chosen_arms(arms or [ALL])
    except ValueError as error:
        raise SystemExit(str(error)) from None
    if out is not None and (out.is_dir() or not writable(out.parent)):
        raise SystemExit(f"--out {out} cannot be written; name a file in a folder that can.")
    if record is not None and (record.is_dir() or not writable(record.parent)):
        raise SystemExit(f"--record {record} cannot be written; name a file in a folder that can.")
    chosen = choose_prompts(data, prompts, seed)
    try:
        source = target or smollm2()
        with loading("Loading target and drafters", source, *folders.values()):
            pair = load_pair(source, folders, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    except (LoadingError, TargetUnavailableError) as error:
        raise SystemExit(str(error)) from None
    settings = {
        "target": target or "SmolLM2-135M-Instruct",
        "drafters": folders,
        "arms": kinds,
        "nodes": nodes,
        "prompts": len(chosen),
        "max_new_tokens": max_new_tokens,
        "dtype": str(pair.target.dtype),
        "seed": seed,
    }
    rows = list(measure(pair, chosen, max_new_tokens, kinds, nodes))
    report = {
        "settings": settings,
        "machine": machine(pair.target.device),
        "all": summarise(rows),
        "without_loops": summarise([row for row in rows if not row["loops"]]),
        "sets": {name: summarise([r for r in rows if r["set"] == name]) for name in sorted({r["set"] for r in rows})},
        "rows": [_plain_numbers(row) for row in rows],
    }
    show(report)
    if out is not None:
        write_json(out, report)
    if record is not None:
        write_rows(record, recorded(report), about(report["machine"]))


def recorded(report: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One row an arm of all answers, and of every set's."""
    for name, summary in {"all": report["all"], **report["sets"]}.items():
        for arm, figures in summary["arms"].items():
            stages = figures.get("milliseconds_per_pass", {})
            yield {
                "set": name,
                "arm": arm,
                "answers": summary["answers"],
                "equal": figures["equal"],
                "new_tokens": figures["new_tokens"],
                "tokens_per_second": figures["tokens_per_second"],
                "to_plain": figures["tokens_per_second"] / summary["arms"][PLAIN]["tokens_per_second"],
                "tokens_per_pass": figures.get("tokens_per_pass"),
                "draft_ms": stages.get("draft"),
                "target_ms": stages.get("target"),
            }


def choose_prompts(data: Path, count: int, seed: int) -> list[tuple[str, str]]:
    """`count` pairs of set name and first user turn, in turn from every JSONL file of `data`, shuffled by `seed`."""
    try:
        return [(question.set, question.turns[0]) for question in choose(load_sets([data]), count, seed)]
    except ValueError as error:
        raise SystemExit(str(error)) from None


def measure(
    pair: Pair, chosen: list[tuple[str, str]], max_new_tokens: int, kinds: Sequence[str], nodes: int | None
) -> Iterator[dict[str, Any]]:
    """Yield one row a prompt with an `Answer` of every arm; their order turns by one each prompt."""
    arms = arms_of(pair.drafters, kinds, nodes)
    options = decoding_options(max_new_tokens)
    warm_up_arms(pair.target, arms, encode(pair.tokenizer, chosen[0][1], pair.target.device))
    for number, (name, prompt) in enumerate(tracked(chosen, "prompts")):
        inputs = encode(pair.tokenizer, prompt, pair.target.device)
        answers = ask(pair.target, arms, inputs, first=number, **options)
        yield {
            "set": name,
            "prompt_tokens": inputs["input_ids"].shape[1],
            "loops": loops(answers[PLAIN].token_ids),
            "differences": differences(pair.target, inputs, answers),
            "arms": answers,
        }


def summarise(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Figures of every arm over `rows`: speed, acceptance, equality with plain, milliseconds a target pass by stage."""
    arms = {}
    for arm in rows[0]["arms"] if rows else []:
        arms[arm] = arm_figures([Measured.of(row["arms"][arm], True, row["differences"].get(arm)) for row in rows])
    return {"answers": len(rows), "arms": arms}


def _plain_numbers(row: dict[str, Any]) -> dict[str, Any]:
    return row | {part: {name: asdict(one) for name, one in row[part].items()} for part in ("differences", "arms")}


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
    """One row an arm, with ratios to plain (speed) and to the same kind of arm of `none` (speed, acceptance)."""
    table = Table(title=title, box=box.MARKDOWN)
    table.add_column("arm")
    speed, lengths = ["tok/s", "to plain", "to none"], ["drafted a pass", "acceptance length", "to none"]
    for name in [*speed, "tokens a pass", *lengths, "draft ms", "target ms", "equal to plain"]:
        table.add_column(name, justify="right")
    arms = summary["arms"]
    plain = arms.get(PLAIN, {})
    for name, figures in arms.items():
        none = arms.get("none" + suffix_of(name), {})
        stages = figures.get("milliseconds_per_pass", {})
        equal = f"{figures['equal']} of {summary['answers']}"
        if figures["largest_logit_gap"] is not None:
            equal += f" (logit gap ≤ {figures['largest_logit_gap']:.2g})"
        table.add_row(
            name,
            f"{figures['tokens_per_second']:.1f}",
            _ratio(figures, plain, "tokens_per_second"),
            _ratio(figures, none, "tokens_per_second"),
            f"{figures['tokens_per_pass']:.2f}" if "tokens_per_pass" in figures else "",
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
    """Tokens a pass and speed-up of every arm by evaluation set."""
    table = Table(title="by set: tokens a pass (speed to plain)", box=box.MARKDOWN)
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
            made = figures.get("tokens_per_pass")
            cells.append(speed if made is None else f"{made:.2f} ({speed})")
        table.add_row(name, str(summary["answers"]), *cells)
    return table


if __name__ == "__main__":
    typer.run(main)
