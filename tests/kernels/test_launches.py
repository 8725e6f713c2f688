"""Launches are fixed: constants follow from shapes and dtypes alone, and none is tried out to see which is fast."""

import pytest
import torch

from .conftest import DEVICE
from .test_score_and_walk import SCALE, random_lattice
from .test_topk_logsumexp import tied_logits

pytest.importorskip("triton")
from lilicorr.kernels import (
    lattice_attention_triton,
    lattice_nodes_triton,
    lattice_products_triton,
    topk_triton,
    walk_triton,
)
from triton.runtime.autotuner import Autotuner, Heuristics

ROOMS = (topk_triton, walk_triton, lattice_attention_triton, lattice_nodes_triton, lattice_products_triton)
KERNELS = {
    name: room
    for room in ROOMS
    for name, held in vars(room).items()
    if hasattr(held, "arg_names") and hasattr(held, "__getitem__")
}


class Recorded:
    """A kernel whose launches are noted: grid, numbers and constants, tensors by shape and dtype."""

    def __init__(self, name, kernel, launches):
        self.name, self.kernel, self.launches = name, kernel, launches

    def __getitem__(self, grid):
        def launch(*arguments, **constants):
            shapes = [(a.shape, a.dtype) if isinstance(a, torch.Tensor) else a for a in arguments]
            self.launches.append((self.name, grid, shapes, constants))
            return self.kernel[grid](*arguments, **constants)

        return launch


@pytest.fixture
def launches(monkeypatch):
    seen = []
    for name, room in KERNELS.items():
        if name.endswith("_kernel") or name in ("tile_maxima", "merge_tiles"):  # others are called by these
            monkeypatch.setattr(room, name, Recorded(name, getattr(room, name), seen))
    return seen


def randn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def top_k(seed):
    topk_triton.topk_logsumexp(tied_logits(2, 600, torch.float32, 9, seed=seed).to(DEVICE), 4)


def walked(seed):
    walk_triton.walk(*(t.to(DEVICE) for t in random_lattice(2, 3, 4, seed=seed)), SCALE, None, "greedy", None, True)


def attended(seed):
    lattice_attention_triton.lattice_attention(
        randn(2, 12, 48, seed=seed), randn(2, 9, seed=seed), randn(2, seed=seed), 4
    )


def normed(seed):
    lattice_nodes_triton.add_norm(randn(2, 3, 8, seed=seed), randn(2, 3, 8, seed=seed), randn(8, seed=seed), 1e-6)


def multiplied(seed):
    lattice_products_triton.linear_silu(randn(2, 3, 8, seed=seed), randn(4, 8, seed=seed), randn(4, seed=seed))


@pytest.mark.parametrize("call,expected", [(top_k, 2), (walked, 1), (attended, 1), (normed, 1), (multiplied, 1)])
def test_a_call_launches_once_whatever_the_numbers_and_however_often(call, expected, launches) -> None:
    call(0)
    first = list(launches)
    assert len(first) == expected
    for seed in (0, 1, 2):
        launches.clear()
        call(seed)
        assert launches == first


def test_no_kernel_is_handed_to_a_tuner() -> None:
    assert len(KERNELS) > 9
    for name, room in KERNELS.items():
        assert not isinstance(getattr(room, name), (Autotuner, Heuristics)), name
