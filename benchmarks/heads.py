"""What every head costs alone, at the paper's sizes: from hidden states and logits to drafted tokens.

    python benchmarks/heads.py [--hidden 2560] [--out heads.json]

Heads have the settings of their papers and random weights; they take turns, so that drift of the machine hits all
alike. On a GPU each is measured as called and as one CUDA graph. The target's LM head, which all need alike, is not
counted; a head that needs its logits for every slot reads them here.
"""

import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from lilicorr.evaluation.files import write_json
from lilicorr.evaluation.loading import LoadingError, resolve_device, resolve_dtype
from lilicorr.hub.terminal import tracked
from lilicorr.modeling_lilicorr.configuration_lilicorr import LiLiCorrConfig
from lilicorr.modeling_lilicorr.head_settings import HEAD_TYPES
from lilicorr.modeling_lilicorr.heads import build_head
from lilicorr.modeling_lilicorr.lattice import Block
from rich import box
from rich.console import Console
from rich.table import Table
from timing import about, prepare, random, seconds

BASE = "lilicorr"
console = Console(width=None if sys.stdout.isatty() else 140)


def main(
    hidden: Annotated[int, typer.Option(min=64, help="Width of the target.")] = 4096,
    vocab: Annotated[int, typer.Option(min=64, help="Its vocabulary.")] = 151936,
    block_size: Annotated[int, typer.Option(min=2)] = 16,
    blocks: Annotated[int, typer.Option(min=1, help="Blocks drafted at once.")] = 1,
    repeats: Annotated[int, typer.Option(min=1)] = 15,
    dtype: Annotated[str, typer.Option(help="auto, fp32, bf16 or fp16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, …")] = "auto",
    out: Annotated[Path | None, typer.Option(help="Write a JSON report here.")] = None,
) -> None:
    """Run the benchmark and print its table."""
    try:
        place = resolve_device(device)
        kind = resolve_dtype(dtype, place)
    except LoadingError as error:
        raise SystemExit(str(error)) from None
    with torch.inference_mode():
        report = measure(hidden, vocab, block_size, blocks, repeats, kind, place)
    modes = list(next(iter(report["heads"].values()))["milliseconds"])
    table = Table(title=f"hidden {hidden}, vocabulary {vocab}, {blocks} block(s) of {block_size}", box=box.MARKDOWN)
    table.add_column("head")
    for name in ("parameters (M)", *(part for mode in modes for part in (f"ms, {mode}", f"to {BASE}, {mode}"))):
        table.add_column(name, justify="right")
    for name, made in report["heads"].items():
        cells = [(f"{made['milliseconds'][mode]:.3f}", f"{made['to_base'][mode]:.2f}×") for mode in modes]
        table.add_row(name, f"{made['parameters'] / 1e6:.2f}", *(part for cell in cells for part in cell))
    console.print(table)
    console.print(f"{str(kind).removeprefix('torch.')}; {report['machine']}", style="dim")
    if out is not None:
        write_json(out, report)


def measure(
    hidden: int, vocab: int, block_size: int, blocks: int, repeats: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Any]:
    """Median milliseconds of every head's `draft`, `called` and, on a GPU, `captured`, and their ratios to `BASE`."""
    block = random_block(hidden, vocab, block_size - 1, blocks, dtype, device)
    heads = {name: fresh_head(name, hidden, vocab, block_size, dtype, device) for name in HEAD_TYPES}
    calls: dict[tuple[str, str], Callable[[], None]] = {}
    for mode in ("called", "captured") if device.type == "cuda" else ("called",):
        for name, head in heads.items():
            calls[name, mode] = prepare(partial(head.draft, block), [()], device, captured=mode == "captured")
    taken: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    for _ in tracked(range(repeats), "rounds"):
        for key, call in calls.items():
            taken[key].append(1000 * seconds(call, device))
    made: dict[str, Any] = {}
    for name, head in heads.items():
        medians = {mode: statistics.median(taken[each, mode]) for each, mode in calls if each == name}
        made[name] = {
            "parameters": sum(parameter.numel() for parameter in head.parameters()),
            "milliseconds": medians,
            "to_base": {mode: value / statistics.median(taken[BASE, mode]) for mode, value in medians.items()},
        }
    return {"machine": about(device), "repeats": repeats, "heads": made}


def random_block(hidden: int, vocab: int, slots: int, blocks: int, dtype: torch.dtype, device: torch.device) -> Block:
    """Blocks of random states and logits, with an embedding of the target's size."""
    embedding = torch.nn.Embedding(vocab, hidden, dtype=dtype, device=device)
    return Block(
        hidden=random(1, (blocks, slots, hidden), dtype, device),
        logits=random(2, (blocks, slots, vocab), dtype, device).mul_(4),
        anchor_ids=torch.zeros(blocks, dtype=torch.int64, device=device),
        anchor_state=random(3, (blocks, hidden), dtype, device),
        anchor_valid=None,
        embed=embedding,
        anchor_hidden=random(4, (blocks, hidden), dtype, device),
    )


def fresh_head(name: str, hidden: int, vocab: int, block_size: int, dtype: torch.dtype, device: torch.device) -> Any:
    """A head of its paper's sizes; all weights are random, zero-initialised ones too, so that nothing is skipped."""
    config = LiLiCorrConfig(
        hidden_size=hidden, vocab_size=vocab, block_size=block_size, mask_token_id=0, head_type=name
    )
    with device:
        head = build_head(config).to(dtype).eval()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return head


if __name__ == "__main__":
    typer.run(main)
