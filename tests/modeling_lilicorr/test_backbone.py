"""The DFlash backbone: training sees what serving sees, and both are what a plain implementation computes."""

import pytest
import torch
from lilicorr import LiLiCorrConfig, LiLiCorrModel
from torch import Tensor
from torch.nn import functional as F

BLOCK, DIM, TAPS, VOCAB = 5, 32, 3, 50
KINDS = {
    "full": {},
    "sliding": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4},
    "all-sliding": {"layer_types": ["sliding_attention"] * 2, "sliding_window": 7},
    "biased": {"attention_bias": True},
    "convolved": {"conv_kernel_size": 3, "conv_group_size": 8},
}


def make_config(head_type: str = "none", **overrides) -> LiLiCorrConfig:
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": DIM,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "block_size": BLOCK,
        "mask_token_id": VOCAB - 1,
        "target_layer_ids": [1, 2, 4],
        "num_target_layers": 6,
        "initializer_range": 0.2,
        "head_type": head_type,
    }
    config = LiLiCorrConfig(**{**settings, **overrides})
    if head_type == "lilicorr":
        config.head_config.update(num_candidates=3, hidden_size=16, num_heads=2, intermediate_size=24, factor_dim=12)
    return config


def make_model(attention: str = "sdpa", head_type: str = "none", **overrides) -> LiLiCorrModel:
    torch.manual_seed(0)
    model = LiLiCorrModel._from_config(make_config(head_type, **overrides), attn_implementation=attention).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name or "_conv." in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    assert model.config._attn_implementation == attention
    return model


