"""The command line of the evaluator: `lilicorr evaluate`."""

import math
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..hub.sources import check_models
from ..hub.targets import smollm2
from ..hub.terminal import counting, loading, one_sentence, waiting
from .files import writable
from .names import ALL, ARMS, CHAIN, TREE, chosen_arms, named_folders
from .sets import choose, load_sets

ROWS = "rows.jsonl"


def evaluate(
    drafter: Annotated[list[str], typer.Option(help="name=folder (or repository); may be given several times.")],
    data: Annotated[list[str], typer.Option(help="Folder of JSONL files of prompts, or such a file; several times.")],
    output: Annotated[Path, typer.Option(help="Folder for the rows, report.json, report.md and its plots.")],
    target: Annotated[str, typer.Option(help="Folder or repository of the target; unset: SmolLM2-135M-Instruct.")] = "",
    benchmarks: Annotated[list[str] | None, typer.Option(help="Sets to ask, by file name; all unless given.")] = None,
    prompts: Annotated[int, typer.Option(min=0, help="Prompts in all, in turn from every set; 0: all.")] = 0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer at most.")] = 256,
    temperature: Annotated[list[float] | None, typer.Option(min=0.0, help="0 is greedy; 0 and 1 unless given.")] = None,
    seed: Annotated[list[int] | None, typer.Option(help="Of the sampled runs; 42, 43 and 44 unless given.")] = None,
    arms: Annotated[
        list[str] | None,
        typer.Option(help=f"Arms besides plain decoding: {', '.join(ARMS)}, {ALL}; unless given {TREE} and {CHAIN}."),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Nodes of a tree; unless given what the drafters' configurations say.")
    ] = None,
    greedy_runs: Annotated[int, typer.Option(min=1, help="Greedy runs of each prompt: times differ, not text.")] = 1,
    turns: Annotated[str, typer.Option(help="first; or all, on top of plain decoding's answers.")] = "first",
    coverage_blocks: Annotated[int, typer.Option(min=0, help="Blocks a prompt to count coverage on; 0: none.")] = 4,
    poolings: Annotated[bool, typer.Option("--poolings", help="Also pool acceptance as other evaluators do.")] = False,
    dtype: Annotated[str, typer.Option(help="auto, fp32, bf16 or fp16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, …")] = "auto",
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run code the models bring.")] = False,
) -> None:
    """Measure drafters against plain decoding and each other. The same command again resumes a stopped run."""
    with one_sentence():
        folders = named_folders(drafter)
        temperatures, seeds = temperature or [0.0, 1.0], seed or [42, 43, 44]
        for name, values in (("--temperature", temperatures), ("--seed", seeds)):
            if len(set(values)) < len(values) or not all(map(math.isfinite, values)):
                raise ValueError(f"{name} is given as {values}, expected finite numbers, each once.")
        kinds = chosen_arms(arms or [TREE, CHAIN])
        if turns not in ("first", "all"):
            raise ValueError(f"--turns is {turns!r}, expected first or all.")
        if output.is_file() or not writable(output):
            raise ValueError(f"--output {output} cannot be written; name a folder that can.")
        names = [name for text in benchmarks or ["all"] for name in text.split(",") if name]
        questions = choose(load_sets(data, names), prompts)
        check_models(target, folders.values(), dtype)
        source = target or str(smollm2())
        with loading("Loading target and drafters", source, *folders.values()):
            from ..training.decode import check_temperature
            from .journal import Journal
            from .loading import load_pair
            from .report import write_report
            from .run import Plan, report_of, settings_of
            from .run import evaluate as run

            for value in temperatures:
                check_temperature(value)
            pair = load_pair(source, folders, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
            runs = (tuple(temperatures), tuple(seeds), greedy_runs)
            plan = Plan(max_new_tokens, *runs, turns == "all", coverage_blocks, kinds, nodes)
            settings = settings_of(pair, target or "SmolLM2-135M-Instruct", folders, plan, source)
        journal = Journal(output / ROWS, settings)
        with counting(f"{len(questions)} prompts, runs", len(questions) * len(plan.runs)) as advance:
            run(pair, questions, plan, journal, advance)
        rows = [journal.rows[question.key] for question in questions]
        with waiting("Writing the report"):
            path = write_report(output, report_of(journal.settings, rows), poolings)
    Console().print(f"report in {path}", markup=False, soft_wrap=True)
