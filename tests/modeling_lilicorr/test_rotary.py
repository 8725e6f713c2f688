"""Positions of the drafter: whole or partial heads, any settings of a target, fp32 under casts, one meaning a pass."""

import pytest
import torch
from lilicorr import LiLiCorrConfig, LiLiCorrModel
from transformers import Glm4Config, NemotronConfig, Phi3Config, StableLmConfig

DIM, VOCAB, HEAD, BLOCK = 32, 50, 16, 5
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": DIM, "intermediate_size": 48, "num_hidden_layers": 6, "num_attention_heads": 2,
    "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 64,
}  # fmt: skip
LENGTH = {"original_max_position_embeddings": 24}
ROPES = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, **LENGTH},
    "llama3": {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **LENGTH},
    "longrope": {"factor": 4.0, **LENGTH},
}
TABLE = torch.randn(VOCAB, DIM, generator=torch.Generator().manual_seed(7)) * 0.5


def rope(kind: str, share: float = 1.0) -> dict:
    settings = {"rope_type": kind, "rope_theta": 1e4, **ROPES[kind]}
    if kind == "longrope":
        count = int(HEAD * share) // 2
        settings |= {
            "short_factor": [1.0 + i / 8 for i in range(count)],
            "long_factor": [3.0 + i for i in range(count)],
        }
    return settings | ({} if share == 1.0 else {"partial_rotary_factor": share})


def make(kind: str, share: float = 1.0, **overrides) -> LiLiCorrModel:
    torch.manual_seed(0)
    config = LiLiCorrConfig(
        **{**SHAPE, "num_hidden_layers": 2}, head_dim=HEAD, block_size=BLOCK, mask_token_id=VOCAB - 1, head_type="none",
        target_layer_ids=[1, 2, 3], num_target_layers=6, rope_parameters=rope(kind, share), initializer_range=0.3,
        **overrides,
    )  # fmt: skip
    return LiLiCorrModel(config).eval()


def states_of(length: int) -> torch.Tensor:
    return torch.randn(1, length, 3 * DIM, generator=torch.Generator().manual_seed(length))


@torch.no_grad()
def hidden(model: LiLiCorrModel, target_hidden: torch.Tensor, chunks: list[int]) -> torch.Tensor:
    """Hidden states of the block behind `target_hidden`, whose rows a cache took in chunk by chunk."""
    cache, start = model.new_cache(), 0
    for size in chunks:
        positions = torch.arange(start, start + size)[None]
        start += size
        noise = TABLE[model.block_ids(torch.tensor([3]))].to(model.dtype)
        block = start + torch.arange(BLOCK)[None]
        states = model(noise, target_hidden[:, start - size : start].to(model.dtype), block, positions, cache=cache)
    return states


@torch.no_grad()
def fresh(model: LiLiCorrModel, target_hidden: torch.Tensor) -> torch.Tensor:
    """The same without a cache."""
    length = target_hidden.shape[1]
    noise = TABLE[model.block_ids(torch.tensor([3]))].to(model.dtype)
    positions = torch.arange(length)[None]
    return model(noise, target_hidden.to(model.dtype), length + torch.arange(BLOCK)[None], positions)


@pytest.mark.parametrize("share", [1.0, 0.5, 0.25])
@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize("length", [12, 40, 90], ids=["short", "beyond the original", "beyond the maximum"])
def test_a_kept_context_means_what_a_fresh_one_does(kind: str, share: float, length: int) -> None:
    model, target_hidden = make(kind, share), states_of(length)
    kept = hidden(model, target_hidden, [3, *[4] * ((length - 4) // 4), (length - 4) % 4 + 1])
    torch.testing.assert_close(kept, fresh(model, target_hidden), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_long_text_leaves_no_trace_in_the_next(kind: str) -> None:
    model, target_hidden = make(kind), states_of(80)
    before = fresh(model, target_hidden)
    fresh(model, states_of(300))
    assert torch.equal(fresh(model, target_hidden), before)


@pytest.mark.parametrize("kind", ["yarn", "longrope"])
def test_dimensions_behind_the_rotated_ones_do_not_turn(kind: str) -> None:
    cos, _ = make(kind, 0.5).rotary_emb(torch.zeros(1), torch.arange(9)[None])
    assert cos.shape == (1, 9, HEAD // 2)


@pytest.mark.parametrize("kind", ROPES)
@pytest.mark.parametrize(
    "cast",
    [lambda m: m.to(torch.bfloat16), lambda m: m.half(), lambda m: m.bfloat16(), lambda m: m.to("cpu", torch.half)],
)
def test_a_cast_leaves_the_frequencies_as_they_were(kind: str, cast) -> None:
    model = make(kind)
    want, positions = model.rotary_emb.inv_freq.clone(), torch.tensor([[0, 100, 1000, 4000]])
    cos, sin = model.rotary_emb(torch.zeros(1), positions)
    model = cast(model)
    assert model.fc.weight.dtype in (torch.bfloat16, torch.float16)
    for name in ("inv_freq", "original_inv_freq"):
        assert torch.equal(getattr(model.rotary_emb, name), want)
    turned = model.rotary_emb(torch.zeros(1), positions)
    assert torch.equal(turned[0], cos) and torch.equal(turned[1], sin)
    assert torch.equal(model.float().rotary_emb.inv_freq, want)


def test_frequencies_move_with_the_drafter() -> None:
    model = make("yarn").to(torch.bfloat16)
    assert model.rotary_emb.to("meta").inv_freq.is_meta


TARGETS = {
    "glm4": lambda rope: Glm4Config(**SHAPE, head_dim=HEAD, rope_parameters=rope),
    "phi3": lambda rope: Phi3Config(**{**SHAPE, "hidden_size": DIM}, rope_parameters=rope),
    "stablelm": lambda rope: StableLmConfig(**SHAPE, rope_parameters=rope),
    "nemotron": lambda rope: NemotronConfig(**SHAPE, head_dim=HEAD, rope_parameters=rope),
}


@pytest.mark.parametrize(
    "family, kind",
    [(family, kind) for family in TARGETS for kind in ROPES if family != "phi3" or kind in ("default", "longrope")],
)
def test_targets_that_rotate_part_of_a_head_get_a_drafter_that_drafts(family: str, kind: str) -> None:
    target = TARGETS[family](rope(kind, 0.5))
    assert target.rope_parameters["partial_rotary_factor"] == 0.5
    config = LiLiCorrConfig.for_target(target, head_type="none", num_hidden_layers=2, block_size=BLOCK)
    model, target_hidden = LiLiCorrModel(config).eval(), states_of(30)[..., : len(config.target_layer_ids) * DIM]
    torch.testing.assert_close(hidden(model, target_hidden, [20, 10]), fresh(model, target_hidden), rtol=0, atol=1e-5)


def test_a_drafter_with_whole_heads_is_exported_and_one_with_partial_heads_is_not(tmp_path) -> None:
    make("yarn").save_dflash(tmp_path / "whole")
    with pytest.raises(ValueError, match=r"rotates 0\.5 of each head .* which DFlash runtimes do not"):
        make("yarn", 0.5).save_dflash(tmp_path / "partial")