def sequence(batch: int, length: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Token ids `[batch, length]` and tapped states `[batch, length, taps * d]`."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (batch, length), generator=generator)
    return ids, torch.randn(batch, length, TAPS * DIM, generator=generator)


TABLE = torch.randn(VOCAB, DIM, generator=torch.Generator().manual_seed(7)) * 0.5
LM_WEIGHT = torch.randn(VOCAB, DIM, generator=torch.Generator().manual_seed(8)) * 0.5


def embed(ids: Tensor) -> Tensor:
    return TABLE[ids]


def training_pass(model: LiLiCorrModel, ids: Tensor, taps: Tensor, anchors: Tensor) -> Tensor:
    """All blocks of `anchors [batch, n]` in one pass, as rows; a block sees context rows before its anchor only."""
    batch, length = ids.shape
    flat = anchors.reshape(-1)
    rows = flat.numel()
    anchor_ids = ids.gather(1, anchors).reshape(-1)
    visible = torch.arange(length)[None] < flat[:, None]
    mask = torch.cat([visible, visible.new_ones(rows, BLOCK)], dim=1)[:, None, None]
    return model.decode_block(
        embed(model.block_ids(anchor_ids)).to(model.dtype),
        model.project_context(taps.to(model.dtype)),
        flat[:, None] + torch.arange(BLOCK),
        torch.arange(length)[None].expand(batch, -1),
        attention_mask=mask,
    )


def serving_pass(model: LiLiCorrModel, ids: Tensor, taps: Tensor, anchor: int, chunks: list[int]) -> Tensor:
    """One block at `anchor` after the cache took in rows `0 … anchor - 1` of a single sequence, chunk by chunk."""
    assert sum(chunks) == anchor
    cache, start = model.new_cache(), 0
    for size in chunks:
        positions = torch.arange(start, start + size)[None]
        end = start + size
        states = model(
            embed(model.block_ids(ids[:, end])).to(model.dtype),
            taps[:, start:end].to(model.dtype),
            end + torch.arange(BLOCK)[None],
            positions,
            cache=cache,
        )
        start = end
    assert cache.length == anchor and torch.equal(cache.positions, torch.arange(anchor)[None])
    return states


def plain_pass(model: LiLiCorrModel, ids: Tensor, taps: Tensor, anchor: int) -> Tensor:
    """The backbone written out: one block, one head and one query row at a time."""
    config, w = model.config, dict(model.named_parameters())
    head, groups = config.head_dim, config.num_attention_heads // config.num_key_value_heads

    def norm(name: str, x: Tensor) -> Tensor:
        return x * (x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt() * w[f"{name}.weight"]

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    def rope(x: Tensor, positions: Tensor) -> Tensor:
        frequency = config.rope_parameters["rope_theta"] ** (-torch.arange(0, head, 2, dtype=torch.float64) / head)
        angle = positions[:, None].double() * frequency
        cos, sin = angle.cos().float(), angle.sin().float()
        left, right = x[..., : head // 2], x[..., head // 2 :]
        return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)

    def mixed(name: str, x: Tensor, entered: Tensor, side: int) -> Tensor:
        count, group = config.conv_kernel_size, config.conv_group_size
        if not count:
            return x
        kernels = linear(f"{name}.kernel_projection", entered).view(BLOCK, 2, count, DIM // group)
        rows = []
        for b in range(BLOCK):
            row = torch.zeros(DIM)
            for tap in range(min(count, b + 1)):
                for channel in range(DIM):
                    kernel = w[f"{name}.base_kernel"][side, tap, channel] + kernels[b, side, tap, channel // group]
                    row[channel] += kernel * x[b - tap, channel]
            rows.append(row)
        return torch.stack(rows)

    context = norm("hidden_norm", linear("fc", taps[0, :anchor]))
    block_ids = torch.full((BLOCK,), config.mask_token_id)
    block_ids[0] = ids[0, anchor]
    x = TABLE[block_ids]
    positions = torch.arange(anchor + BLOCK)
    for i, kind in enumerate(config.layer_types):
        name = f"layers.{i}"
        entered = norm(f"{name}.input_layernorm", x)
        inner = mixed(f"{name}.attention_conv", entered, entered, 0)
        source = torch.cat([context, inner])
        heads = []
        for h in range(config.num_attention_heads):
            own, shared = slice(h * head, (h + 1) * head), slice(h // groups * head, (h // groups + 1) * head)
            q = norm(f"{name}.self_attn.q_norm", linear(f"{name}.self_attn.q_proj", inner)[:, own])
            k = norm(f"{name}.self_attn.k_norm", linear(f"{name}.self_attn.k_proj", source)[:, shared])
            v = linear(f"{name}.self_attn.v_proj", source)[:, shared]
            q, k = rope(q, positions[anchor:]), rope(k, positions)
            rows = []
            for b in range(BLOCK):
                first = max(0, anchor + b - config.sliding_window + 1) if kind == "sliding_attention" else 0
                seen = [j for j in range(anchor + BLOCK) if j >= first or j >= anchor]
                rows.append((q[b] @ k[seen].T * head**-0.5).softmax(-1) @ v[seen])
            heads.append(torch.stack(rows))
        attended = linear(f"{name}.self_attn.o_proj", torch.cat(heads, dim=-1))
        x = x + mixed(f"{name}.attention_conv", attended, entered, 1)
        entered = norm(f"{name}.post_attention_layernorm", x)
        inner = mixed(f"{name}.mlp_conv", entered, entered, 0)
        gated = F.silu(linear(f"{name}.mlp.gate_proj", inner)) * linear(f"{name}.mlp.up_proj", inner)
        x = x + mixed(f"{name}.mlp_conv", linear(f"{name}.mlp.down_proj", gated), entered, 1)
    return norm("norm", x)


def test_five_layers_have_the_58_tensors_of_a_dflash_checkpoint() -> None:
    with torch.device("meta"):
        model = LiLiCorrModel(LiLiCorrConfig(head_type="none"))
    shapes = {"fc.weight": (4096, 5 * 4096), "hidden_norm.weight": (4096,), "norm.weight": (4096,)}
    for i in range(5):
        shapes |= {
            f"layers.{i}.self_attn.q_proj.weight": (4096, 4096),
            f"layers.{i}.self_attn.k_proj.weight": (1024, 4096),
            f"layers.{i}.self_attn.v_proj.weight": (1024, 4096),
            f"layers.{i}.self_attn.o_proj.weight": (4096, 4096),
            f"layers.{i}.self_attn.q_norm.weight": (128,),
            f"layers.{i}.self_attn.k_norm.weight": (128,),
            f"layers.{i}.mlp.gate_proj.weight": (12288, 4096),
            f"layers.{i}.mlp.up_proj.weight": (12288, 4096),
            f"layers.{i}.mlp.down_proj.weight": (4096, 12288),
            f"layers.{i}.input_layernorm.weight": (4096,),
            f"layers.{i}.post_attention_layernorm.weight": (4096,),
        }
    assert len(shapes) == 58
    assert {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()} == shapes
    assert sum(p.numel() for p in model.parameters()) == 1_048_626_432


def test_fresh_convolutions_change_nothing_and_trained_ones_do() -> None:
    torch.manual_seed(0)
    convolved = LiLiCorrModel(make_config(conv_kernel_size=2, conv_group_size=16)).eval()
    plain = LiLiCorrModel(make_config()).eval()
    added = plain.load_state_dict(convolved.state_dict(), strict=False)
    assert len(added.unexpected_keys) == 2 * 2 * 2 and not added.missing_keys
    shapes = {tuple(convolved.state_dict()[name].shape) for name in added.unexpected_keys}
    assert shapes == {(2, 2, DIM), (2 * 2 * DIM // 16, DIM)}
    ids, taps = sequence(1, 9)
    with torch.no_grad():
        want = serving_pass(plain, ids, taps, 8, [8])
        assert torch.equal(serving_pass(convolved, ids, taps, 8, [8]), want)
        convolved.layers[0].mlp_conv.kernel_projection.weight.normal_()
        assert not torch.allclose(serving_pass(convolved, ids, taps, 8, [8]), want, atol=1e-3)


def test_the_head_adds_tensors_under_its_prefix_only_and_no_embedding_or_lm_head() -> None:
    plain, corrected = make_model(), make_model(head_type="lilicorr")
    extra = set(corrected.state_dict()) - set(plain.state_dict())
    assert extra and all(name.startswith("lilicorr.") for name in extra)
    assert set(plain.state_dict()) <= set(corrected.state_dict())
    assert corrected.get_output_embeddings() is None


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_under_the_training_mask_equal_the_cached_inference_pass(kind: str, attention: str) -> None:
    model = make_model(attention, **KINDS[kind])
    ids, taps = sequence(batch=2, length=24)
    anchors = torch.tensor([[1, 4, 9, 16], [3, 6, 7, 18]])
    with torch.no_grad():
        trained = training_pass(model, ids, taps, anchors).view(2, 4, BLOCK, DIM)
        for b in range(2):
            for n, anchor in enumerate(anchors[b].tolist()):
                one = ids[b : b + 1], taps[b : b + 1]
                for chunks in {(anchor,), (1, anchor - 1), (anchor - 2, 1, 1), (anchor // 3, anchor - anchor // 3)}:
                    if min(chunks) > 0:
                        served = serving_pass(model, *one, anchor, list(chunks))
                        torch.testing.assert_close(served[0], trained[b, n], rtol=0, atol=2e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_both_passes_equal_a_plain_implementation(kind: str, attention: str) -> None:
    model = make_model(attention, **KINDS[kind])
    ids, taps = sequence(batch=1, length=14, seed=3)
    with torch.no_grad():
        for anchor in (1, 5, 13):
            want = plain_pass(model, ids, taps, anchor)
            served = serving_pass(model, ids, taps, anchor, [1] * anchor)
            trained = training_pass(model, ids, taps, torch.tensor([[anchor]]))
            torch.testing.assert_close(served[0], want, rtol=0, atol=2e-5)
            torch.testing.assert_close(trained[0], want, rtol=0, atol=2e-5)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_block_without_any_context_is_finite_and_sees_itself_only(attention: str) -> None:
    model = make_model(attention)
    ids, taps = sequence(batch=1, length=6)
    with torch.no_grad():
        got = training_pass(model, ids, taps, torch.tensor([[0]]))[0]
        torch.testing.assert_close(got, plain_pass(model, ids, taps, 0), rtol=0, atol=2e-5)


def test_rows_at_and_after_the_anchor_never_reach_a_training_block() -> None:
    model = make_model()
    ids, taps = sequence(batch=1, length=12)
    taps.requires_grad_()
    states = training_pass(model, ids, taps, torch.tensor([[2, 7]]))
    for n, anchor in enumerate((2, 7)):
        (grad,) = torch.autograd.grad(states[n].square().sum(), taps, retain_graph=True)
        reach = grad[0].abs().sum(-1)
        assert (reach[:anchor] > 0).all() and not reach[anchor:].any()


def test_every_slot_sees_the_whole_block() -> None:
    model = make_model()
    noise = torch.randn(1, BLOCK, DIM, requires_grad=True)
    context = model.project_context(torch.randn(1, 3, TAPS * DIM))
    states = model.decode_block(noise, context, torch.arange(3, 3 + BLOCK)[None], torch.arange(3)[None])
    for slot in range(BLOCK):
        (grad,) = torch.autograd.grad(states[0, slot].square().sum(), noise, retain_graph=True)
        assert (grad[0].abs().sum(-1) > 0).all()


def test_the_cache_grows_past_its_first_buffer_without_changing_a_row() -> None:
    model = make_model()
    ids, taps = sequence(batch=1, length=301)
    cache, sizes = model.new_cache(), []
    with torch.no_grad():
        for start in range(0, 300, 3):
            positions = torch.arange(start, start + 3)[None]
            noise = embed(model.block_ids(ids[:, start + 3]))
            states = model(
                noise, taps[:, start : start + 3], start + 3 + torch.arange(BLOCK)[None], positions, cache=cache
            )
            sizes.append(cache._keys[0].shape[2])
        want = training_pass(model, ids, taps, torch.tensor([[300]]))
    torch.testing.assert_close(states, want, rtol=0, atol=2e-5)
    assert cache.length == 300 and len(set(sizes)) > 2, "the buffer must have grown more than once"
    assert len(set(sizes)) < 8, "and not at every block"


def test_the_rows_of_a_block_leave_no_trace_in_the_cache() -> None:
    model = make_model()
    ids, taps = sequence(batch=1, length=30)
    with torch.no_grad():
        want = serving_pass(model, ids, taps, 20, [10, 10])
        poisoned = ids.clone()
        poisoned[:, 10] = (ids[:, 10] + 1) % VOCAB  # only the anchor of the first block differs
        assert torch.equal(serving_pass(model, poisoned, taps, 20, [10, 10]), want)


def run_drafts(model: LiLiCorrModel, chunks: list[int], seed: int = 1, **options):
    ids, taps = sequence(batch=1, length=sum(chunks) + 1, seed=seed)
    cache, start, drafts = model.new_cache(), 0, []
    with torch.no_grad():
        for size in chunks:
            end = start + size
            drafts.append(
                model.draft(
                    ids[:, end],
                    taps[:, start:end].to(model.dtype),
                    torch.arange(start, end)[None],
                    cache,
                    lambda i: embed(i).to(model.dtype),
                    lambda h: F.linear(h, LM_WEIGHT.to(h.dtype)),
                    **options,
                )
            )
            start = end
    return drafts


@pytest.mark.parametrize("head_type", ["none", "lilicorr"])
def test_each_context_row_is_projected_once_over_a_whole_generation(head_type: str) -> None:
    model, rows = make_model(head_type=head_type), []
    model.fc.register_forward_hook(lambda _module, args, _out: rows.append(args[0].shape[0] * args[0].shape[1]))
    seen = []
    projection = model.layers[1].self_attn.k_proj
    projection.register_forward_hook(lambda _module, args, _out: seen.append(args[0].shape[0] * args[0].shape[1]))
    chunks = [9, 1, 4, 2, 5]
    run_drafts(model, chunks)
    assert rows == chunks
    assert sum(seen) == sum(chunks) + len(chunks) * BLOCK, "keys: each context row once, and each block's own rows"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_type", ["none", "lilicorr"])
def test_a_draft_has_the_promised_shapes_dtypes_and_order(head_type: str, dtype: torch.dtype) -> None:
    model = make_model(head_type=head_type).to(dtype)
    count = model.head.num_candidates
    for draft in run_drafts(model, [6, 2, 3], return_lattice=True):
        assert draft.tokens.shape == draft.finite.shape == (1, BLOCK - 1)
        assert draft.tokens.dtype == torch.int64 and draft.finite.dtype == torch.bool and draft.finite.all()
        assert draft.tokens.min() >= 0 and draft.tokens.max() < VOCAB
        lattice = draft.lattice
        assert lattice.candidates.shape == lattice.log_probs.shape == (1, BLOCK - 1, count)
        assert lattice.candidates.dtype == lattice.picks.dtype == torch.int64
        assert lattice.log_probs.dtype == torch.float32 and (lattice.log_probs <= 0).all()
        assert (lattice.log_probs.diff(dim=-1) <= 0).all(), "descending"
        assert all(len(set(slot)) == count for slot in lattice.candidates[0].tolist()), "distinct candidates"
        assert torch.equal(draft.tokens, lattice.candidates.gather(-1, lattice.picks[..., None])[..., 0])
        if head_type == "none":
            assert lattice.first_scores is None and lattice.pair_scores is None and not lattice.picks.any()
        else:
            assert lattice.first_scores.shape == (1, count) and lattice.first_scores.dtype == torch.float32
            assert lattice.pair_scores.shape == (1, BLOCK - 2, count, count)
            assert lattice.pair_scores.dtype == torch.float32


def test_the_lattice_is_only_returned_on_request() -> None:
    assert all(draft.lattice is None for draft in run_drafts(make_model(head_type="lilicorr"), [3, 2]))


def test_a_draft_reads_the_lm_head_on_the_states_of_the_training_pass() -> None:
    model = make_model()
    ids, taps = sequence(batch=1, length=12)
    draft = run_drafts(model, [5, 6], return_lattice=True)[-1]
    with torch.no_grad():
        hidden = training_pass(model, ids, taps, torch.tensor([[11]]))[:, 1:]
    want = F.linear(hidden, LM_WEIGHT).log_softmax(-1)
    assert torch.equal(draft.tokens, want.argmax(-1))
    torch.testing.assert_close(draft.lattice.log_probs, want.gather(-1, draft.lattice.candidates), rtol=0, atol=1e-4)


def test_a_bf16_backbone_stays_close_to_fp32() -> None:
    model = make_model()
    ids, taps = sequence(batch=1, length=12)
    with torch.no_grad():
        want = serving_pass(model, ids, taps, 11, [5, 6])
        model.to(torch.bfloat16)
        served = serving_pass(model, ids, taps, 11, [5, 6])
        trained = training_pass(model, ids, taps, torch.tensor([[11]]))
    assert served.dtype == trained.dtype == torch.bfloat16
    torch.testing.assert_close(served.float(), want, rtol=0.05, atol=0.15)
    torch.testing.assert_close(served.float(), trained.float(), rtol=0.05, atol=0.15)


def test_block_ids_are_the_anchor_and_mask_tokens() -> None:
    ids = make_model().block_ids(torch.tensor([4, 11]))
    mask = VOCAB - 1
    assert ids.tolist() == [[4, mask, mask, mask, mask], [11, mask, mask, mask, mask]]
    assert ids.dtype == torch.int64


@pytest.mark.parametrize("head_type", ["none", "lilicorr"])
def test_lm_head_rows_beyond_the_vocabulary_neither_win_nor_enter_the_normaliser(head_type: str) -> None:
    model = make_model(head_type=head_type)
    ids, taps = sequence(batch=1, length=7)
    drafts = []
    for padding in (0, 14):
        rows = torch.cat([LM_WEIGHT, 100 * torch.ones(padding, DIM)])
        sign = torch.cat([torch.ones(VOCAB), torch.full((padding,), 1e4)])
        with torch.no_grad():
            head = lambda h, rows=rows, sign=sign: F.linear(h, rows).abs() * sign  # noqa: E731
            arguments = (ids[:, 6], taps[:, :6], torch.arange(6)[None], model.new_cache(), embed, head)
            drafts.append(model.draft(*arguments, return_lattice=True))
    assert torch.equal(drafts[0].tokens, drafts[1].tokens)
    assert torch.equal(drafts[0].lattice.candidates, drafts[1].lattice.candidates)
    torch.testing.assert_close(drafts[0].lattice.log_probs, drafts[1].lattice.log_probs)


def test_two_generations_do_not_share_state() -> None:
    model = make_model(head_type="lilicorr")
    first = run_drafts(model, [4, 3])
    run_drafts(model, [7, 2], seed=9)
    again = run_drafts(model, [4, 3])
    assert [d.tokens.tolist() for d in first] == [d.tokens.tolist() for d in again]


def test_a_fresh_backbone_is_finite_with_unit_norms() -> None:
    torch.manual_seed(0)
    for name, parameter in LiLiCorrModel(make_config()).named_parameters():
        assert parameter.isfinite().all(), name
        if "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            assert parameter.std().item() == pytest.approx(0.2, rel=0.1), name
