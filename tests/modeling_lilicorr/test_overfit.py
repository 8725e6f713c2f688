"""An overfit drafter commits whole blocks: 15 drafted tokens and the target's own, every time."""

import pytest
import torch
from lilicorr import LiLiCorrModel
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from ..tiny import HEAD, tiny_drafter_for, tiny_target

BLOCK, VOCAB, PROMPT, BLOCKS, COUNT = 16, 64, 6, 3, 3
LENGTH = PROMPT + 1 + BLOCKS * BLOCK  # the prompt's own pass gives one token, each block sixteen


def make_target(family: str) -> PreTrainedModel:
    shape = {"vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 5, "head_dim": 12}
    return tiny_target(family, seed=0, **shape, initializer_range=0.3, bos_token_id=None)


def make_drafter(target: PreTrainedModel, head_type: str) -> LiLiCorrModel:
    changes = {"intermediate_size": 96, "target_layer_ids": [1, 2], "decoding": "stock"}  # whole blocks, one path each
    if head_type == "lilicorr":
        changes["head_config"] = HEAD | {
            "num_candidates": COUNT, "hidden_size": 32, "num_layers": 2, "intermediate_size": 48, "factor_dim": 32,
        }  # fmt: skip
    return tiny_drafter_for(target, head_type, seed=1, block_size=BLOCK, **changes)


def pair_loss(first: Tensor, pair: Tensor, gold: Tensor) -> Tensor:
    """Cross-entropy of each slot's gold candidate given the gold one before, where both are in the pool (`>= 0`)."""
    known = (gold >= 0).cumprod(dim=1).bool()  # the oracle prefix: it ends at the first miss
    safe = gold.clamp_min(0)
    rows = pair.gather(2, safe[:, :-1, None, None].expand(-1, -1, 1, pair.shape[-1])).squeeze(2)
    losses = F.cross_entropy(torch.cat([first[:, None], rows], dim=1).flatten(0, 1), safe.flatten(), reduction="none")
    return (losses * known.flatten()).sum() / known.sum().clamp_min(1)


def overfit(drafter: LiLiCorrModel, target: PreTrainedModel, ids: Tensor, steps: int) -> None:
    """Plain cross-entropy on every block of `ids [1, L]` whose slots all exist, under the training mask."""
    with torch.no_grad():
        states = target(ids, output_hidden_states=True).hidden_states
    taps = torch.cat([states[layer + 1] for layer in drafter.config.target_layer_ids], dim=-1)
    embed, lm_head = target.get_input_embeddings(), target.get_output_embeddings()
    anchors = torch.arange(PROMPT, LENGTH - BLOCK + 1)
    labels = ids[0][anchors[:, None] + torch.arange(1, BLOCK)]
    mask = torch.arange(LENGTH)[None] < anchors[:, None]
    mask = torch.cat([mask, mask.new_ones(len(anchors), BLOCK)], dim=1)[:, None, None]
    noise = embed(drafter.block_ids(ids[0, anchors])).detach()
    positions = anchors[:, None] + torch.arange(BLOCK)
    optimizer = torch.optim.AdamW(drafter.parameters(), lr=4e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=steps, pct_start=0.1)
    for _ in range(steps):
        context = drafter.project_context(taps)
        hidden = drafter.decode_block(noise, context, positions, torch.arange(LENGTH)[None], attention_mask=mask)[:, 1:]
        log_probs = F.linear(hidden, lm_head.weight.detach()).log_softmax(-1)
        loss = F.nll_loss(log_probs.flatten(0, 1), labels.flatten())
        if drafter.config.head_type == "lilicorr":
            candidates = log_probs.topk(COUNT, dim=-1).indices
            hit = candidates == labels[..., None]
            gold = torch.where(hit.any(-1), hit.int().argmax(-1), -1)
            factors = drafter.head.factors(
                embed(candidates), log_probs.gather(-1, candidates), hidden, context[0, anchors - 1]
            )
            out, inp, anchor_out = factors
            first = 8 * torch.einsum("ne,nke->nk", anchor_out, inp[:, 0])
            pair = 8 * torch.einsum("nsae,nsbe->nsab", out[:, :-1], inp[:, 1:])
            loss = loss + 0.25 * pair_loss(first, pair, gold)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if loss < 1e-3:
            break
    drafter.eval()


@pytest.mark.parametrize("family,head_type", [("llama", "none"), ("qwen3", "lilicorr")])
def test_a_drafter_overfit_on_one_sequence_reaches_acceptance_length_16_at_block_16(family, head_type) -> None:
    target = make_target(family)
    prompt = torch.randint(0, VOCAB, (1, PROMPT), generator=torch.Generator().manual_seed(2))
    options = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": LENGTH - PROMPT, "do_sample": False}
    plain = target.generate(prompt, **options)
    assert plain.shape[1] == LENGTH and len(plain[0, PROMPT:].unique()) > 10, "the sequence must be worth learning"

    drafter = make_drafter(target, head_type).eval()
    assert torch.equal(target.generate(prompt, assistant_model=drafter, **options), plain)
    assert drafter.last_generation.acceptance_length < 3, "an untrained drafter must not pass by accident"

    overfit(drafter, target, plain, steps=200)
    assisted = target.generate(prompt, assistant_model=drafter, **options)

    assert torch.equal(assisted, plain)
    figures = drafter.last_generation
    assert figures.acceptance_length == BLOCK
    assert (figures.blocks, figures.drafted, figures.accepted) == (BLOCKS, BLOCKS * 15, BLOCKS * 15)
    assert figures.accepted_per_slot == [BLOCKS] * 15
