"""What verifying a few rows costs, with linear layers as they are and with `kernels/few_rows.py`, beside one row.

    python benchmarks/few_rows.py [--target <folder>] [--rows 2,4,8,16,32]

Medians of the target's forward pass behind a context, in fp32 on the CPU, alternating in one run.
"""

import statistics
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from lilicorr.evaluation.files import writable
from lilicorr.evaluation.machine import machine
from lilicorr.hub.targets import TargetUnavailableError, smollm2
from lilicorr.hub.terminal import tracked
from lilicorr.kernels.few_rows import FewRows
from record import about, write_rows
from rich import box
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

console = Console()


def main(
    target: Annotated[str | None, typer.Option(help="Target; SmolLM2-135M-Instruct unless given.")] = None,
    rows: Annotated[str, typer.Option(help="Numbers of rows, with commas between.")] = "2,3,4,6,8,12,16,24,32,40",
    context: Annotated[int, typer.Option(min=1, help="Tokens in the cache.")] = 128,
    repeats: Annotated[int, typer.Option(min=1)] = 15,
    record: Annotated[Path | None, typer.Option(help="Write a CSV file of its figures, as in results, here.")] = None,
) -> None:
    """Run the benchmark and print its table."""
    counts = [int(part) for part in rows.split(",") if part.strip().isdecimal() and int(part) > 0]
    if not counts:
        raise SystemExit(f"--rows is {rows!r}, expected whole numbers with commas between, such as 2,4,8.")
    if record is not None and (record.is_dir() or not writable(record.parent)):
        raise SystemExit(f"--record {record} cannot be written; name a file in a folder that can.")
    try:
        source = target or str(smollm2())
    except TargetUnavailableError as error:
        raise SystemExit(str(error)) from None
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    report = measure(model, counts, context, repeats)
    table = Table(title="milliseconds a pass of the target", box=box.MARKDOWN)
    for name in ("rows", "as they are", "the other way round", "beside one row"):
        table.add_column(name, justify="right")
    one = report[1]["plain"]
    for count, times in report.items():
        table.add_row(
            str(count), *(f"{1000 * times[kind]:.1f}" for kind in ("plain", "few")), f"{times['few'] / one:.2f}x"
        )
    console.print(table)
    ran_on = machine(model.device)
    console.print(f"float32; {ran_on}", style="dim")
    if record is not None:
        recorded = [
            {"rows": count, **{f"{kind}_ms": 1000 * seconds for kind, seconds in times.items()}}
            for count, times in report.items()
        ]
        write_rows(record, recorded, about(ran_on))


@torch.inference_mode()
def measure(target: Any, counts: list[int], context: int, repeats: int) -> dict[int, dict[str, float]]:
    """Median seconds of a pass by its rows, `plain` and with `few` rows' products; one row first."""
    generator = torch.Generator().manual_seed(0)
    vocab = target.config.get_text_config().vocab_size

    def ids(count: int) -> torch.Tensor:
        return torch.randint(vocab, (1, count), generator=generator)

    few_rows = FewRows(target)
    cache = target(ids(context), use_cache=True).past_key_values
    report = {}
    for count in tracked([1, *counts], "numbers of rows"):
        tokens = ids(count)

        times: dict[str, list[float]] = {"plain": [], "few": []}
        for _ in range(3 + repeats):
            for kind, products in {"plain": nullcontext(), "few": few_rows.multiplied()}.items():
                started = time.perf_counter()
                with products:
                    target(tokens, past_key_values=cache)
                    cache.crop(-count)
                times[kind].append(time.perf_counter() - started)
        report[count] = {kind: statistics.median(each[3:]) for kind, each in times.items()}
    return report


if __name__ == "__main__":
    typer.run(main)
