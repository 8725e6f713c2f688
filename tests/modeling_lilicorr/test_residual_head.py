"""The residual form of the head: the drafter's log-probabilities plus gated cosines."""

import pytest
import torch
from lilicorr import LiLiCorrConfig, LiLiCorrModel
from lilicorr.kernels.reference import greedy_walk, longest_path
from lilicorr.modeling_lilicorr.head_lilicorr import GATE
from lilicorr.modeling_lilicorr.lattice import Block
from torch import Tensor

from .. import tiny
from ..tiny import HEAD

BLOCKS, SLOTS, COUNT, DIM, VOCAB = 3, 5, 4, 32, 90
SHAPE = {"vocab_size": VOCAB, "hidden_size": DIM, "intermediate_size": 64, "mask_token_id": VOCAB - 1}
SIZES = {"num_candidates": COUNT, "num_layers": 2, "num_heads": 4, "intermediate_size": 40, "factor_dim": 24}


def tiny_config(**head) -> LiLiCorrConfig:
    taps = {"target_layer_ids": [1, 3], "num_target_layers": 6}
    return tiny.tiny_config(SLOTS + 1, **SHAPE, **taps, head_config=HEAD | SIZES | head)


def lively(config: LiLiCorrConfig) -> LiLiCorrModel:
    torch.manual_seed(0)
    model = LiLiCorrModel(config).eval()
    with torch.no_grad():
        for parameter in model.head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def inputs() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(BLOCKS, SLOTS, 50, generator=generator) * 2
    return {
        "embeds": torch.randn(BLOCKS, SLOTS, COUNT, DIM, generator=generator),
        "log_probs": logits.log_softmax(-1).topk(COUNT, dim=-1).values,
        "hidden": torch.randn(BLOCKS, SLOTS, DIM, generator=generator),
        "anchor_state": torch.randn(BLOCKS, DIM, generator=generator),
    }


def test_a_residual_head_adds_its_gated_cosines_to_the_drafters_log_probs() -> None:
    paper, residual = lively(tiny_config()), lively(tiny_config(residual=True))
    residual.head.load_state_dict(paper.head.state_dict(), strict=False)
    given = inputs()
    with torch.no_grad():
        residual.head.gate.fill_(-0.3)
        got, cosines = residual.head.scores(*given.values()), paper.head.scores(*given.values())
    own = given["log_probs"]
    torch.testing.assert_close(got[0], own[:, 0] - 0.3 * cosines[0])
    for n, s, a, b in [(0, 0, 1, 2), (2, 3, 3, 0)]:
        torch.testing.assert_close(got[1][n, s, a, b], own[n, s + 1, b] - 0.3 * cosines[1][n, s, a, b])


def test_a_residual_head_with_its_gate_shut_is_the_drafter_and_opens_it_under_a_loss() -> None:
    model, given = lively(tiny_config(residual=True)), inputs()
    table = torch.randn(VOCAB, DIM)
    logits = torch.randn(BLOCKS, SLOTS, VOCAB).mul(2).requires_grad_()
    block = Block(given["hidden"], logits, torch.zeros(BLOCKS), given["anchor_state"], None, lambda ids: table[ids])
    with torch.no_grad():
        model.head.gate.zero_()
        draft = model.head.draft(block, return_lattice=True)
    assert torch.equal(draft.tokens, logits.argmax(-1)) and (draft.lattice.picks == 0).all()
    given["log_probs"].requires_grad_()
    model.head.scores(*given.values())[1].square().sum().backward()
    assert model.head.gate.grad.abs() > 0
    assert not given["log_probs"].grad.any()  # with the gate shut nothing else could carry a gradient there


