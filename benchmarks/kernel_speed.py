"""Kernels against their reference, `torch.compile` of it, and the time that the memory needs, in one run.

    python benchmarks/kernel_speed.py --out kernels.json
    TRITON_INTERPRET=1 python benchmarks/kernel_speed.py --dry-run

On a GPU every arm is captured alike: one CUDA graph calls it once on each of several inputs that together are larger
than the L2 cache, and the median over replays is divided by their number. The head also runs uncaptured, as a caller
without graphs sees it. The floor is the bytes that a call cannot avoid over the read bandwidth measured in the same
run. `--dry-run` takes tiny sizes and the CPU, to prove the script; its times mean nothing.
"""

import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from lilicorr.evaluation.files import write_json
from lilicorr.kernels import lattice_reference, reference
from lilicorr.kernels.choice import interpreted, triton_installed
from lilicorr.kernels.lattice_attention_triton import lattice_attention
from lilicorr.kernels.score_and_walk import RULES, score_and_walk
from lilicorr.kernels.topk_logsumexp import topk_features, topk_logsumexp
from lilicorr.modeling_lilicorr.configuration_lilicorr import LiLiCorrConfig
from lilicorr.modeling_lilicorr.head_lilicorr import LiLiCorrHead
from lilicorr.modeling_lilicorr.lattice import Block
from timing import about, prepare, random, seconds
from torch import Tensor
from transformers import initialization as init

SCALE, EPS = 8.0, 1e-6
DRY_RUN_CACHE = 1 << 14  # bytes that stand for the L2 cache where there is none


@dataclass(frozen=True)
class Sizes:
    """One target's sizes and how often things are measured."""

    name: str
    hidden: int
    vocab: int
    slots: int = 15
    candidates: int = 8
    width: int = 1024
    heads: int = 8
    replays: int = 50


TARGETS = (Sizes("Qwen3-4B", 2560, 151936), Sizes("Qwen3-8B", 4096, 151936))
DRY_RUN_TARGETS = (Sizes("tiny", 64, 700, slots=3, candidates=4, width=64, replays=2),)


@dataclass
class Case:
    """One measured call.

    Attributes:
        name: kernel and size.
        blocks: N.
        floor_bytes: bytes that one call must move, each of them once.
        make: a seed to one input.
        arms: name to a function of one input; the first is the reference.
    """

    name: str
    blocks: int
    floor_bytes: int
    make: Callable[[int], tuple[Any, ...]]
    arms: dict[str, Callable[..., Any]]


def main(
    out: Annotated[Path | None, typer.Option(help="Write a JSON report here.")] = None,
    blocks: Annotated[list[int] | None, typer.Option(help="N; 1, 4, 16 and 32 unless given.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Tiny sizes on the CPU.")] = False,
    compiled: Annotated[bool, typer.Option(help="Also measure torch.compile of the reference.")] = True,
) -> None:
    """Run the benchmark, print one table, write the report."""
    if not dry_run and not torch.cuda.is_available():
        raise SystemExit("No CUDA device is here; run on one, or give --dry-run to prove the script on the CPU.")
    device = torch.device("cpu" if dry_run else "cuda")
    cache = DRY_RUN_CACHE if dry_run else torch.cuda.get_device_properties(device).L2_cache_size
    bandwidth = read_bandwidth(device, 1 << 20 if dry_run else 1 << 32)
    if not dry_run:
        print(f"{torch.cuda.get_device_name(device)}: reads {bandwidth / 1e12:.2f} TB/s, L2 {cache / 2**20:.0f} MiB\n")
    rows = []
    with torch.no_grad():
        for sizes in DRY_RUN_TARGETS if dry_run else TARGETS:
            for count in blocks or ([1, 2] if dry_run else [1, 4, 16, 32]):
                for case in cases(sizes, count, device, compiled):
                    rows.append(measure(case, sizes, device, cache, bandwidth))
                    print("\n".join(table(rows[-1:], header=len(rows) == 1)), flush=True)
    report = {"machine": about(device), "dry_run": dry_run, "bytes_per_second": bandwidth, "rows": rows}
    if out is not None:
        write_json(out, report)


