"""How fast a drafter trains and where the time of a step goes; how memory grows with the number of blocks.

    python benchmarks/training_speed.py --data answers.jsonl --states <folder> [--head none] [--block-size 16]
    python benchmarks/training_speed.py --data answers.jsonl --states <folder> --anchors 64 --anchors 512 --at-once 64

Steps are those of `lilicorr train`, with the target's states already kept. Each `--anchors` is a process of its own, so
that its peak of resident memory is its own.
"""

import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from lilicorr.hub.targets import TargetUnavailableError, smollm2
from lilicorr.hub.terminal import tracked
from lilicorr.training.anchors import sample_blocks
from lilicorr.training.data import Example, batches, collate
from lilicorr.training.losses.joint import JointObjective
from lilicorr.training.losses.terms import Objective
from lilicorr.training.optimizer import build_optimizer
from lilicorr.training.settings import TrainSettings
from lilicorr.training.sources import training_examples
from lilicorr.training.tally import Tally
from lilicorr.training.target import TargetStates, load_target
from lilicorr.training.train import build_drafter
from rich import box
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

STAGES = ("read", "forward", "backward", "optimiser")
PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
console = Console(width=None if sys.stdout.isatty() else 140)


def main(
    data: Annotated[list[str], typer.Option(help="JSONL file of `lilicorr regenerate`; may be given several times.")],
    states: Annotated[Path | None, typer.Option(help="Folder that keeps the target's states; unset: new.")] = None,
    target: Annotated[str | None, typer.Option(help="The target; SmolLM2-135M-Instruct unless given.")] = None,
    head: Annotated[str, typer.Option(help="none or lilicorr.")] = "lilicorr",
    block_size: Annotated[int, typer.Option(min=2)] = 16,
    anchors: Annotated[list[int] | None, typer.Option(min=1, help="Blocks a sequence; one or more times.")] = None,
    at_once: Annotated[int, typer.Option(min=0, help="Blocks whose activations are kept at one time; 0: all.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences a step.")] = 2,
    max_length: Annotated[int, typer.Option(min=2, help="Tokens a sequence.")] = 400,
    beta: Annotated[float, typer.Option(help="Decay of the slots' weights.")] = 7.0,
    sample_slots: Annotated[bool, typer.Option("--sample-slots", help="See `Objective`.")] = False,
    mask_token_id: Annotated[int, typer.Option(help="An embedding row that fills a block.")] = 16,
    steps: Annotated[int, typer.Option(min=1)] = 10,
) -> None:
    """Run the benchmark and print its table."""
    try:
        source = target or str(smollm2())
    except TargetUnavailableError as error:
        raise SystemExit(str(error)) from None
    table = Table(title=f"{head}, block {block_size}, {batch_size} sequences a step", box=box.MARKDOWN)
    for name in ("anchors", "blocks/s", "ms a step", *STAGES, "matrix products", "peak MiB", "of them the steps'"):
        table.add_column(name, justify="right")
    with tempfile.TemporaryDirectory() as folder:
        for count in tracked(anchors or [32], "numbers of blocks"):
            settings = TrainSettings(
                target=source,
                data=data,
                output=folder,
                states=str(states or folder),
                head_type=head,
                block_size=block_size,
                config={"mask_token_id": mask_token_id},
                anchors=count,
                blocks_at_once=at_once,
                batch_size=batch_size,
                max_length=max_length,
                max_examples=(steps + 6) * batch_size,
                objective=Objective(beta=beta, sample_slots=sample_slots),
            )
            figures = in_own_process(settings, steps)
            table.add_row(str(count), *_cells(figures))
    console.print(table)
    console.print(f"fp32, {torch.get_num_threads()} threads, torch {torch.__version__}", style="dim")