@pytest.mark.parametrize("kernels", ["reference", "auto", "triton"])
def test_a_draft_walks_the_scores_that_training_sees(kernels: str, monkeypatch) -> None:
    if kernels == "triton":
        pytest.importorskip("triton")
    monkeypatch.setenv("LILICORR_KERNELS", kernels)
    model, given, table = lively(tiny_config(residual=True)), inputs(), torch.randn(VOCAB, DIM)
    logits = torch.randn(BLOCKS, SLOTS, VOCAB, generator=torch.Generator().manual_seed(2)) * 2
    anchor_ids = torch.zeros(BLOCKS, dtype=torch.int64)
    block = Block(given["hidden"], logits, anchor_ids, given["anchor_state"], None, lambda ids: table[ids])
    with torch.no_grad():
        model.head.gate.fill_(-0.3)
        draft, short = model.head.draft(block, return_lattice=True), model.head.draft(block)
        lattice = draft.lattice
        first, pair = model.head.scores(
            table[lattice.candidates], lattice.log_probs, given["hidden"], given["anchor_state"]
        )
    torch.testing.assert_close(lattice.log_probs, logits.log_softmax(-1).gather(-1, lattice.candidates))
    torch.testing.assert_close(lattice.first_scores, first, rtol=0, atol=1e-5)
    torch.testing.assert_close(lattice.pair_scores, pair, rtol=0, atol=1e-5)
    assert torch.equal(lattice.picks, greedy_walk(first, pair)) and (lattice.picks > 0).any()
    assert torch.equal(draft.tokens, short.tokens)
    chances = logits.softmax(-1).gather(-1, draft.tokens[..., None]).squeeze(-1)
    for made in (draft, short):
        torch.testing.assert_close(made.probabilities(), chances)


def test_a_residual_head_comes_back_and_is_fresh_at_its_gate(tmp_path) -> None:
    model = lively(tiny_config(residual=True))
    model.save_pretrained(tmp_path)
    assert torch.equal(LiLiCorrModel.from_pretrained(tmp_path).head.gate, model.head.gate)
    assert LiLiCorrModel(tiny_config(residual=True)).head.gate.item() == GATE
    with pytest.raises(ValueError, match="this one is residual"):
        model.save_serving(tmp_path / "serving")


@pytest.mark.parametrize("residual", [False, True])
def test_a_head_may_commit_the_longest_path_instead_of_the_greedy_walk(residual: bool) -> None:
    greedy = lively(tiny_config(residual=residual))
    longest = lively(tiny_config(residual=residual, walk="longest"))
    given, table, differ = inputs(), torch.randn(VOCAB, DIM), 0
    rest = (torch.zeros(BLOCKS), given["anchor_state"], None, lambda ids: table[ids])
    for seed in range(20):
        torch.manual_seed(seed)
        block = Block(torch.randn(BLOCKS, SLOTS, DIM), torch.randn(BLOCKS, SLOTS, VOCAB), *rest)
        with torch.no_grad():
            theirs, ours = (model.head.draft(block, return_lattice=True) for model in (greedy, longest))
            assert torch.equal(longest.head.draft(block).tokens, ours.tokens)
        first, pair = theirs.lattice.first_scores, theirs.lattice.pair_scores
        assert torch.equal(pair, ours.lattice.pair_scores)
        assert torch.equal(theirs.lattice.picks, greedy_walk(first, pair))
        assert torch.equal(ours.lattice.picks, longest_path(first, pair))
        differ += not torch.equal(ours.tokens, theirs.tokens)
    assert differ


def test_a_heads_walk_is_kept_and_checked(tmp_path) -> None:
    longest = lively(tiny_config(walk="longest"))
    longest.save_pretrained(tmp_path / "ours")
    assert LiLiCorrModel.from_pretrained(tmp_path / "ours").head.rule == "longest"
    with pytest.raises(ValueError, match="this head's walk is 'longest'; set it to 'greedy'"):
        longest.save_serving(tmp_path / "serving")
    with pytest.raises(ValueError, match="walk is 'best', expected one of greedy, longest"):
        LiLiCorrModel(tiny_config(walk="best"))
