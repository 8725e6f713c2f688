"""Where the time of a pass goes: target, drafter, growing trees, and what the loop around them costs.

    python benchmarks/loop.py [--drafter <folder>] [--target <folder>] [--batch 8]

Trees with and without the text's own continuation beside the chain of Transformers' assisted loop, alternating prompt
by prompt in one run. Times are those behind the prompt's pass, by passes of the target; the loop's overhead is what is
left of them without target and drafter. `--batch` decodes so many prompts together instead, beside plain `generate`.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer
from lilicorr.candidate_generator import decoding_loop
from lilicorr.cli import EMBEDDED_DRAFTER
from lilicorr.evaluation.arms import Arm, arms_of, configured, warm_up_arms
from lilicorr.evaluation.compare import Clock, decoding_options, encode, stage_clock
from lilicorr.evaluation.files import writable, write_json
from lilicorr.evaluation.loading import LoadingError, Pair, load_pair
from lilicorr.evaluation.machine import machine
from lilicorr.evaluation.names import CHAIN, TEXTLESS, TREE
from lilicorr.hub.targets import TargetUnavailableError, smollm2
from lilicorr.hub.terminal import loading, tracked
from lilicorr.training.decode import stop_ids
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

PROMPTS = (
    "Tom has 12 apples, eats 3 a day and buys 5 more every second day. How many are left after four days?",
    "Write a Python function that returns the n-th Fibonacci number, with a docstring and two examples.",
    "Explain to a ten-year-old why the sky is blue.",
    "List five rules for a good commit message, each with a short reason.",
    "Solve x^2 - 5x + 6 = 0 step by step.",
    "Write a short e-mail that moves a meeting from Monday to Thursday.",
    "Name three differences between a list and a tuple in Python and show each in code.",
    "Summarise the story of Little Red Riding Hood in six sentences.",
)
SHOWN = {TREE: "loop", TEXTLESS: "loop, without text", CHAIN: "stock loop"}
COLUMNS = {"block": "block ms", "target": "target", "draft": "drafter", "tree": "growing trees", "rest": "rest"}
console = Console(width=None if sys.stdout.isatty() else 160)  # a table in a file must not wrap


def main(
    drafter: Annotated[Path, typer.Option(help="Folder of the drafter.")] = EMBEDDED_DRAFTER,
    target: Annotated[str | None, typer.Option(help="Its target; SmolLM2-135M-Instruct unless given.")] = None,
    prompts: Annotated[int, typer.Option(min=1, max=len(PROMPTS), help="Of this script's own prompts.")] = 4,
    max_new_tokens: Annotated[int, typer.Option(min=2)] = 64,
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes of a tree; unless given the drafter's own.")] = None,
    batch: Annotated[int, typer.Option(min=0, help="Prompts decoded together, given again if need be.")] = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of a batch.")] = 3,
    dtype: Annotated[str, typer.Option(help="auto, fp32, bf16 or fp16.")] = "auto",
    device: Annotated[str, typer.Option()] = "auto",
    out: Annotated[Path | None, typer.Option(help="Write a JSON report here.")] = None,
) -> None:
    """Run the benchmark and print its table."""
    if out is not None and (out.is_dir() or not writable(out.parent)):
        raise SystemExit(f"--out {out} cannot be written; name a file in a folder that can.")
    try:
        source = target or smollm2()
        with loading("Loading target and drafter", source, drafter):
            pair = load_pair(source, {"loop": str(drafter)}, dtype=dtype, device=device)
    except (LoadingError, TargetUnavailableError) as error:
        raise SystemExit(str(error)) from None
    report: dict[str, Any] = {
        "settings": {
            "target": target or "SmolLM2-135M-Instruct",
            "drafter": str(drafter),
            "prompts": prompts,
            "max_new_tokens": max_new_tokens,
            "nodes": nodes,
            "dtype": str(pair.target.dtype),
        },
        "machine": machine(pair.target.device),
    }
    if batch:
        report["batch"] = batched(pair, batch, max_new_tokens, nodes, repeats)
        console.print(batch_table(report["batch"]))
    else:
        report["passes"] = passes(pair, PROMPTS[:prompts], max_new_tokens, nodes)
        console.print(pass_table(report["passes"]))
    console.print(f"{str(pair.target.dtype).removeprefix('torch.')}; {report['machine']}", style="dim")
    if out is not None:
        write_json(out, report)


def passes(pair: Pair, prompts: Sequence[str], max_new_tokens: int, nodes: int | None) -> dict[str, dict[str, float]]:
    """By arm: `passes` and `tokens` in all, milliseconds a pass by `COLUMNS`, and the `overhead`'s share of a block."""
    arms = [
        replace(arm, name=name)
        for kind, name in SHOWN.items()
        for arm in arms_of(pair.drafters, [kind], nodes)
        if arm.drafter is not None
    ]
    options = decoding_options(max_new_tokens)
    warm_up_arms(pair.target, arms, encode(pair.tokenizer, prompts[0], pair.target.device))
    totals: dict[str, dict[str, float]] = {arm.name: {} for arm in arms}
    for number, prompt in enumerate(tracked(prompts, "prompts")):
        inputs = encode(pair.tokenizer, prompt, pair.target.device)
        start = number % len(arms)
        for arm in (*arms[start:], *arms[:start]):
            for name, value in timed(arm, pair.target, inputs, options).items():
                totals[arm.name][name] = totals[arm.name].get(name, 0.0) + value
    return {name: _by_pass(total) for name, total in totals.items()}


