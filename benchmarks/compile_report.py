"""Compile every Triton kernel for a GPU that need not be there, and print what the assembler makes of it.

    python benchmarks/compile_report.py

For each kernel and each of its served shapes: registers a thread, bytes of shared memory a program, bytes spilled.
Ends with an error if anything spills. `TRITON_INTERPRET` must be unset.
"""

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from lilicorr.kernels import (
    lattice_attention_triton,
    lattice_nodes_triton,
    lattice_products_triton,
    topk_triton,
    walk_triton,
)
from lilicorr.kernels.choice import interpreted, triton_installed

POINTERS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.int32: "*i32"}
POINTERS |= {torch.int64: "*i64", torch.bool: "*i1"}

LOAD = r"ld\.global(?:\.\w+)*?(?:\.v(\d))?\.[bfsu](\d+)"
COPY_TO_SHARED = r"cp\.async\.c[ag]\.shared\.global \[.*?\], \[.*?\], (0x[0-9a-f]+)"


@dataclass(frozen=True)
class Compiled:
    """One kernel at one shape: what `ptxas` reports of it.

    Attributes:
        name: of the kernel and its shape.
        registers: a thread.
        shared: bytes of shared memory a program.
        spilled: bytes of registers stored to and loaded from local memory.
        wide: whether row offsets are 64 bits wide in the intermediate code.
        vectorised: the widest global load, in bits a lane.
        tensor_cores: whether it multiplies on them.
    """

    name: str
    registers: int
    shared: int
    spilled: int
    wide: bool
    vectorised: int
    tensor_cores: bool


def main(
    arch: Annotated[int, typer.Option(help="Compute capability, 90 for H100 and H200.")] = 90,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line instead of a table.")] = False,
) -> None:
    """Compile and print."""
    if not triton_installed():
        raise SystemExit("triton is not installed; pip install 'lilicorr[triton]' (Linux).")
    if interpreted():
        raise SystemExit("TRITON_INTERPRET is set, which leaves nothing to compile; unset it.")
    if not as_json:
        print("| kernel | registers | shared bytes | spilled bytes | widest load | tensor cores |")
        print("|---|---:|---:|---:|---:|---|")
    spilled = 0
    for compiled in report(arch):
        spilled += compiled.spilled
        if as_json:
            print(json.dumps(asdict(compiled)), flush=True)
            continue
        cells = [compiled.registers, compiled.shared, compiled.spilled, compiled.vectorised]
        cores = "yes" if compiled.tensor_cores else ""
        print(f"| {compiled.name} | {' | '.join(map(str, cells))} | {cores} |", flush=True)
    if spilled:
        raise SystemExit(f"{spilled} bytes of registers spill; give the kernel more warps or smaller tiles.")


def report(arch: int) -> Iterator[Compiled]:
    """Every kernel at the shapes of `cases`, compiled for compute capability `arch`."""
    for name, kernel, arguments in chain(cases(), lattice_cases()):
        yield compile_kernel(name, kernel, arguments, arch)


