"""Where the time of one draft goes: backbone, LM head, lattice, and all of it, by how many slots are drafted.

    python benchmarks/draft.py [--drafter <folder>] [--target <folder>]

Medians over repeated drafts on a context of random states; the committed rows of one block enter with each.
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from lilicorr.cli import EMBEDDED_DRAFTER
from lilicorr.evaluation.loading import LoadingError, load_pair
from lilicorr.hub.targets import TargetUnavailableError, smollm2
from lilicorr.hub.terminal import loading, tracked
from lilicorr.kernels.few_rows import FewRows
from lilicorr.modeling_lilicorr.lattice import Block
from rich import box
from rich.console import Console
from rich.table import Table

NEW_ROWS = 2  # context rows that a draft takes in: about what a block commits
console = Console()


def main(
    drafter: Annotated[Path, typer.Option(help="Folder of the drafter.")] = EMBEDDED_DRAFTER,
    target: Annotated[str | None, typer.Option(help="Its target; SmolLM2-135M-Instruct unless given.")] = None,
    context: Annotated[int, typer.Option(min=1, help="Rows of context before the first draft.")] = 256,
    repeats: Annotated[int, typer.Option(min=1)] = 40,
    dtype: Annotated[str, typer.Option(help="auto, fp32, bf16 or fp16.")] = "auto",
    device: Annotated[str, typer.Option()] = "auto",
) -> None:
    """Run the benchmark and print its table."""
    try:
        source = target or smollm2()
        with loading("Loading target and drafter", source, drafter):
            pair = load_pair(source, {"drafter": str(drafter)}, dtype=dtype, device=device)
    except (LoadingError, TargetUnavailableError) as error:
        raise SystemExit(str(error)) from None
    table = Table(title="milliseconds a draft", box=box.MARKDOWN)
    for name in ("slots", "backbone", "LM head", "head", "all stages", "whole draft"):
        table.add_column(name, justify="right")
    slots = pair.drafters["drafter"].config.num_slots
    for count in tracked(sorted({1, 2, 3, 4, 5, slots} & set(range(1, slots + 1))), "numbers of slots"):
        with FewRows(pair.drafters["drafter"]).multiplied():  # as the decoding loop does
            stages = measure(pair.target, pair.drafters["drafter"], context, count, repeats)
        parts = [1000 * stages[name] for name in ("backbone", "lm_head", "head")]
        table.add_row(str(count), *(f"{part:.2f}" for part in [*parts, sum(parts), 1000 * stages["draft"]]))
    console.print(table)
    console.print(f"{str(pair.target.dtype).removeprefix('torch.')} on {pair.target.device}", style="dim")


@torch.inference_mode()
def measure(target: Any, drafter: Any, context: int, slots: int, repeats: int) -> dict[str, float]:
    """Median seconds of `draft` and of its stages when `slots` of a block are drafted."""
    config, embed = drafter.config, target.get_input_embeddings()
    lm_head = target.get_output_embeddings()
    if target.device.type == "cpu":
        lm_head = drafter.fast_logits.of(lm_head) or lm_head  # as `generate` does
    cache = drafter.new_cache()
    generator = torch.Generator().manual_seed(0)
    anchor = torch.tensor([config.vocab_size // 2], device=drafter.device)

    def states(rows: int) -> torch.Tensor:
        shape = (1, rows, len(config.target_layer_ids) * config.hidden_size)
        return torch.randn(shape, generator=generator).to(drafter.device, drafter.dtype)

    def draft(rows: int = NEW_ROWS) -> Any:
        positions = torch.arange(cache.length, cache.length + rows, device=drafter.device)[None]
        return drafter.draft(anchor, states(rows), positions, cache, embed, lm_head, num_slots=slots)

    def backbone() -> torch.Tensor:
        positions = torch.arange(cache.length, cache.length + NEW_ROWS, device=drafter.device)[None]
        block = positions[:, -1:] + 1 + torch.arange(1 + slots, device=drafter.device)
        projected = drafter.project_context(states(NEW_ROWS))
        noise = embed(drafter.block_ids(anchor, slots))
        return drafter.decode_block(noise, projected, block, positions, cache=cache)

    draft(context)
    rows = backbone()
    hidden = rows[:, 1:]
    logits = lm_head(hidden)[..., : config.vocab_size]
    block = Block(hidden, logits, anchor, drafter.project_context(states(1))[:, -1], None, embed, None, rows[:, 0])
    return {
        "draft": median_seconds(draft, repeats, drafter.device),
        "backbone": median_seconds(backbone, repeats, drafter.device),
        "lm_head": median_seconds(lambda: lm_head(hidden), repeats, drafter.device),
        "head": median_seconds(lambda: drafter.head.draft(block), repeats, drafter.device),
    }


def median_seconds(work: Callable[[], Any], repeats: int, device: torch.device) -> float:
    """The median time of `work` over `repeats` calls after three that do not count."""
    times = []
    for _ in range(3 + repeats):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times[3:])


if __name__ == "__main__":
    typer.run(main)