def cases(sizes: Sizes, blocks: int, device: torch.device, compiled: bool) -> Iterator[Case]:
    """Every measured call of one target at `blocks` blocks."""
    dtype = torch.bfloat16
    slots, k, width = sizes.slots, sizes.candidates, sizes.width
    lattice_bytes = blocks * width * dtype.itemsize * (2 * slots * k - k + 1)  # the last slot's out vectors stay unread
    residual_bytes = lattice_bytes + blocks * slots * k * 4

    def logits(seed: int) -> tuple[Tensor, int]:
        return random(seed, (blocks * slots, sizes.vocab), dtype, device).mul_(4), k

    def lattice(seed: int) -> tuple[Any, ...]:
        shape = (blocks, slots, k, width)
        out, inp = (random(seed + shift, shape, dtype, device) for shift in (0, 1))
        anchor_out = random(seed + 2, (blocks, width), dtype, device)
        candidates = torch.arange(blocks * slots * k, device=device).view(blocks, slots, k)
        return out, inp, anchor_out, candidates, SCALE, EPS

    def residual(seed: int) -> tuple[Any, ...]:
        gated = torch.full((1,), SCALE / 2, device=device)
        log_probs = random(seed + 3, (blocks, slots, k), torch.float32, device)
        return *lattice(seed)[:4], gated, EPS, "greedy", log_probs

    def packed(seed: int) -> tuple[Any, ...]:
        shapes = (blocks, slots * k, 3 * width), (sizes.heads, 2 * slots + 1), (sizes.heads,)
        return *(random(seed + shift, shape, dtype, device) for shift, shape in enumerate(shapes)), k

    def features(logits: Tensor, k: int) -> tuple[Tensor, ...]:
        values, indices, normaliser = reference.topk_logsumexp(logits, k)
        return values, indices, normaliser, reference.confidence_features(values - normaliser[:, None])

    logit_bytes = blocks * slots * sizes.vocab * dtype.itemsize
    packed_bytes = 4 * blocks * slots * k * width * dtype.itemsize  # queries, keys and values, and what is written
    kernels: list[tuple[str, int, Callable[[int], Any], Callable[..., Any], Callable[..., Any]]] = [
        ("topk_logsumexp", logit_bytes, logits, reference.topk_logsumexp, topk_logsumexp),
        ("topk_features", logit_bytes, logits, features, topk_features),
        ("lattice_attention", packed_bytes, packed, lattice_reference.lattice_attention, lattice_attention),
        *(
            (
                RULES[rule].__name__,
                lattice_bytes,
                lattice,
                partial(reference.score_and_walk, rule=rule),
                partial(score_and_walk, rule=rule),
            )
            for rule in RULES
        ),
        ("residual greedy_walk", residual_bytes, residual, reference.score_and_walk, score_and_walk),
    ]
    for name, floor_bytes, make, defined, dispatcher in kernels:
        arms: dict[str, Callable[..., Any]] = {"reference": defined}
        if compiled:
            arms["compile"] = compile_on(device, defined)
        if device.type == "cuda" or (triton_installed() and interpreted()):
            arms["triton"] = partial(chosen, "triton", dispatcher)
        yield Case(f"{name} {sizes.name}", blocks, floor_bytes, make, arms)

    head, embedding = build_head(sizes, device)
    weights = sum(parameter.numel() for parameter in head.parameters()) * dtype.itemsize

    def nodes(seed: int) -> tuple[Any, ...]:
        shapes = (slots, k, sizes.hidden), (slots, k, 5), (slots, sizes.hidden), (sizes.hidden,)
        return *(random(seed + shift, (blocks, *shape), dtype, device) for shift, shape in enumerate(shapes)), None

    inputs = blocks * (slots * k * (sizes.hidden + 5) + (slots + 1) * sizes.hidden) * dtype.itemsize
    vectors = blocks * width * (2 * slots * k + 1) * dtype.itemsize
    arms = {choice: partial(chosen, choice, head._vectors) for choice in ("reference", "auto")}
    yield Case(f"lattice_network {sizes.name}", blocks, weights + inputs + vectors, nodes, arms)

    def block(seed: int) -> tuple[Block]:
        hidden = random(seed, (blocks, slots, sizes.hidden), dtype, device)
        anchor_state = random(seed + 1, (blocks, sizes.hidden), dtype, device)
        ids = torch.zeros(blocks, dtype=torch.int64, device=device)
        spread = logits(seed + 2)[0].view(blocks, slots, -1)
        return (Block(hidden, spread, ids, anchor_state, None, embedding),)

    arms = {"reference": partial(chosen, "reference", head.draft), "auto": partial(chosen, "auto", head.draft)}
    if device.type == "cuda":
        # A star keeps an arm from being captured.
        arms = {"reference*": arms["reference"], "auto*": arms["auto"], **arms}
    yield Case(f"head {sizes.name}", blocks, weights + logit_bytes, block, arms)


