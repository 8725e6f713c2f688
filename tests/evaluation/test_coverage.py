import pytest
import torch
from lilicorr.evaluation.blocks import DrawnBlock, draft_again, positions_of
from lilicorr.evaluation.compare import answer, decoding_options, encode
from lilicorr.evaluation.coverage import add_coverage, count_coverage
from lilicorr.evaluation.loading import load_pair
from lilicorr.modeling_lilicorr.lattice import Lattice

OPTIONS = decoding_options(14) | {"min_new_tokens": 14}


@pytest.fixture(scope="module")
def asked(tiny_folders):
    drafters = {name: tiny_folders / name for name in ("lilicorr", "none")}
    pair = load_pair(tiny_folders / "target", drafters, dtype="fp32", device="cpu")
    inputs = encode(pair.tokenizer, "abc", pair.target.device)
    return pair, inputs, answer(pair.target, inputs, **OPTIONS).token_ids


@pytest.mark.parametrize("head", ["lilicorr", "none"])
def test_counts_are_those_of_the_drafted_blocks(asked, head):
    pair, inputs, said = asked
    drafter = pair.drafters[head]
    held = positions_of(drafter, inputs, said)
    counted = count_coverage(pair.target, drafter, inputs, said, 99)
    blocks = draft_again(pair.target, drafter, inputs, said, held)
    assert counted["blocks"] == len(blocks) == 14 - 4
    assert counted["greedy"] == sum(block.accepted for block in blocks)
    for slot in range(4):
        ranks = [block.lattice.candidates[0, slot].tolist() for block in blocks]
        expected = [
            sum(row[rank] == block.answer_ids[slot] for row, block in zip(ranks, blocks, strict=True))
            for rank in range(len(ranks[0]))
        ]
        assert counted["ranks"][slot] == expected


def test_blocks_drafted_again_are_those_of_the_timed_run(asked):
    pair, inputs, said = asked
    drafter = pair.drafters["none"]
    run = answer(pair.target, inputs, drafter, **OPTIONS)
    committed = drafter.last_generation.committed_per_block[0]
    first = draft_again(pair.target, drafter, inputs, said, [inputs["input_ids"].shape[1]])[0]
    assert run.token_ids == said and first.accepted == committed - 1


def test_positions_are_drawn_by_the_seed_and_short_answers_give_none(asked):
    pair, inputs, said = asked
    drafter = pair.drafters["lilicorr"]
    one = count_coverage(pair.target, drafter, inputs, said, 3, seed=1)
    assert one == count_coverage(pair.target, drafter, inputs, said, 3, seed=1) and one["blocks"] == 3
    assert any(count_coverage(pair.target, drafter, inputs, said, 3, seed=seed) != one for seed in range(2, 9))
    assert count_coverage(pair.target, drafter, inputs, said[:4], 3) is None
    assert count_coverage(pair.target, drafter, inputs, said[:5], 3)["blocks"] == 1


def test_exact_path_counts_apart_from_the_walk(monkeypatch):
    # From the anchor candidate 0 looks better, but only candidate 1 leads to the answer's second token.
    pair_scores = torch.tensor([[[[0.0, 0.0], [0.0, 9.0]]]])
    candidates = torch.tensor([[[5, 6], [7, 8]]])
    lattice = Lattice(
        candidates, torch.zeros(1, 2, 2), torch.tensor([[1.0, 0.0]]), pair_scores, torch.zeros(1, 2).long()
    )
    block = DrawnBlock(lattice, (5, 7), (6, 8), 0)
    monkeypatch.setattr("lilicorr.evaluation.coverage.positions_of", lambda *_: range(1))
    monkeypatch.setattr("lilicorr.evaluation.coverage.draft_again", lambda *_: [block])
    counted = count_coverage(None, None, {}, (), 1)
    assert counted == {"blocks": 1, "ranks": [[0, 1], [0, 1]], "greedy": 0, "exact": 2}


def test_adding_up_pools_blocks():
    first = {"blocks": 1, "ranks": [[1, 0], [0, 0]], "greedy": 1, "exact": 1}
    second = {"blocks": 3, "ranks": [[1, 2], [1, 1]], "greedy": 2, "exact": 0}
    covered = add_coverage([first, second])
    assert covered["by_slot"] == [[0.5, 1.0], [0.25, 0.5]] and covered["mean"] == [0.375, 0.75]
    assert covered["greedy"] == pytest.approx(1 + 3 / 4) and covered["exact"] == pytest.approx(1 + 1 / 4)
    assert add_coverage([]) is None
    assert add_coverage([first | {"exact": None}])["exact"] is None