def cases() -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Name, kernel and arguments: a torch dtype is a pointer, text an integer's or float's type, else constant.

    `:16` marks what the launcher finds to be a multiple of 16, as strides of rows at these sizes are.
    """
    for dtype, vocab, k in (
        (torch.bfloat16, 151936, 8),
        (torch.float32, 49152, 8),
        (torch.float16, 151936, 16),
        (torch.bfloat16, 151936, 32),
        (torch.bfloat16, 262144, 8),
    ):
        name = f"{short(dtype)} V={vocab}"
        shape = {"logits": dtype, "stride_row": "i32:16", "stride_column": 1, "vocab": "i32:16", "tiles": "i32"}
        sums = {"maxima": torch.float32, "sums": torch.float32}
        settings = topk_triton.tile_settings()
        yield f"tile_maxima {name}", topk_triton.tile_maxima, shape | sums | {"programs_a_row": "i32"} | settings
        settings = topk_triton.merge_settings(vocab, k, with_features=True)
        results = dict.fromkeys(("values_out", "normalisers_out", "features_out"), torch.float32)
        arguments = shape | sums | results | {"indices_out": torch.int64} | settings
        yield f"merge_tiles {name} K={k}", topk_triton.merge_tiles, arguments
    for dtype, slots, count, dim, rule, residual in (
        (torch.bfloat16, 15, 8, 1024, "greedy", False),
        (torch.bfloat16, 15, 8, 1024, "exact", False),
        (torch.float32, 15, 8, 1024, "greedy", False),
        (torch.float32, 7, 8, 256, "exact", False),
        (torch.float16, 15, 4, 64, "greedy", False),
        (torch.bfloat16, 15, 16, 1024, "exact", False),
        (torch.bfloat16, 15, 8, 1024, "greedy", True),
        (torch.bfloat16, 15, 8, 1024, "exact", True),
        (torch.float32, 7, 8, 256, "greedy", True),
        (torch.bfloat16, 15, 16, 1024, "longest", True),
        (torch.bfloat16, 15, 8, 1024, "longest", False),
    ):
        name = f"{short(dtype)} S={slots} K={count} d_e={dim} {rule}"
        name += " residual" if residual else ""
        kernel = walk_triton.score_and_walk_kernel
        settings = walk_triton.walk_settings(slots, count, dim, True, rule, False, residual, residual)
        arguments = {name: "i32:16" for name in kernel.arg_names if name.startswith("stride_")}
        arguments |= {"stride_candidates_slot": "i32", "stride_candidates_rank": 1, "stride_candidates_block": "i32"}
        arguments |= {"stride_log_probs_slot": "i32", "stride_log_probs_rank": "i32", "stride_log_probs_block": "i32"}
        arguments |= dict.fromkeys(("out", "inp", "anchor_out"), dtype) | {"eps": "fp32"}
        arguments |= {"scale": torch.float32, "log_probs": torch.float32} if residual else {"scale": "fp32"}
        arguments |= dict.fromkeys(("candidates", "words", "tokens_out", "picks_out"), torch.int64)
        arguments.setdefault("log_probs", torch.int64)  # stands in for none
        arguments |= {"scores_out": torch.float32, "arrived": torch.int32} | settings
        yield f"score_and_walk {name}", kernel, arguments


def lattice_cases() -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """As `cases`, of the lattice network: one block and 32 at the paper's sizes in bf16, other sizes and dtypes."""
    attention, nodes, products = lattice_attention_triton, lattice_nodes_triton, lattice_products_triton
    for dtype, blocks, heads, dim, count in (
        (torch.bfloat16, 1, 8, 128, 8),
        (torch.bfloat16, 32, 8, 128, 8),
        (torch.float16, 32, 4, 72, 16),
        (torch.float32, 1, 8, 128, 8),
    ):
        settings = attention.attention_settings(blocks, heads, 31, count, dim, dtype)
        arguments = dict.fromkeys(("packed", "relative", "same", "out"), dtype) | settings
        arguments |= {"stride_block": "i32:16", "stride_row": "i32:16", "scale": "fp32"}
        arguments |= dict.fromkeys(("length", "query_tiles"), "i32")
        name = f"lattice_attention {short(dtype)} N={blocks} heads={heads} dim={dim} K={count}"
        yield name, attention.lattice_attention_kernel, arguments
    for dtype, blocks, width in ((torch.bfloat16, 1, 1024), (torch.bfloat16, 32, 1024), (torch.float32, 1, 256)):
        name = f"{short(dtype)} N={blocks} w={width}"
        few, rows = blocks == 1, blocks * 120
        pointers = {argument: dtype for argument in nodes.node_sum_kernel.arg_names[:8]}
        scalars = {"slots": "i32", "eps": "fp32", "COUNT": 8}
        settings = nodes.row_settings(width)
        yield f"node_sum {name}", nodes.node_sum_kernel, pointers | scalars | settings
        pointers = {argument: dtype for argument in nodes.norm_kernel.arg_names[:6]} | {"valid": torch.bool}
        arguments = pointers | {"eps": "fp32", "ADD": few, "MASK": not few} | settings
        yield f"{'add' if few else 'masked'}_norm {name}", nodes.norm_kernel, arguments
        pointers = {argument: dtype for argument in nodes.confidence_hidden_kernel.arg_names[:6]}
        arguments = pointers | {"features": torch.float32, "rows": "i32", "norm_eps": "fp32"}
        arguments |= nodes.confidence_settings(rows, width)
        yield f"confidence_hidden {name}", nodes.confidence_hidden_kernel, arguments
        # What is 1 at a launch is a constant.
        counts = dict.fromkeys(("length", "rows", "row_tiles"), "i32") | {"anchors": 1 if few else "i32"}
        for kernel, pointed, columns in (
            (products.linear_silu_kernel, 4, 2 * width),
            (products.fuse_kernel, 5, width),
            (products.project_kernel, 11, width),
        ):
            fusing, both = kernel is products.fuse_kernel, 2 * columns if pointed == 11 else columns
            settings = products.product_settings(rows, width, both, dtype, fusing) | {"COLUMNS": columns}
            arguments = counts | {argument: dtype for argument in kernel.arg_names[:pointed]} | settings
            yield f"{kernel.__name__.removesuffix('_kernel')} {name}", kernel, arguments


