"""Trees over lattices: by hand, the batched version against the definition, and the text's own path."""

import itertools
import math

import pytest
import torch
from lilicorr.kernels.lattice_tree import batched_lattice_tree, child_log_probs, join_text
from lilicorr.kernels.tree_reference import lattice_tree

INF = float("inf")
BOTH = pytest.mark.parametrize("grow", [lattice_tree, batched_lattice_tree])


def random_lattice(seed, blocks=3):
    """Log-probabilities in quarters, so that many paths tie, with absent candidates and now and then NaN."""
    generator = torch.Generator().manual_seed(seed)
    slots, count = 1 + seed % 6, 1 + seed % 5
    pair = (torch.rand(blocks, slots - 1, count, count, generator=generator) * 4).round() / 4 - 1.5
    first = (torch.rand(blocks, count, generator=generator) * 4).round() / 4 - 1.5
    pair[pair > -0.6], first[first > -0.6] = -INF, -INF
    if seed % 7 == 0:
        first[0] = float("nan")
    return first, pair


def paths_of(nodes, row):
    """Each node's states from the root down."""
    found = [()]
    for state, parent in zip(nodes.states[row].tolist(), nodes.parents[row].tolist(), strict=True):
        found.append((*found[parent], state) if parent >= 0 else None)
    return found[1:]


@BOTH
def test_a_tree_by_hand(grow):
    first = torch.tensor([[0.6, 0.4]]).log()
    pair = torch.tensor([[[[0.5, 0.1], [0.9, 0.05]]]]).log()
    nodes = grow(first, pair, 4)
    # 0.6, then 0.4, 0.4 · 0.9 = 0.36, 0.6 · 0.5 = 0.3
    assert nodes.states.tolist() == [[0, 1, 0, 0]]
    assert nodes.slots.tolist() == [[0, 0, 1, 1]]
    assert nodes.parents.tolist() == [[0, 0, 2, 1]]
    torch.testing.assert_close(nodes.log_probs.exp(), torch.tensor([[0.6, 0.4, 0.36, 0.3]], dtype=torch.float64))


@BOTH
def test_equal_paths_take_the_lower_slot_then_the_earlier_parent_then_the_lower_candidate(grow):
    first = torch.zeros(1, 2)
    pair = torch.zeros(1, 1, 2, 2)
    nodes = grow(first, pair, 6)
    assert nodes.slots.tolist() == [[0, 0, 1, 1, 1, 1]]
    assert nodes.parents.tolist() == [[0, 0, 1, 1, 2, 2]]
    assert nodes.states.tolist() == [[0, 1, 0, 1, 0, 1]]


@BOTH
def test_nodes_that_a_lattice_lacks_are_absent(grow):
    nodes = grow(torch.tensor([[0.0, -INF]]), torch.full((1, 2, 2, 2), -INF), 3)
    assert nodes.states.tolist() == nodes.slots.tolist() == [[0, -1, -1]]
    assert nodes.parents.tolist() == [[0, -1, -1]] and nodes.log_probs.tolist() == [[0.0, -INF, -INF]]


@pytest.mark.parametrize("width", [None, 1])
@pytest.mark.parametrize("count", [1, 3, 9, 40])
def test_batched_trees_are_those_of_the_definition(count, width):
    for seed in range(60):
        first, pair = random_lattice(seed)
        defined, batched = lattice_tree(first, pair, count, width), batched_lattice_tree(first, pair, count, width)
        for part in ("states", "slots", "parents", "log_probs"):
            assert torch.equal(getattr(defined, part), getattr(batched, part)), (seed, part)


def test_a_tree_holds_the_likeliest_prefixes_of_all():
    for seed in range(1, 7):
        first, pair = random_lattice(seed, blocks=1)
        slots, count = pair.shape[1] + 1, first.shape[1]
        sums = []
        for length in range(1, slots + 1):
            for path in itertools.product(range(count), repeat=length):
                steps = [first[0, path[0]], *(pair[0, s, path[s], path[s + 1]] for s in range(length - 1))]
                sums.append(sum(float(step) for step in steps))
        best = sorted((value for value in sums if value > -INF), reverse=True)[:12]
        nodes = lattice_tree(first, pair, 12)
        assert [value for value in nodes.log_probs[0].tolist() if value > -INF] == pytest.approx(best)


@BOTH
def test_a_chain_is_the_tree_of_the_likeliest_child_each(grow):
    first, pair = random_lattice(5, blocks=1)
    nodes = grow(first, pair, 6, 1)
    state, path = int(first.argmax()), []
    for slot in range(pair.shape[1] + 1):
        path.append(state)
        if slot < pair.shape[1]:
            if pair[0, slot, state].max() == -INF:
                break
            state = int(pair[0, slot, state].argmax())
    present = len(path)
    assert nodes.states[0].tolist() == path + [-1] * (6 - present)
    assert nodes.parents[0].tolist() == list(range(present)) + [-1] * (6 - present)