def build_head(sizes: Sizes, device: torch.device) -> tuple[LiLiCorrHead, torch.nn.Embedding]:
    """A random head of `sizes` in bf16, and an embedding for its candidates."""
    torch.manual_seed(0)
    settings = {
        "num_candidates": sizes.candidates,
        "hidden_size": sizes.width,
        "num_layers": 2,
        "num_heads": sizes.heads,
        "intermediate_size": 2 * sizes.width,
        "factor_dim": sizes.width,
        "logit_scale": SCALE,
        "vector_eps": EPS,
    }
    config = LiLiCorrConfig(
        hidden_size=sizes.hidden,
        vocab_size=sizes.vocab,
        block_size=sizes.slots + 1,
        mask_token_id=0,
        head_config=settings,
    )
    with device:
        head = LiLiCorrHead(config).to(torch.bfloat16).eval()
        embedding = torch.nn.Embedding(sizes.vocab, sizes.hidden, dtype=torch.bfloat16)
    for module in head.modules():
        initialise = getattr(module, "init_weights_with", None)
        if initialise is not None:
            initialise(init)
    return head, embedding


def chosen(choice: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)` with `LILICORR_KERNELS=choice`."""
    with kernels_chosen(choice):
        return function(*arguments)


@contextmanager
def kernels_chosen(choice: str) -> Iterator[None]:
    """`LILICORR_KERNELS=choice` for a while."""
    before = os.environ.get("LILICORR_KERNELS")
    os.environ["LILICORR_KERNELS"] = choice
    try:
        yield
    finally:
        del os.environ["LILICORR_KERNELS"]
        if before is not None:
            os.environ["LILICORR_KERNELS"] = before


def compile_on(device: torch.device, function: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compile` of `function`; a dry run only traces it, since the CPU's compiler is beside the point."""
    return torch.compile(function, dynamic=False, backend="inductor" if device.type == "cuda" else "eager")


def measure(case: Case, sizes: Sizes, device: torch.device, cache: int, bandwidth: float) -> dict[str, Any]:
    """Median microseconds a call of every arm, arms in turn, with ratios to the reference and to the floor."""
    copies = max(8, -(-2 * cache // case.floor_bytes))
    inputs = [case.make(1000 * number) for number in range(copies)]
    calls = {name: prepare(arm, inputs, device, not name.endswith("*")) for name, arm in case.arms.items()}
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(sizes.replays):
        for name, call in calls.items():
            samples[name].append(seconds(call, device) / copies)
    floor = case.floor_bytes / bandwidth
    base = statistics.median(samples["reference"])
    arms = {}
    for name, taken in samples.items():
        median = statistics.median(taken)
        arms[name] = {
            "microseconds": 1e6 * median,
            "to_reference": base / median,
            "to_floor": median / floor,
            "samples": len(taken),
        }
    return {
        "case": case.name,
        "blocks": case.blocks,
        "inputs": copies,
        "floor_bytes": case.floor_bytes,
        "floor_microseconds": 1e6 * floor,
        "arms": arms,
    }


def read_bandwidth(device: torch.device, size: int) -> float:
    """Bytes a second that a plain reduction over `size` bytes reads, the best of several."""
    store = torch.zeros(size // 4, device=device)
    store.sum()
    return max(size / seconds(store.sum, device) for _ in range(10))


def table(rows: list[dict[str, Any]], header: bool) -> list[str]:
    """Lines of a Markdown table, one for each arm of each row."""
    lines = []
    if header:
        lines = [
            "| case | N | arm | µs a call | to reference | to floor | floor µs |",
            "|---|---:|---|---:|---:|---:|---:|",
        ]
    for row in rows:
        for name, arm in row["arms"].items():
            figures = f"{arm['microseconds']:.1f} | {arm['to_reference']:.2f}× | {arm['to_floor']:.1f}×"
            lines.append(f"| {row['case']} | {row['blocks']} | {name} | {figures} | {row['floor_microseconds']:.1f} |")
    return lines


if __name__ == "__main__":
    typer.run(main)
