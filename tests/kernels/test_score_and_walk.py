"""Scoring and walking the lattice against plain loops: greedy (Eq. 8), exact (Eq. 12), ties, and degenerate sizes."""

import itertools

import pytest
import torch
from lilicorr.kernels import reference
from torch import Tensor
from torch.nn.functional import normalize

SCALE = 8.0
SIZES = [(1, 1, 1), (3, 1, 4), (3, 5, 1), (2, 2, 2), (4, 4, 3), (2, 15, 8)]  # blocks, slots, K


def random_lattice(blocks: int, slots: int, count: int, seed: int = 0, quantise: bool = False, width: int = 6):
    generator = torch.Generator().manual_seed(seed)

    def vectors(*shape: int) -> Tensor:
        raw = torch.randn(*shape, generator=generator)
        return raw.sign().masked_fill(raw.abs() < 0.6, 0.0) if quantise else normalize(raw, dim=-1)

    candidates = torch.randint(0, 1000, (blocks, slots, count), generator=generator)
    shape = (blocks, slots, count, width)
    return vectors(*shape), vectors(*shape), vectors(blocks, width), candidates


def random_log_probs(blocks: int, slots: int, count: int, seed: int = 0) -> Tensor:
    """Descending in the last dimension, as those of candidates are."""
    drawn = torch.randn(blocks, slots, count, generator=torch.Generator().manual_seed(seed)) * 2 - 3
    return drawn.sort(dim=-1, descending=True).values


def loop_scores(out: Tensor, inp: Tensor, anchor_out: Tensor, block: int, slot: int, previous: int) -> list[float]:
    """Scores of every candidate of `slot`, given candidate `previous` of the slot before."""
    source = anchor_out[block] if slot == 0 else out[block, slot - 1, previous]
    return [SCALE * float((source.double() * vector.double()).sum()) for vector in inp[block, slot]]


def path_score(first: Tensor, pair: Tensor, path) -> float:
    return float(first[path[0]]) + sum(float(pair[s, a, b]) for s, (a, b) in enumerate(itertools.pairwise(path)))


def first_best(scores: list[float], tolerance: float = 1e-9) -> int:
    return next(i for i, score in enumerate(scores) if score >= max(scores) - tolerance)


@pytest.mark.parametrize("quantise", [False, True], ids=["random", "tied"])
@pytest.mark.parametrize("blocks,slots,count", SIZES)
def test_greedy_walk_is_the_plain_loop_with_ties_to_the_lowest_index(blocks, slots, count, quantise) -> None:
    for seed in range(4):
        out, inp, anchor_out, candidates = random_lattice(blocks, slots, count, seed, quantise)
        tokens, picks = reference.score_and_walk(out, inp, anchor_out, candidates, SCALE)
        assert tokens.shape == picks.shape == (blocks, slots) and tokens.dtype == picks.dtype == torch.int64
        for block in range(blocks):
            previous = 0
            for slot in range(slots):
                previous = first_best(loop_scores(out, inp, anchor_out, block, slot, previous))
                assert picks[block, slot] == previous
                assert tokens[block, slot] == candidates[block, slot, previous]


@pytest.mark.parametrize("blocks,slots,count", [(1, 1, 1), (3, 1, 4), (3, 5, 1), (3, 3, 3), (2, 4, 4), (4, 6, 2)])
def test_longest_path_has_the_longest_expected_prefix_of_all_paths(blocks, slots, count) -> None:
    for seed in range(4):
        out, inp, anchor_out, _ = random_lattice(blocks, slots, count, seed)
        first, pair = (t.double() for t in reference.lattice_scores(out, inp, anchor_out, 2.0))
        picks = reference.longest_path(first, pair)
        assert picks.shape == (blocks, slots) and picks.dtype == torch.int64

        def expected(block: int, path, first: Tensor = first, pair: Tensor = pair) -> float:
            odds = [first[block].softmax(0)[path[0]]]
            odds += [pair[block, s, a].softmax(0)[b] for s, (a, b) in enumerate(itertools.pairwise(path))]
            return float(torch.stack(odds).cumprod(0).sum())

        for block in range(blocks):
            best = max(expected(block, path) for path in itertools.product(range(count), repeat=slots))
            assert expected(block, picks[block].tolist()) == pytest.approx(best)


def test_longest_path_gives_up_a_likely_first_candidate_that_leads_nowhere() -> None:
    first = torch.tensor([[0.55, 0.45]]).log()
    pair = torch.tensor([[[[0.5, 0.5], [0.99, 0.01]]]]).log()
    assert reference.greedy_walk(first, pair).tolist() == [[0, 0]]
    assert reference.longest_path(first, pair).tolist() == [[1, 0]]


@pytest.mark.parametrize("blocks,slots,count", [(1, 1, 1), (3, 1, 4), (3, 5, 1), (3, 3, 3), (2, 4, 4), (4, 6, 2)])
def test_exact_path_is_the_best_of_all_paths(blocks, slots, count) -> None:
    for seed in range(4):
        out, inp, anchor_out, candidates = random_lattice(blocks, slots, count, seed)
        first, pair = (t.double() for t in reference.lattice_scores(out, inp, anchor_out, SCALE))
        tokens, picks = reference.score_and_walk(out, inp, anchor_out, candidates, SCALE, rule="exact")
        for block in range(blocks):
            paths = itertools.product(range(count), repeat=slots)
            best = max(path_score(first[block], pair[block], path) for path in paths)
            assert path_score(first[block], pair[block], picks[block].tolist()) == pytest.approx(best, abs=1e-5)
        assert torch.equal(tokens, candidates.gather(-1, picks[..., None]).squeeze(-1))


