"""The Triton walk is the reference in both modes, on a GPU where there is one and interpreted elsewhere."""

import pytest
import torch
from lilicorr.kernels import reference
from torch import Tensor

from .conftest import DEVICE
from .test_score_and_walk import SCALE, random_lattice, random_log_probs

pytest.importorskip("triton")
from lilicorr.kernels import walk_triton

SIZES = [(1, 1, 1, 1), (2, 1, 4, 16), (2, 5, 1, 64), (2, 3, 3, 100), (1, 4, 16, 64), (1, 15, 8, 130), (3, 2, 8, 24)]
EACH_RULE = pytest.mark.parametrize("rule", reference.RULES)
pytestmark = pytest.mark.usefixtures("poisoned")


def launch(vectors, rule: str, eps: float | None = None, with_scores: bool = True, scale=SCALE, log_probs=None):
    return walk_triton.walk(*vectors, scale, eps, rule, log_probs, with_scores)


def on_device(lattice, dtype: torch.dtype = torch.float32):
    *vectors, candidates = lattice
    return [*(tensor.to(DEVICE, dtype) for tensor in vectors), candidates.to(DEVICE)]


def assert_walks_its_scores(
    lattice, rule: str, eps: float | None, tolerance: float, scale=SCALE, log_probs=None
) -> Tensor:
    """Scores near the reference's, the path exactly the one that the reference takes on the kernel's own scores."""
    tokens, picks, scores = launch(lattice, rule, eps, scale=scale, log_probs=log_probs)
    want = reference.walk(*lattice, scale, eps, rule, log_probs)
    first, pair = scores[:, 0, 0], scores[:, 1:]
    torch.testing.assert_close(first, want.first, rtol=0, atol=tolerance)
    torch.testing.assert_close(pair, want.pair, rtol=0, atol=tolerance)
    path = reference.RULES[rule]
    assert picks.dtype == torch.int64 and torch.equal(picks, path(first, pair))
    assert torch.equal(tokens, lattice[3].gather(-1, picks[..., None]).squeeze(-1))
    return picks


@EACH_RULE
@pytest.mark.parametrize("blocks,slots,count,width", SIZES)
def test_unit_vectors_of_odd_sizes(blocks: int, slots: int, count: int, width: int, rule: str) -> None:
    lattice = on_device(random_lattice(blocks, slots, count, seed=1, width=width))
    assert_walks_its_scores(lattice, rule, None, 5e-6)


@EACH_RULE
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_vectors_of_any_length_are_brought_to_unit_length(dtype: torch.dtype, rule: str) -> None:
    out, inp, anchor_out, candidates = random_lattice(2, 3, 8, seed=2, width=200)
    lattice = on_device((out * 30, inp * 0.01, anchor_out * 5, candidates), dtype)
    assert_walks_its_scores(lattice, rule, 1e-6, 1e-5)


def test_vectors_shorter_than_eps_keep_the_semantics_of_normalize() -> None:
    out, inp, anchor_out, candidates = on_device(random_lattice(2, 3, 4, seed=3, width=32))
    out[0, 0, 1], inp[1, 2, 0] = 0.0, inp[1, 2, 0] * 1e-4
    assert_walks_its_scores([out, inp, anchor_out, candidates], "greedy", 1e-2, 1e-5)


@EACH_RULE
def test_tied_scores_commit_the_lowest_candidate(rule: str) -> None:
    for seed in range(2):
        lattice = on_device(random_lattice(2, 5, 4, seed, quantise=True, width=5))
        picks = assert_walks_its_scores(lattice, rule, None, 1e-6)
        assert torch.equal(picks, reference.walk(*lattice, SCALE, None, rule).picks)


@EACH_RULE
def test_untied_paths_are_the_references(rule: str) -> None:
    lattice = on_device(random_lattice(2, 7, 8, seed=4, width=64))
    want = reference.walk(*lattice, SCALE, None, rule)
    for with_scores in (False, True):
        tokens, picks, _ = launch(lattice, rule, with_scores=with_scores)
        assert torch.equal(picks, want.picks) and torch.equal(tokens, want.tokens)


