"""xPress's passes over a block: how many, what each sees, and that they end where a slot after slot decode does."""

import pytest
import torch
from lilicorr import LiLiCorrModel
from lilicorr.modeling_lilicorr.head_xpress import XPressHead
from lilicorr.modeling_lilicorr.lattice import Block
from torch import Tensor

from ..tiny import tiny_config

VOCAB, DIM, SLOTS, BLOCKS, RANK = 61, 24, 6, 32, 10


def new_head(spread: float = 0.5) -> XPressHead:
    """A fresh head, with so much noise on every parameter that nothing hides behind a zero."""
    torch.manual_seed(0)
    config = tiny_config(
        SLOTS + 1, vocab_size=VOCAB, hidden_size=DIM, intermediate_size=32, num_hidden_layers=1,
        mask_token_id=VOCAB - 1, target_layer_ids=[1], num_target_layers=6, head_type="xpress",
        head_config={"rank": RANK, "mlp_ratio": 2, "num_jacobi_passes": SLOTS},
    )  # fmt: skip
    head = LiLiCorrModel(config).eval().requires_grad_(False).head
    for parameter in head.parameters():
        parameter.add_(torch.randn_like(parameter) * spread)
    return head


@pytest.fixture
def block() -> Block:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(BLOCKS, 1 + SLOTS, DIM, generator=generator)
    logits = torch.randn(BLOCKS, SLOTS, VOCAB, generator=generator) * 2
    anchors = torch.randint(0, VOCAB, (BLOCKS,), generator=generator)
    return Block(hidden[:, 1:], logits, anchors, hidden[:, 0], None, torch.nn.Identity(), anchor_hidden=hidden[:, 0])


def after(block: Block, tokens: Tensor) -> Tensor:
    """The token before each slot."""
    return torch.cat([block.anchor_ids[:, None], tokens[:, :-1]], dim=1)


def refined(head: XPressHead, block: Block, previous: Tensor) -> Tensor:
    """Logits after known tokens."""
    return block.logits + head.corrections(head.codes(head.shared(block.hidden, block.anchor_hidden), previous))


@pytest.mark.parametrize("passes", range(1, SLOTS + 1))
def test_as_many_passes_as_are_asked_for_settle_as_many_slots(block: Block, passes: int) -> None:
    head, tokens = new_head(), block.logits.argmax(-1)
    settled = head.draft(block).tokens
    for _ in range(passes):
        logits = refined(head, block, after(block, tokens))
        tokens = logits.argmax(-1)
    head.passes = passes
    got = head.draft(block)
    assert torch.equal(got.tokens, tokens) and torch.equal(got.tokens[:, :passes], settled[:, :passes])
    assert passes > 3 or not torch.equal(got.tokens, settled), "these blocks must need more passes"
    shares = logits.softmax(-1).gather(-1, tokens[..., None])[..., 0]
    torch.testing.assert_close(got.probabilities(), shares, rtol=1e-3, atol=1e-4)


def test_as_many_passes_as_slots_are_a_fixed_point(block: Block) -> None:
    head = new_head()
    tokens = head.draft(block).tokens
    assert torch.equal(refined(head, block, after(block, tokens)).argmax(-1), tokens)


def test_no_pass_is_made_that_cannot_change_anything(block: Block, monkeypatch) -> None:
    head, made = new_head(), []
    readout = head.readout.forward
    monkeypatch.setattr(head.readout, "forward", lambda codes: made.append(codes.shape) or readout(codes))
    settled = head.draft(block).tokens
    assert made == [(BLOCKS, SLOTS, RANK)] * SLOTS
    head.passes = 2 * SLOTS
    assert torch.equal(head.draft(block).tokens, settled) and len(made) == 2 * SLOTS, "the last slot is then final"
    made.clear()
    torch.nn.init.zeros_(head.readout.weight)
    head.draft(block)
    assert len(made) == 1, "the first pass changed nothing"


@pytest.mark.parametrize("slot", range(SLOTS))
def test_a_token_changes_no_slot_before_its_own(block: Block, slot: int) -> None:
    head, tokens = new_head(), torch.zeros(BLOCKS, SLOTS, dtype=torch.int64)
    changed = tokens.clone()
    changed[:, slot] = 1
    first, second = refined(head, block, tokens), refined(head, block, changed)
    assert torch.equal(first[:, :slot], second[:, :slot])
    assert ((first - second).abs().amax(-1) > 1e-3)[:, slot:].all()


def test_the_anchors_own_row_is_read_and_missed(block: Block) -> None:
    head = new_head()
    previous = after(block, head.draft(block).tokens)
    known = refined(head, block, previous)
    block.anchor_hidden = block.anchor_hidden + 1
    assert ((refined(head, block, previous) - known).abs().amax(-1) > 1e-3).all()
    block.anchor_hidden = None
    with pytest.raises(ValueError, match="reads the state of the anchor's own row; give the Block anchor_hidden"):
        head.draft(block)


def test_a_fresh_head_changes_little(block: Block) -> None:
    head = new_head(spread=0.0)
    bias = refined(head, block, after(block, block.logits.argmax(-1))) - block.logits
    assert 0 < bias.abs().max() < 0.05
    assert not head.mix_l.any()