def timed(arm: Arm, target: Any, inputs: dict[str, Tensor], options: dict[str, Any]) -> dict[str, float]:
    """One call of `generate`: `passes`, `tokens` and seconds by stage, all of what came behind the prompt's pass."""
    clock = Clock(target.device)
    with configured(arm.drafter, arm.settings), stage_clock(target, arm.drafter, clock), growth_clock(clock):
        seconds, output = _seconds(target, inputs, options | {"assistant_model": arm.drafter})
    spent = {"tree": 0.0} | clock.spent()
    tokens = output.shape[1] - inputs["input_ids"].shape[1] - 1
    return spent | {"passes": clock.passes, "tokens": tokens, "block": seconds - spent["prefill"]}


@contextmanager
def growth_clock(clock: Clock) -> Iterator[None]:
    """Note the seconds in which the decoding loop grows trees as the stage "tree"."""
    module, grow = cast(Any, decoding_loop), decoding_loop.grow_trees
    module.grow_trees = clock.timed("tree", grow)
    try:
        yield
    finally:
        module.grow_trees = grow


def _seconds(target: Any, inputs: dict[str, Tensor], options: dict[str, Any]) -> tuple[float, Tensor]:
    """How long `generate` took, and what it returned."""
    _wait(target.device)
    started = time.perf_counter()
    output = target.generate(**inputs, **options)
    _wait(target.device)
    return time.perf_counter() - started, output


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _by_pass(total: dict[str, float]) -> dict[str, float]:
    count = total["passes"]
    milliseconds = {name: 1000 * total[name] / count for name in COLUMNS if name in total}
    rest = milliseconds["block"] - sum(milliseconds[name] for name in ("target", "draft", "tree"))
    overhead = 1 - (milliseconds["target"] + milliseconds["draft"]) / milliseconds["block"]
    return {"passes": count, "tokens": total["tokens"], **milliseconds, "rest": rest, "overhead": overhead}


def pass_table(figures: dict[str, dict[str, float]]) -> Table:
    """One row an arm."""
    table = Table(title="milliseconds a pass of the target", box=box.MARKDOWN)
    table.add_column("arm")
    for name in ("passes", "tokens a pass", *COLUMNS.values(), "overhead"):
        table.add_column(name, justify="right")
    for arm, made in figures.items():
        table.add_row(
            arm,
            f"{made['passes']:.0f}",
            f"{made['tokens'] / made['passes']:.2f}",
            *(f"{made[name]:.2f}" for name in COLUMNS),
            f"{made['overhead']:.1%}",
        )
    return table


def batched(pair: Pair, batch: int, max_new_tokens: int, nodes: int | None, repeats: int) -> dict[str, Any]:
    """Plain `generate` and the loop, alternating, on `batch` prompts at once: tokens, seconds, tokens/s, equal rows."""
    target, drafter = cast(Any, pair.target), pair.drafters["loop"]
    inputs = left_padded([encode(pair.tokenizer, PROMPTS[row % len(PROMPTS)], target.device) for row in range(batch)])
    arms = {"plain": {}, "loop": {"assistant_model": drafter}}
    made: dict[str, Any] = {name: {"tokens": 0, "seconds": 0.0} for name in arms}
    settings = arms_of(pair.drafters, [TREE], nodes)[-1].settings
    rows: dict[str, list[list[int]]] = {}
    with configured(drafter, settings):
        for more in arms.values():
            _seconds(target, inputs, decoding_options(8) | more)
        for _ in tracked(range(repeats), "runs"):
            for name, more in arms.items():
                seconds, output = _seconds(target, inputs, decoding_options(max_new_tokens) | more)
                rows[name] = answers(output[:, inputs["input_ids"].shape[1] :], stop_ids(pair.target))
                made[name]["tokens"] += sum(map(len, rows[name]))
                made[name]["seconds"] += seconds
    for figures in made.values():
        figures["tokens_per_second"] = figures["tokens"] / figures["seconds"]
    ratio = made["loop"]["tokens_per_second"] / made["plain"]["tokens_per_second"]
    equal = sum(ours == plain for ours, plain in zip(rows["loop"], rows["plain"], strict=True))
    return {"rows": batch, "arms": made, "ratio": ratio, "equal": equal}


def left_padded(prompts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Prompts `[1, length]` as one batch `[rows, longest]`, padded in front with what the mask leaves out."""
    ids = [prompt["input_ids"][0] for prompt in prompts]
    padded = {"input_ids": ids, "attention_mask": [torch.ones_like(row) for row in ids]}
    pad = torch.nn.utils.rnn.pad_sequence
    return {name: pad(rows, batch_first=True, padding_side="left") for name, rows in padded.items()}


def answers(new: Tensor, ends: set[int]) -> list[list[int]]:
    """The rows of `new [rows, length]` up to the first token that ends them."""
    rows = []
    for row in new.tolist():
        last = next((place for place, token in enumerate(row) if token in ends), len(row) - 1)
        rows.append(row[: last + 1])
    return rows


def batch_table(figures: dict[str, Any]) -> Table:
    """Tokens/s of plain decoding and of the loop."""
    table = Table(title=f"{figures['rows']} rows at once, {figures['equal']} equal to plain", box=box.MARKDOWN)
    table.add_column("arm")
    for name in ("tokens", "seconds", "tok/s", "to plain"):
        table.add_column(name, justify="right")
    for name, made in figures["arms"].items():
        ratio = f"{figures['ratio']:.2f}×" if name == "loop" else ""
        rate = f"{made['tokens_per_second']:.1f}"
        table.add_row(name, str(made["tokens"]), f"{made['seconds']:.2f}", rate, ratio)
    return table


if __name__ == "__main__":
    typer.run(main)