def test_greedy_takes_the_better_first_step_where_the_exact_path_sacrifices_it() -> None:
    first = torch.tensor([[2.0, 1.0]])
    pair = torch.tensor([[[[0.0, 0.5], [4.0, 0.0]]]])
    assert reference.greedy_walk(first, pair).tolist() == [[0, 1]]
    assert reference.exact_path(first, pair).tolist() == [[1, 0]]


@pytest.mark.parametrize("blocks,slots,count", SIZES)
def test_log_probs_join_every_score_of_the_later_candidate(blocks, slots, count) -> None:
    lattice, gated = random_lattice(blocks, slots, count, seed=6), torch.tensor([-0.3 * SCALE])
    log_probs = random_log_probs(blocks, slots, count)
    walked = reference.walk(*lattice, gated, log_probs=log_probs)
    assert walked.first.dtype == walked.pair.dtype == torch.float32
    for block in range(blocks):
        previous = 0
        for slot in range(slots):
            cosines = loop_scores(*lattice[:3], block, slot, previous)
            want = [float(log_probs[block, slot, i]) - 0.3 * score for i, score in enumerate(cosines)]
            got = walked.first[block] if slot == 0 else walked.pair[block, slot - 1, previous]
            assert got.tolist() == pytest.approx(want, abs=1e-5)
            previous = first_best(want)
            assert walked.picks[block, slot] == previous
    exact = reference.walk(*lattice, gated, rule="exact", log_probs=log_probs)
    assert torch.equal(exact.picks, reference.exact_path(walked.first, walked.pair))


@pytest.mark.parametrize("rule", reference.RULES)
def test_an_all_tied_lattice_commits_the_top_candidates(rule) -> None:
    assert reference.RULES[rule](torch.zeros(2, 4), torch.zeros(2, 5, 4, 4)).tolist() == [[0] * 6] * 2


@pytest.mark.parametrize("rule", reference.RULES)
def test_one_candidate_leaves_no_choice(rule) -> None:
    out, inp, anchor_out, candidates = random_lattice(3, 5, 1, seed=2)
    tokens, picks = reference.score_and_walk(out, inp, anchor_out, candidates, SCALE, rule=rule)
    assert torch.equal(tokens, candidates[..., 0]) and not picks.any()


@pytest.mark.parametrize("rule", reference.RULES)
def test_one_slot_follows_the_anchor_only(rule) -> None:
    out, inp, anchor_out, candidates = random_lattice(5, 1, 4, seed=3)
    _, picks = reference.score_and_walk(out, inp, anchor_out, candidates, SCALE, rule=rule)
    assert torch.equal(picks[:, 0], (inp[:, 0] @ anchor_out[..., None]).squeeze(-1).argmax(-1))
    assert torch.equal(
        picks, reference.score_and_walk(out.roll(1, 0), inp, anchor_out, candidates, SCALE, rule=rule)[1]
    )


def test_the_last_out_vectors_and_the_first_slots_of_other_blocks_do_not_matter() -> None:
    out, inp, anchor_out, candidates = random_lattice(2, 6, 4, seed=4)
    before = reference.score_and_walk(out, inp, anchor_out, candidates, SCALE)[0]
    out[:, -1], inp[1] = torch.nan, inp[1].flip(0)
    assert torch.equal(before[0], reference.score_and_walk(out, inp, anchor_out, candidates, SCALE)[0][0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scores_are_fp32_bounded_by_the_scale_and_laid_out_earlier_then_later(dtype: torch.dtype) -> None:
    out, inp, anchor_out, _ = random_lattice(3, 4, 5, seed=5)
    out, inp, anchor_out = out.to(dtype), inp.to(dtype), anchor_out.to(dtype)
    first, pair = reference.lattice_scores(out, inp, anchor_out, SCALE)
    assert first.shape == (3, 5) and pair.shape == (3, 3, 5, 5)
    assert first.dtype == pair.dtype == torch.float32
    slack = 1e-5 if dtype == torch.float32 else 0.05
    assert max(first.abs().max(), pair.abs().max()) <= SCALE + slack
    for earlier, later in [(0, 3), (4, 1)]:
        want = SCALE * (out[1, 2, earlier].double() @ inp[1, 3, later].double())
        torch.testing.assert_close(pair[1, 2, earlier, later].double(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(first[2, 3].double(), SCALE * (anchor_out[2].double() @ inp[2, 0, 3].double()))


def test_a_vector_matched_with_itself_scores_exactly_the_scale() -> None:
    unit = normalize(torch.ones(1, 2, 1, 16), dim=-1)
    first, pair = reference.lattice_scores(unit, unit, unit[:, 0, 0], SCALE)
    torch.testing.assert_close(torch.cat([first.flatten(), pair.flatten()]), torch.full((2,), SCALE))
