"""Trees of tokens: what nodes see, and what a draft and a text grow into."""

import pytest
import torch
from lilicorr.candidate_generator.text_continuation import Proposal
from lilicorr.candidate_generator.token_tree import SOURCES, TokenTree
from lilicorr.candidate_generator.tree_growth import grow_trees
from lilicorr.modeling_lilicorr.lattice import Draft, Lattice

ANCHOR = torch.tensor([3])


def drafted(candidates, chances, pair_scores=None, finite=None):
    """A draft of one row from each slot's candidates and their probabilities."""
    tokens = torch.tensor([candidates])
    log_probs = torch.tensor([chances]).log()
    ok = torch.ones(1, len(candidates), dtype=torch.bool) if finite is None else torch.tensor([finite])
    picks = torch.zeros(1, len(candidates), dtype=torch.long)
    lattice = Lattice(tokens, log_probs, None, pair_scores, picks)
    return Draft(tokens[..., 0], ok, lambda: log_probs[..., 0].exp(), lattice)


TWO = drafted([[10, 11], [20, 21], [30, 31]], [[0.6, 0.31], [0.5, 0.4], [0.7, 0.2]])


def paths(tree, row=0):
    """The tokens from the anchor down to every node."""
    found = []
    for token, parent in zip(tree.tokens[row].tolist(), tree.parents[row].tolist(), strict=True):
        found.append((*found[parent], token) if parent >= 0 else ())
    return found[1:]


def test_a_node_sees_its_ancestors_and_itself():
    parents = torch.tensor([[-1, 0, 0, 1, 3, 4, 2]])
    like = torch.zeros_like(parents)
    tree = TokenTree(like, parents, like, like, like.double())
    seen = [set(row.nonzero()[:, 0].tolist()) for row in tree.visible()[0]]
    assert seen == [{0}, {0, 1}, {0, 2}, {0, 1, 3}, {0, 1, 3, 4}, {0, 1, 3, 4, 5}, {0, 2, 6}]


def test_a_chain_of_any_length_sees_all_that_is_before():
    for size in (1, 2, 3, 8, 16, 17):
        parents = torch.arange(-1, size - 1)[None]
        like = torch.zeros_like(parents)
        assert torch.equal(
            TokenTree(like, parents, like, like, like.double()).visible()[0], torch.ones(size, size).tril() > 0
        )


def test_absent_nodes_see_only_themselves_and_nobody_sees_them():
    parents = torch.tensor([[-1, 0, -1]])
    like = torch.zeros_like(parents)
    visible = TokenTree(like, parents, like, like, like.double()).visible()[0]
    assert visible.tolist() == [[True, False, False], [True, True, False], [False, False, True]]


def test_the_likeliest_paths_of_a_lattice():
    tree = grow_trees(ANCHOR, TWO, [None], 4)
    assert tree.tokens[0, 0] == 3 and tree.depths[0].tolist() == [0, 1, 1, 2, 2]
    assert paths(tree) == [(10,), (11,), (10, 20), (10, 21)]  # 0.6, 0.31, 0.3, 0.24
    assert [SOURCES[each] for each in tree.sources[0, 1:].tolist()] == ["lattice"] * 4


def test_scores_replace_probabilities_behind_the_first_slot_at_their_beta():
    pair = torch.zeros(1, 2, 2, 2)
    pair[0, 0, 0] = torch.tensor([0.0, 8.0])  # behind 10 comes 21
    draft = drafted([[10, 11], [20, 21], [30, 31]], [[0.6, 0.3], [0.5, 0.4], [0.7, 0.2]], pair)
    assert paths(grow_trees(ANCHOR, draft, [None], 2, beta=1.0)) == [(10,), (10, 21)]
    assert (10, 20) in paths(grow_trees(ANCHOR, draft, [None], 5, beta=0.01))


def test_a_chain_has_one_child_each():
    assert paths(grow_trees(ANCHOR, TWO, [None], 9, chain=True)) == [(10,), (10, 20), (10, 20, 30)]


def test_a_draft_without_a_lattice_is_a_chain():
    draft = Draft(torch.tensor([[10, 20]]), torch.ones(1, 2, dtype=torch.bool), lambda: torch.tensor([[0.5, 0.5]]))
    assert paths(grow_trees(ANCHOR, draft, [None], 9)) == [(10,), (10, 20)]


def test_nothing_grows_behind_a_slot_that_is_not_finite():
    draft = drafted([[10], [20], [30]], [[0.6], [0.5], [0.7]], finite=[True, False, True])
    assert paths(grow_trees(ANCHOR, draft, [None], 9)) == [(10,)]
    nan = drafted([[10], [20]], [[float("nan")], [0.5]])
    assert paths(grow_trees(ANCHOR, nan, [None], 9)) == []


def test_nothing_grows_behind_an_end_token_or_below_the_depth():
    tree = grow_trees(ANCHOR, TWO, [None], 20, ends=torch.tensor([10, 21]))
    assert all(10 not in path[:-1] and 21 not in path[:-1] for path in paths(tree)) and (11, 20, 30) in paths(tree)
    assert max(map(len, paths(grow_trees(ANCHOR, TWO, [None], 20, depth=2)))) == 2
    text = (Proposal([50, 10, 52], 2), [0.9, 0.9, 0.9])
    assert (50, 10) in (found := paths(grow_trees(ANCHOR, TWO, [text], 20, ends=torch.tensor([10]))))
    assert (50, 10, 52) not in found


def test_the_texts_continuation_joins_shares_nodes_and_goes_deeper_than_the_block():
    text = (Proposal([10, 51, 52, 53, 54], 3), [0.9] * 5)
    tree = grow_trees(ANCHOR, TWO, [text], 20)
    found = dict(zip(paths(tree), [SOURCES[each] for each in tree.sources[0, 1:].tolist()], strict=True))
    assert found[(10,)] == "both" and found[(10, 51)] == "text" and found[(10, 51, 52, 53, 54)] == "text"
    assert found[(11,)] == "lattice"
    assert tree.log_probs[0, 1].exp() == pytest.approx(0.9)  # the larger of 0.6 and 0.9


def test_a_text_alone_is_a_chain():
    text = (Proposal([50, 51, 52], 5), [0.9, 0.8, 0.7])
    assert paths(grow_trees(ANCHOR, None, [text], 2)) == [(50,), (50, 51)]


def test_rows_grow_trees_of_their_own():
    both = Lattice(*(torch.cat([part, part]) if part is not None else None for part in (
        TWO.lattice.candidates, TWO.lattice.log_probs, None, None, TWO.lattice.picks)))  # fmt: skip
    draft = Draft(TWO.tokens.repeat(2, 1), TWO.finite.repeat(2, 1), lambda: None, both)
    text = (Proposal([50, 51, 52], 5), [0.9, 0.9, 0.9])
    tree = grow_trees(torch.tensor([3, 4]), draft, [None, text], 3)
    assert paths(tree, 0) == [(10,), (11,), (10, 20)]
    assert paths(tree, 1) == [(50,), (50, 51), (50, 51, 52)]
    assert tree.tokens[:, 0].tolist() == [3, 4]