def short(dtype: torch.dtype) -> str:
    """`dtype` without its module."""
    return str(dtype).removeprefix("torch.")


def compile_kernel(name: str, kernel: Any, arguments: dict[str, Any], arch: int) -> Compiled:
    """Compile `kernel` with `arguments` as `cases` writes them and ask the assembler for its figures."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature, constants, divisible = {}, {}, {}
    for place, argument in enumerate(kernel.arg_names):
        value = arguments[argument]
        if isinstance(value, torch.dtype):
            signature[argument] = POINTERS[value]
            divisible[(place,)] = [["tt.divisibility", 16]]
        elif isinstance(value, str):
            signature[argument], _, multiple = value.partition(":")
            if multiple:
                divisible[(place,)] = [["tt.divisibility", 16]]
        else:
            signature[argument], constants[argument] = "constexpr", value
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=divisible)
    options = {option: value for option, value in arguments.items() if option in ("num_warps", "num_stages")}
    options["enable_fp_fusion"] = True
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    ptx = built.asm["ptx"]
    log = _assemble(ptx, arch)
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", log)
    if registers is None or not spills:
        raise SystemExit(f"ptxas says neither registers nor spills of {name}: {log.strip()}")
    widths = [int(lanes or 1) * int(bits) for lanes, bits in re.findall(LOAD, ptx)]
    widths += [8 * int(size, 16) for size in re.findall(COPY_TO_SHARED, ptx)]
    return Compiled(
        name=name,
        registers=int(registers[1]),
        shared=built.metadata.shared,
        spilled=sum(map(int, spills)),
        wide=_wide_offsets(built.asm["ttir"]),
        vectorised=max(widths, default=0),
        tensor_cores="mma" in ptx,
    )


def _assemble(ptx: str, arch: int) -> str:
    """What `ptxas -v`, the one that triton uses, says about `ptx`."""
    from triton.backends.nvidia.compiler import get_ptxas

    assembler = get_ptxas(arch).path
    version = re.search(r"\.target (sm_\w+)", ptx)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(ptx)
        command = [assembler, "-v", f"--gpu-name={version[1] if version else f'sm_{arch}'}", file, "-o", f"{file}.o"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"ptxas refuses the kernel: {done.stderr.strip()}")
    return done.stderr


def _wide_offsets(ttir: str) -> bool:
    """Whether every offset that moves a whole row's or block's pointer is 64 bits wide."""
    moves = re.findall(r"tt\.addptr [^:\n]*: !tt\.ptr<\w+>, (i\d+)", ttir)
    return bool(moves) and set(moves) == {"i64"}


if __name__ == "__main__":
    typer.run(main)