def test_greedy_takes_the_better_first_step_where_the_exact_path_sacrifices_it() -> None:
    anchor_out = torch.tensor([[1.0, 0.0, 0.0, 0.0]], device=DEVICE)
    inp = torch.zeros(1, 2, 2, 4, device=DEVICE)
    inp[0, 0, :, 0] = torch.tensor([2.0, 1.0])
    inp[0, 1, 0, 1] = inp[0, 1, 1, 2] = 1.0
    out = torch.zeros(1, 2, 2, 4, device=DEVICE)
    out[0, 0, 0, 2], out[0, 0, 1, 1] = 0.5, 4.0
    candidates = torch.arange(4, device=DEVICE).view(1, 2, 2)
    assert launch([out, inp, anchor_out, candidates], "greedy")[1].tolist() == [[0, 1]]
    assert launch([out, inp, anchor_out, candidates], "exact")[1].tolist() == [[1, 0]]


@EACH_RULE
def test_nan_scores_count_as_the_highest_as_in_torch(rule: str) -> None:
    lattice = on_device(random_lattice(3, 4, 4, seed=5, width=16))
    lattice[1][0, 2, 1], lattice[0][1, 1, 3], lattice[2][2] = torch.nan, -torch.nan, torch.nan
    want = reference.walk(*lattice, SCALE, None, rule)
    tokens, picks, _ = launch(lattice, rule)
    assert torch.equal(picks, want.picks) and torch.equal(tokens, want.tokens)


@EACH_RULE
def test_strided_vectors_and_candidates(rule: str) -> None:
    out, inp, anchor_out, candidates = on_device(random_lattice(4, 5, 8, seed=6, width=48))
    views = [out[::2, 1:, ::2], inp[::2, :-1, :4], anchor_out[::2], candidates[::2, 1:, 4:]]
    assert_walks_its_scores(views, rule, 1e-6, 1e-5)
    swapped = [tensor.transpose(-1, -2).contiguous().transpose(-1, -2) for tensor in views[:2]]
    assert_walks_its_scores([*swapped, *views[2:]], rule, 1e-6, 1e-5)


@EACH_RULE
def test_no_blocks_give_no_paths(rule: str) -> None:
    tokens, picks, _ = launch(on_device(random_lattice(0, 5, 4)), rule)
    assert tokens.shape == picks.shape == (0, 5)


def test_the_last_out_vectors_do_not_matter() -> None:
    lattice = on_device(random_lattice(2, 6, 4, seed=7))
    before = launch(lattice, "greedy")[0]
    lattice[0][:, -1] = torch.nan
    assert torch.equal(before, launch(lattice, "greedy")[0])


@EACH_RULE
def test_arrival_counters_are_zero_again_after_every_launch(rule: str) -> None:
    lattice = on_device(random_lattice(3, 4, 4, seed=8, width=16))
    arrived = walk_triton.arrival_counters(3, lattice[0].device)
    first = walk_triton.walk(*lattice, SCALE, None, rule, None, False, arrived)
    assert not arrived.any()
    again = walk_triton.walk(*lattice, SCALE, None, rule, None, False, arrived)
    assert torch.equal(first[0], again[0]) and not arrived.any()


GATED = torch.tensor([-2.5], device=DEVICE)


@EACH_RULE
@pytest.mark.parametrize("scale", [SCALE, GATED], ids=["number", "tensor"])
@pytest.mark.parametrize("blocks,slots,count,width", SIZES)
def test_log_probs_are_added_to_the_later_candidates(
    blocks: int, slots: int, count: int, width: int, scale, rule: str
) -> None:
    lattice = on_device(random_lattice(blocks, slots, count, seed=10, width=width))
    log_probs = random_log_probs(blocks, slots, count).to(DEVICE)
    assert_walks_its_scores(lattice, rule, 1e-6, 5e-6, scale, log_probs)


