import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")
SCRIPT = Path(__file__).parents[2] / "benchmarks" / "compile_report.py"


def run(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """The script in a process of its own, since Triton's interpreter cannot be switched off in this one."""
    ours = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ours |= {"TRITON_CACHE_DIR": str(folder), **environment}
    return subprocess.run([sys.executable, SCRIPT, *arguments], env=ours, capture_output=True, text=True, check=False)


def test_kernels_compile_for_sm_90_without_a_gpu_and_spill_nothing(tmp_path):
    done = run(tmp_path, "--json")
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    kernels = [json.loads(line) for line in done.stdout.splitlines()]
    pooling = {"tile_maxima", "merge_tiles", "score_and_walk"}
    products = {"linear_silu", "fuse", "project"}  # whose tiles for many rows fill the card in few programs
    lattice = {"lattice_attention", "node_sum", "add_norm", "masked_norm", "confidence_hidden"}
    assert {kernel["name"].split()[0] for kernel in kernels} == pooling | products | lattice
    assert sum(kernel["name"].endswith("residual") for kernel in kernels) == 4
    assert {word for kernel in kernels for word in kernel["name"].split()} >= {"greedy", "exact", "longest"}
    for kernel in kernels:
        assert kernel["spilled"] == 0 and 0 < kernel["registers"] <= 128, kernel
        first = kernel["name"].split()[0]
        room = 100 if first in products else 56 if first == "lattice_attention" else 48
        assert kernel["shared"] <= room * 1024, kernel
        assert kernel["wide"], f"{kernel['name']} moves a row's pointer by 32 bits"
        assert kernel["vectorised"] == 128, kernel
        if first in products | {"lattice_attention", "score_and_walk"}:
            assert kernel["tensor_cores"] == ("float32" not in kernel["name"]), kernel


def test_the_interpreter_leaves_nothing_to_compile(tmp_path):
    done = run(tmp_path, TRITON_INTERPRET="1")
    assert done.returncode == 1 and done.stderr.startswith("TRITON_INTERPRET is set")
