"""Contexts of several sequences in one cache: each drafts as it would alone."""

import pytest
import torch
from lilicorr import LiLiCorrConfig, LiLiCorrModel

SHAPE = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "num_hidden_layers": 2, "block_size": 5, "mask_token_id": 0, "target_layer_ids": [0, 1],
    "num_target_layers": 4, "head_type": "none", "head_config": {},
}  # fmt: skip


def drafter(**changes):
    torch.manual_seed(3)
    model = LiLiCorrModel(LiLiCorrConfig(**(SHAPE | changes))).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
KINDS = {
    "full": {},
    "sliding": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6},
    "dynamic": {"rope_parameters": DYNAMIC, "max_position_embeddings": 64},
}


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def model(request):
    return drafter(**request.param)


def states_of(seed, length):
    return torch.randn(1, length, 64, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def test_rows_draft_as_they_would_alone(model):
    embed, lm_head = torch.nn.Embedding(40, 32), torch.nn.Linear(32, 40, bias=False)
    steps = [[7, 3], [1, 4], [2, 1], [5, 2]]  # new rows of each sequence, pass by pass
    alone = []
    for row in range(2):
        cache, start, logits = model.new_cache(), row, []
        for step, counts in enumerate(steps):
            new = counts[row]
            positions = torch.arange(start, start + new)[None]
            anchor = torch.tensor([3 + step])
            block = model.block(anchor, states_of(10 * row + step, new), positions, cache, embed, lm_head)
            logits.append(block.logits)
            start += new
        alone.append(logits)
    cache, starts = model.new_batch_cache(), [0, 1]
    for _ in range(2):
        cache.add_row()
    for step, counts in enumerate(steps):
        states = torch.zeros(2, max(counts), 64)
        positions = torch.zeros(2, max(counts), dtype=torch.long)
        for row, new in enumerate(counts):
            states[row, :new] = states_of(10 * row + step, new)[0]
            positions[row, :new] = torch.arange(starts[row], starts[row] + new)
            starts[row] += new
        cache.expect(counts)
        block = model.block(torch.tensor([3 + step] * 2), states, positions, cache, embed, lm_head)
        for row in range(2):
            if model.rotary_emb.follows_length and starts[row] != max(starts):
                continue  # frequencies follow the longest row
            torch.testing.assert_close(block.logits[row : row + 1], alone[row][step], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_rows_leave_and_come(model):
    embed, lm_head = torch.nn.Embedding(40, 32), torch.nn.Linear(32, 40, bias=False)
    cache = model.new_batch_cache()
    for _ in range(3):
        cache.add_row()

    def draft(seeds, starts, length):
        states = torch.cat([states_of(seed, length) for seed in seeds])
        positions = torch.stack([torch.arange(start, start + length) for start in starts])
        cache.expect([length] * len(seeds))
        return model.block(torch.tensor([7] * len(seeds)), states, positions, cache, embed, lm_head).logits

    draft([1, 2, 3], [0, 0, 0], 6)
    cache.keep([2, 0])
    kept = draft([4, 5], [6, 6], 2)
    single = model.new_cache()
    model.block(torch.tensor([7]), states_of(3, 6), torch.arange(6)[None], single, embed, lm_head)
    expected = model.block(torch.tensor([7]), states_of(4, 2), torch.arange(6, 8)[None], single, embed, lm_head).logits
    torch.testing.assert_close(kept[:1], expected, rtol=1e-4, atol=1e-4)
    cache.add_row()
    fresh = draft([6, 7, 8], [8, 8, 0], 8)
    alone = model.new_cache()
    expected = model.block(torch.tensor([7]), states_of(8, 8), torch.arange(8)[None], alone, embed, lm_head).logits
    if not model.rotary_emb.follows_length:
        torch.testing.assert_close(fresh[2:], expected, rtol=1e-4, atol=1e-4)