@EACH_RULE
def test_a_scale_in_memory_is_the_number(rule: str) -> None:
    lattice = on_device(random_lattice(2, 4, 4, seed=11, width=32))
    number, tensor = (launch(lattice, rule, 1e-6, scale=scale) for scale in (-2.5, GATED))
    assert all(torch.equal(a, b) for a, b in zip(number, tensor, strict=True))
    assert_walks_its_scores(lattice, rule, None, 5e-6, GATED.bfloat16())


@EACH_RULE
def test_log_probs_of_any_stride_and_precision(rule: str) -> None:
    lattice = on_device(random_lattice(3, 4, 8, seed=12, width=16))
    log_probs = random_log_probs(3, 4, 8).to(DEVICE)
    want = launch(lattice, rule, 1e-6, log_probs=log_probs)
    apart = torch.full((3, 4, 8, 5), torch.nan, device=DEVICE)
    apart[..., 0] = log_probs
    turned = log_probs.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    spread = log_probs[:1].expand(3, -1, -1)
    for view in (apart[..., 0], turned):
        got = launch(lattice, rule, 1e-6, log_probs=view)
        assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))
    assert_walks_its_scores(lattice, rule, 1e-6, 1e-5, log_probs=spread)
    assert_walks_its_scores(lattice, rule, 1e-6, 1e-5, log_probs=log_probs.half())


@EACH_RULE
def test_log_probs_alone_decide_where_the_scale_is_zero_and_their_ties_go_to_the_lowest(rule: str) -> None:
    lattice = on_device(random_lattice(2, 5, 4, seed=13, width=16))
    log_probs = torch.tensor([-3.0, -1.0, -1.0, -torch.inf], device=DEVICE).expand(2, 5, 4)
    shut = torch.zeros(1, device=DEVICE)
    picks = assert_walks_its_scores(lattice, rule, 1e-6, 0, shut, log_probs)
    assert (picks == 1).all()
    picks = assert_walks_its_scores(lattice, rule, 1e-6, 0, shut, torch.full_like(log_probs, -torch.inf))
    assert not picks.any()


@EACH_RULE
def test_nan_log_probs_count_as_the_highest_as_in_torch(rule: str) -> None:
    lattice = on_device(random_lattice(3, 4, 4, seed=14, width=16))
    log_probs = random_log_probs(3, 4, 4).to(DEVICE)
    log_probs[0, 2, 1], log_probs[1, 0, 3], log_probs[2, 3] = torch.nan, -torch.nan, torch.nan
    log_probs[1, 3, 2] = torch.inf
    want = reference.walk(*lattice, SCALE, 1e-6, rule, log_probs)
    tokens, picks, _ = launch(lattice, rule, 1e-6, log_probs=log_probs)
    assert torch.equal(picks, want.picks) and torch.equal(tokens, want.tokens)


@EACH_RULE
def test_no_blocks_give_no_paths_with_log_probs(rule: str) -> None:
    tokens, picks, _ = launch(on_device(random_lattice(0, 5, 4)), rule, log_probs=torch.zeros(0, 5, 4, device=DEVICE))
    assert tokens.shape == picks.shape == (0, 5)


def test_blocks_beyond_two_to_the_31_elements_are_reached() -> None:
    store = torch.zeros(1, dtype=torch.float16, device=DEVICE).new_empty(2**31 + 2000)
    far = store.as_strided((2, 3, 4, 16), (2**31, 64, 16, 1))
    out, inp, anchor_out, candidates = on_device(random_lattice(2, 3, 4, seed=9, width=16), torch.float16)
    want = launch([out, inp, anchor_out, candidates], "greedy")
    for place in range(2):
        far.copy_([out, inp][place])
        vectors = [far, inp] if place == 0 else [out, far]
        assert torch.equal(launch([*vectors, anchor_out, candidates], "greedy")[1], want[1])