@BOTH
def test_what_cannot_be_grown_is_refused(grow):
    with pytest.raises(ValueError, match=r"got \[2, 3\] and \[2, 1, 3, 4\]"):
        grow(torch.zeros(2, 3), torch.zeros(2, 1, 3, 4), 3)
    with pytest.raises(ValueError, match="A tree of 0 nodes"):
        grow(torch.zeros(2, 3), torch.zeros(2, 1, 3, 3), 0)
    with pytest.raises(ValueError, match="width is 2"):
        grow(torch.zeros(2, 3), torch.zeros(2, 1, 3, 3), 3, 2)


def test_children_share_their_slots_coverage_by_calibrated_scores():
    log_probs = torch.tensor([[[0.5, 0.2], [0.3, 0.1]]]).log()
    scores = torch.tensor([[[[2.0, 0.0], [0.0, 4.0]]]])
    first, pair = child_log_probs(log_probs, scores, beta=0.5)
    torch.testing.assert_close(first.exp(), torch.tensor([[0.5, 0.2]]))
    share = 1 / (1 + math.exp(-1))
    torch.testing.assert_close(pair.exp()[0, 0, 0], 0.4 * torch.tensor([share, 1 - share]))
    assert pair.exp()[0, 0, 1, 1] == pytest.approx(0.4 / (1 + math.exp(-2)))


def test_without_scores_children_have_the_drafters_own_probabilities():
    log_probs = torch.tensor([[[0.5, 0.2], [0.3, 0.1]]]).log()
    _, pair = child_log_probs(log_probs, None, beta=1.0)
    assert torch.equal(pair[0, 0], log_probs[:, 1].expand(2, -1))


def joined(text, chances, pair=None):
    """A lattice of two slots and candidates 10, 11 and 20, 21, joined by a text."""
    candidates = torch.tensor([[[10, 11], [20, 21]]])
    marginals = torch.tensor([[[0.5, 0.2], [0.3, 0.1]]]).log()
    first, own = child_log_probs(marginals, None, 1.0)
    pair = own if pair is None else pair
    return join_text(first, pair, marginals, candidates, torch.tensor([text]), torch.tensor([chances]).log())


def test_a_text_token_that_is_a_candidate_shares_its_node_at_the_larger_probability():
    pair = torch.tensor([[[[0.25, 0.05], [0.6, 0.01]]]]).log()
    tokens, first, joined_pair, shared = joined([11, 21], [0.7, 0.4], pair)
    assert tokens[0, :, 2].tolist() == [11, 21] and shared.tolist() == [[True, True]]
    torch.testing.assert_close(first.exp(), torch.tensor([[0.5, 0.0, 0.7]]))  # 11 is the text's now: max(0.2, 0.7)
    # Behind 11 on the text the lattice goes on as behind candidate 11; 21 is the text's: max(0.01, 0.4).
    torch.testing.assert_close(joined_pair.exp()[0, 0, 2], torch.tensor([0.6, 0.0, 0.4]))
    # Off the text 21 is a candidate like any other, and nothing leads back to the text.
    torch.testing.assert_close(joined_pair.exp()[0, 0, 0], torch.tensor([0.25, 0.05, 0.0]))


def test_behind_a_text_token_that_is_no_candidate_the_marginals_go_on():
    _, first, pair, shared = joined([99, 98], [0.7, 0.4], torch.full((1, 1, 2, 2), 0.01).log())
    torch.testing.assert_close(first.exp(), torch.tensor([[0.5, 0.2, 0.7]]))
    torch.testing.assert_close(pair.exp()[0, 0, 2], torch.tensor([0.3, 0.1, 0.4]))
    assert shared.tolist() == [[False, False]]


def test_a_text_may_go_deeper_than_the_block_and_end_before_it():
    tokens, first, pair, _ = joined([10, 98, 97], [0.7, 0.4, 0.3])
    assert tokens.shape == (1, 3, 3) and tokens[0, 2, 2] == 97
    torch.testing.assert_close(pair.exp()[0, 1, 2], torch.tensor([0.0, 0.0, 0.3]))
    assert pair[0, 1, :2].eq(-INF).all()
    _, first, pair, _ = joined([-1, -1], [1.0, 1.0])
    torch.testing.assert_close(first.exp(), torch.tensor([[0.5, 0.2, 0.0]]))
    assert pair[0, 0, :, 2].eq(-INF).all()


def test_a_tree_with_a_text_accepts_what_the_lattice_alone_does_and_more():
    tokens, first, pair, _ = joined([10, 98, 97], [0.7, 0.4, 0.3])
    nodes = lattice_tree(first, pair, 12)
    paths = [
        tuple(int(tokens[0, slot, state]) for slot, state in enumerate(path)) for path in paths_of(nodes, 0) if path
    ]
    assert len(set(paths)) == len(paths)  # siblings differ
    assert {(10,), (11,), (10, 20), (10, 98), (10, 98, 97)} <= set(paths)