def _cells(figures: dict[str, Any]) -> list[str]:
    seconds = figures["seconds"]
    shares = [f"{100 * figures['stages'][stage] / seconds:.0f} %" for stage in STAGES]
    rates = [f"{figures['blocks'] / seconds:.1f}", f"{1000 * seconds / figures['steps']:.0f}"]
    memory = [f"{figures[name] / 2**20:.0f}" for name in ("peak", "added")]
    return [*rates, *shares, f"{100 * figures['products']:.0f} %", *memory]


def in_own_process(settings: TrainSettings, steps: int) -> dict[str, Any]:
    """What `measure` returns, from a fresh process.

    Raises:
        SystemExit: if it fails.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(measure, settings, steps).result()
        except (ValueError, OSError) as error:
            raise SystemExit(" ".join(str(error).split())) from None


def measure(settings: TrainSettings, steps: int) -> dict[str, Any]:
    """Seconds of `steps` training steps by stage, their blocks, and the peak memory that they added.

    Returns:
        `seconds`, `stages` (seconds by name), `blocks`, `steps`, `products` (share of matrix products in two further
        steps, by torch's profiler), `peak` (bytes of resident memory) and `added` (those that the steps added to it).
    """
    settings.validate()
    run = Steps(settings)
    before = _peak()
    for _ in range(3):
        run.step()
    run.spent = dict.fromkeys(STAGES, 0.0)
    started, blocks = time.perf_counter(), run.blocks
    for _ in range(steps):
        run.step()
    seconds, blocks, stages = time.perf_counter() - started, run.blocks - blocks, dict(run.spent)
    peak = _peak()
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        run.step()
        run.step()
    spent = {event.key: event.self_cpu_time_total for event in recorded.key_averages()}
    products = sum(spent.get(name, 0.0) for name in PRODUCTS) / sum(spent.values())
    return {
        "seconds": seconds, "stages": stages, "blocks": blocks, "steps": steps, "products": products,
        "peak": peak, "added": peak - before,
    }  # fmt: skip


def _peak() -> int:
    """Bytes of the largest resident set this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Steps:
    """Training steps of `settings` on one process, their stages timed."""

    def __init__(self, settings: TrainSettings) -> None:
        self.settings = settings
        target, tokenizer = load_target(settings.target, settings.dtype)
        target.requires_grad_(False)
        examples, mask = training_examples(settings, tokenizer, target.config, Tally())
        self.order = [[examples[i] for i in group] for group in batches(examples, settings.batch_size, 0, 0)]
        drafter = build_drafter(settings, target, mask)
        self.parameters = list(drafter.parameters())
        self.joint = JointObjective(
            drafter, target, settings.objective, settings.blocks_together, settings.blocks_at_once
        )
        self.optimizer = build_optimizer(drafter, settings)
        self.states = TargetStates(target, drafter.config.target_layer_ids, Path(settings.states or settings.output))
        self._keep_states(examples)
        self.spent = dict.fromkeys(STAGES, 0.0)
        self.done = self.blocks = 0

    def _keep_states(self, examples: Sequence[Example]) -> None:
        for example in examples:
            self.states([example], collate([example]))

    def step(self) -> None:
        """One step; adds to `spent` and `blocks`."""
        times = [time.perf_counter()]
        group = self.order[self.done % len(self.order)]
        batch = collate(group)
        target_hidden, last = self.states(group, batch)
        generator = torch.Generator().manual_seed(self.done)
        settings = self.settings
        drawn = sample_blocks(batch.input_ids, batch.loss_mask, settings.block_size, settings.anchors, generator)
        times.append(time.perf_counter())
        sums = self.joint(batch.input_ids, target_hidden, last, drawn)
        times.append(time.perf_counter())
        self.joint.loss(sums, sums).backward()
        times.append(time.perf_counter())
        torch.nn.utils.clip_grad_norm_(self.parameters, settings.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        times.append(time.perf_counter())
        for stage, began, ended in zip(STAGES, times, times[1:], strict=False):
            self.spent[stage] += ended - began
        self.done += 1
        self.blocks += int(drawn.keep.sum())


if __name__ == "__main__":
    typer.run(main)
