"""The LiLiCorr head: its size, names, fresh weights, and the scores of an independent plain implementation."""

import pytest
import torch
from lilicorr import LiLiCorrConfig, LiLiCorrModel
from lilicorr.modeling_lilicorr.head_lilicorr import LiLiCorrHead
from lilicorr.modeling_lilicorr.lattice import Block
from torch import Tensor, nn
from torch.nn import functional as F

from .. import tiny
from ..tiny import HEAD

TABLES = ("slot_embedding", "rank_embedding", "relative_slot_bias", "same_slot_bias")
FACTOR_HEADS = ("out_head", "in_head", "anchor_out_head")


def tiny_config(hidden: int = 48, width: int = 32, block: int = 6, count: int = 4, **overrides) -> LiLiCorrConfig:
    sizes = {"num_candidates": count, "hidden_size": width, "num_layers": 2, "num_heads": 4}
    settings = {
        "vocab_size": 90,
        "hidden_size": hidden,
        "intermediate_size": 64,
        "mask_token_id": 89,
        "target_layer_ids": [1, 3],
        "num_target_layers": 6,
        "head_config": HEAD | sizes | {"intermediate_size": 40, "factor_dim": 24},
    }
    return tiny.tiny_config(block, **settings | overrides)


def lively(config: LiLiCorrConfig, seed: int = 0) -> LiLiCorrModel:
    """A model whose every head parameter, tables and norms too, is random: nothing hides behind a zero."""
    torch.manual_seed(seed)
    model = LiLiCorrModel(config).eval()
    with torch.no_grad():
        for parameter in model.head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def inputs(config: LiLiCorrConfig, blocks: int = 3, slots: int | None = None, count: int | None = None, seed: int = 1):
    generator = torch.Generator().manual_seed(seed)
    slots = slots or config.num_slots
    count = count or config.head_config["num_candidates"]
    dim = config.hidden_size
    logits = torch.randn(blocks, slots, 50, generator=generator) * 2
    log_probs = logits.log_softmax(-1).topk(count, dim=-1).values
    return {
        "embeds": torch.randn(blocks, slots, count, dim, generator=generator),
        "log_probs": log_probs,
        "hidden": torch.randn(blocks, slots, dim, generator=generator),
        "anchor_state": torch.randn(blocks, dim, generator=generator),
    }


# --- size and names ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hidden,total", [(4096, 36_758_794), (2560, 32_040_202)])
def test_the_head_has_the_papers_parameter_count(hidden: int, total: int) -> None:
    with torch.device("meta"):
        head = LiLiCorrHead(LiLiCorrConfig(hidden_size=hidden))
    assert sum(p.numel() for p in head.parameters()) == total
    assert not list(head.buffers())


PAPER_TENSORS = {
    "token_proj.weight": (1024, 4096),
    "token_proj.bias": (1024,),
    "pass_hidden_proj.weight": (1024, 4096),
    "pass_hidden_proj.bias": (1024,),
    "feature_mlp.0.weight": (5,),
    "feature_mlp.0.bias": (5,),
    "feature_mlp.1.weight": (1024, 5),
    "feature_mlp.1.bias": (1024,),
    "feature_mlp.3.weight": (1024, 1024),
    "feature_mlp.3.bias": (1024,),
    "slot_embedding": (1, 1, 15, 1, 1024),
    "rank_embedding": (1, 1, 1, 8, 1024),
    "relative_slot_bias": (8, 31),
    "same_slot_bias": (8,),
    "layers.0.attn_norm.weight": (1024,),
    "layers.0.attn.in_proj_weight": (3072, 1024),
    "layers.0.attn.in_proj_bias": (3072,),
    "layers.0.attn.out_proj.weight": (1024, 1024),
    "layers.0.attn.out_proj.bias": (1024,),
    "layers.0.mlp_norm.weight": (1024,),
    "layers.0.mlp.0.weight": (2048, 1024),
    "layers.0.mlp.0.bias": (2048,),
    "layers.0.mlp.2.weight": (1024, 2048),
    "layers.0.mlp.2.bias": (1024,),
    "layers.1.attn_norm.weight": (1024,),
    "layers.1.attn.in_proj_weight": (3072, 1024),
    "layers.1.attn.in_proj_bias": (3072,),
    "layers.1.attn.out_proj.weight": (1024, 1024),
    "layers.1.attn.out_proj.bias": (1024,),
    "layers.1.mlp_norm.weight": (1024,),
    "layers.1.mlp.0.weight": (2048, 1024),
    "layers.1.mlp.0.bias": (2048,),
    "layers.1.mlp.2.weight": (1024, 2048),
    "layers.1.mlp.2.bias": (1024,),
    "output_norm.weight": (1024,),
    "context_proj.weight": (1024, 4096),
    "context_proj.bias": (1024,),
    "anchor_norm.weight": (1024,),
    "factor_input_proj.weight": (1024, 3072),
    "factor_input_proj.bias": (1024,),
    "out_head.weight": (1024, 1024),
    "out_head.bias": (1024,),
    "in_head.weight": (1024, 1024),
    "in_head.bias": (1024,),
    "anchor_out_head.weight": (1024, 1024),
    "anchor_out_head.bias": (1024,),
}
LATTICE_LAYER = {
    "attn_norm.weight": (32,),
    "attn.in_proj_weight": (96, 32),
    "attn.in_proj_bias": (96,),
    "attn.out_proj.weight": (32, 32),
    "attn.out_proj.bias": (32,),
    "mlp_norm.weight": (32,),
    "mlp.0.weight": (40, 32),
    "mlp.0.bias": (40,),
    "mlp.2.weight": (32, 40),
    "mlp.2.bias": (32,),
}
TINY_TENSORS = {
    "token_proj.weight": (32, 48),
    "token_proj.bias": (32,),
    "pass_hidden_proj.weight": (32, 48),
    "pass_hidden_proj.bias": (32,),
    "feature_mlp.0.weight": (5,),
    "feature_mlp.0.bias": (5,),
    "feature_mlp.1.weight": (32, 5),
    "feature_mlp.1.bias": (32,),
    "feature_mlp.3.weight": (32, 32),
    "feature_mlp.3.bias": (32,),
    "slot_embedding": (1, 1, 5, 1, 32),
    "rank_embedding": (1, 1, 1, 4, 32),
    "relative_slot_bias": (4, 11),
    "same_slot_bias": (4,),
    **{f"layers.{i}.{name}": shape for i in range(2) for name, shape in LATTICE_LAYER.items()},
    "output_norm.weight": (32,),
    "context_proj.weight": (32, 48),
    "context_proj.bias": (32,),
    "anchor_norm.weight": (32,),
    "factor_input_proj.weight": (32, 96),
    "factor_input_proj.bias": (32,),
    "out_head.weight": (24, 32),
    "out_head.bias": (24,),
    "in_head.weight": (24, 32),
    "in_head.bias": (24,),
    "anchor_out_head.weight": (24, 32),
    "anchor_out_head.bias": (24,),
}


@pytest.mark.parametrize(
    "config,tensors", [(LiLiCorrConfig(), PAPER_TENSORS), (tiny_config(), TINY_TENSORS)], ids=["paper", "tiny"]
)
def test_every_head_tensor_has_its_contracted_name_and_shape(config: LiLiCorrConfig, tensors) -> None:
    with torch.device("meta"):
        head = LiLiCorrHead(config)
    assert {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()} == tensors


def test_the_head_is_saved_under_its_own_prefix() -> None:
    names = LiLiCorrModel(tiny_config()).state_dict()
    assert {name.removeprefix("lilicorr.") for name in names if name.startswith("lilicorr.")} == set(TINY_TENSORS)


def test_there_is_no_token_projection_where_the_widths_are_equal() -> None:
    model = lively(tiny_config(hidden=32, width=32))
    assert set(model.head.state_dict()) == set(TINY_TENSORS) - {"token_proj.weight", "token_proj.bias"}
    assert model.head.pass_hidden_proj.weight.shape == (32, 32)
    assert_matches_plain_head(model)


# --- fresh weights ----------------------------------------------------------------------------------------------------


def assert_fresh(head: nn.Module) -> None:
    for name, parameter in head.named_parameters():
        assert parameter.isfinite().all(), name
    for name in TABLES:
        assert not getattr(head, name).any(), f"{name} must start at zero"
    for name in FACTOR_HEADS:
        layer = getattr(head, name)
        assert layer.weight.std().item() == pytest.approx(0.02, rel=0.15), name
        assert abs(layer.weight.mean().item()) < 0.003 and not layer.bias.any(), name
    for name, parameter in head.named_parameters():
        if "norm.weight" in name:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
    for layer in head.layers:
        bound = (6 / (4 * layer.attn.in_proj_weight.shape[1])) ** 0.5
        assert bound * 0.9 < layer.attn.in_proj_weight.abs().max() <= bound
        assert not layer.attn.in_proj_bias.any()


@pytest.mark.parametrize("spread", [0.02, 0.5, 0.0])
def test_a_fresh_head_has_zero_tables_and_live_factor_heads_whatever_the_backbones_spread(spread: float) -> None:
    torch.manual_seed(0)
    assert_fresh(LiLiCorrModel(tiny_config(initializer_range=spread)).head)
    assert_fresh(LiLiCorrModel._from_config(tiny_config(initializer_range=spread)).head)


@pytest.fixture
def backbone() -> LiLiCorrModel:
    torch.manual_seed(0)
    return LiLiCorrModel(tiny_config(head_type="none", head_config=None))


def test_a_backbone_checkpoint_gets_a_fresh_head_and_keeps_its_tensors(backbone: LiLiCorrModel, tmp_path) -> None:
    backbone.save_dflash(tmp_path)
    model = LiLiCorrModel.from_dflash(tmp_path, head_config=tiny_config().head_config)
    assert set(model.head.state_dict()) == set(TINY_TENSORS)
    assert_fresh(model.head)
    for name, tensor in backbone.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name


def test_a_checkpoint_whose_config_promises_a_head_it_lacks_is_refused(backbone: LiLiCorrModel, tmp_path) -> None:
    backbone.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"lacks 46 of the tensors its config.json calls for, first 'lilicorr\."):
        LiLiCorrModel.from_pretrained(tmp_path, config=tiny_config())


def test_a_saved_head_comes_back_bit_for_bit(tmp_path) -> None:
    model = lively(tiny_config())
    model.save_pretrained(tmp_path)
    loaded, report = LiLiCorrModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


# --- an independent plain implementation ------------------------------------------------------------------------------


class PlainHead(nn.Module):
    """The head written out slowly, one candidate pair at a time, on torch's own attention and RMSNorm."""

    def __init__(self, weights: dict[str, Tensor], heads: int, eps: float, block: int) -> None:
        super().__init__()
        self.w, self.heads, self.eps, self.block = weights, heads, eps, block

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.w[f"{name}.weight"].T + self.w[f"{name}.bias"]

    def norm(self, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self.w[f"{name}.weight"], self.eps)

    def attention(self, prefix: str, x: Tensor, bias: Tensor) -> Tensor:
        module = nn.MultiheadAttention(x.shape[-1], self.heads, batch_first=True)
        module.load_state_dict({k: self.w[f"{prefix}.{k}"] for k in module.state_dict()})
        mask = bias.expand(x.shape[0], *bias.shape).reshape(-1, *bias.shape[1:])
        return module(x, x, x, attn_mask=mask, need_weights=False)[0]

    def nodes(self, embeds: Tensor, log_probs: Tensor, hidden: Tensor) -> Tensor:
        slots, count = log_probs.shape[1:]
        rows = []
        for s in range(slots):
            for k in range(count):
                lp = log_probs[:, s, k]
                rank = torch.full_like(lp, k / (count - 1) if count > 1 else 0.0)
                top = torch.full_like(lp, float(k == 0))
                features = torch.stack([lp, lp.exp(), lp - log_probs[:, s, 0], rank, top], dim=-1)
                f = F.layer_norm(features, (5,), self.w["feature_mlp.0.weight"], self.w["feature_mlp.0.bias"])
                node = self.linear("feature_mlp.3", F.silu(self.linear("feature_mlp.1", f)))
                token = embeds[:, s, k]
                node = node + (self.linear("token_proj", token) if "token_proj.weight" in self.w else token)
                node = node + self.linear("pass_hidden_proj", hidden[:, s])
                rows.append(node + self.w["slot_embedding"][0, 0, s, 0] + self.w["rank_embedding"][0, 0, 0, k])
        return torch.stack(rows, dim=1)

    def forward(self, embeds, log_probs, hidden, anchor_state, anchor_valid=None):
        blocks, slots, count = log_probs.shape
        x = self.nodes(embeds, log_probs, hidden)
        bias = torch.zeros(self.heads, slots * count, slots * count)
        for i in range(slots * count):
            for j in range(slots * count):
                query, key = i // count, j // count
                bias[:, i, j] = self.w["relative_slot_bias"][:, query - key + self.block - 1]
                if query == key:
                    bias[:, i, j] += self.w["same_slot_bias"]
        layer = 0
        while f"layers.{layer}.attn_norm.weight" in self.w:
            name = f"layers.{layer}"
            x = x + self.attention(f"{name}.attn", self.norm(f"{name}.attn_norm", x), bias)
            inner = F.silu(self.linear(f"{name}.mlp.0", self.norm(f"{name}.mlp_norm", x)))
            x = x + self.linear(f"{name}.mlp.2", inner)
            layer += 1
        x = self.norm("output_norm", x)
        t = self.linear("context_proj", anchor_state)
        if anchor_valid is not None:
            t = torch.where(anchor_valid[:, None], t, torch.zeros_like(t))
        t = self.norm("anchor_norm", t)
        shared = t[:, None].repeat(1, x.shape[1], 1)
        fused = F.silu(self.linear("factor_input_proj", torch.cat([x, shared, x * shared], dim=-1)))
        unit = lambda v: v / v.norm(dim=-1, keepdim=True)  # noqa: E731
        shape = (blocks, slots, count, -1)
        out, inp = (unit(self.linear(name, fused)).view(shape) for name in ("out_head", "in_head"))
        return out, inp, unit(self.linear("anchor_out_head", t))


def plain_head(model: LiLiCorrModel) -> PlainHead:
    weights = {name: tensor.detach() for name, tensor in model.head.state_dict().items()}
    return PlainHead(weights, 4, model.config.rms_norm_eps, model.config.block_size)


def assert_matches_plain_head(model: LiLiCorrModel, **sizes) -> None:
    given = inputs(model.config, **sizes)
    for valid in (None, torch.tensor([True, False, True])):
        with torch.no_grad():
            got = model.head.factors(**given, anchor_valid=valid)
            want = plain_head(model)(**given, anchor_valid=valid)
        for name, a, b in zip(("out", "inp", "anchor_out"), got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=2e-6, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("count", [1, 2, 4, 7])
def test_the_head_equals_a_plain_implementation(count: int) -> None:
    assert_matches_plain_head(lively(tiny_config(count=count), seed=count))


def test_a_head_serves_fewer_candidates_than_it_was_trained_with() -> None:
    assert_matches_plain_head(lively(tiny_config(count=6)), count=3)
    assert_matches_plain_head(lively(tiny_config(count=6)), count=1)


def test_a_head_scores_a_shortened_block_with_its_trained_geometry() -> None:
    assert_matches_plain_head(lively(tiny_config(block=8)), slots=3)


def test_scores_are_the_scaled_cosines_and_never_exceed_the_scale() -> None:
    config = tiny_config()
    model, given = lively(config), inputs(config)
    table = torch.randn(config.vocab_size, config.hidden_size)
    candidates = torch.randint(0, config.vocab_size, (3, 5, 4))
    valid = torch.tensor([True, True, False])
    states = (given["hidden"], given["anchor_state"])
    with torch.no_grad():
        first, pair = model.head.scores(table[candidates], given["log_probs"], *states, valid)
        out, inp, anchor_out = plain_head(model)(**{**given, "embeds": table[candidates]}, anchor_valid=valid)
    assert first.shape == (3, 4) and pair.shape == (3, 4, 4, 4)
    assert max(first.abs().max(), pair.abs().max()) <= 8.0 + 1e-5
    torch.testing.assert_close(first, 8 * (anchor_out[:, None] * inp[:, 0]).sum(-1), rtol=0, atol=2e-5)
    for s in range(4):
        want = 8 * torch.einsum("nae,nbe->nab", out[:, s], inp[:, s + 1])
        torch.testing.assert_close(pair[:, s], want, rtol=0, atol=2e-5)


def test_factors_have_unit_length() -> None:
    model = lively(tiny_config())
    for vectors in model.head.factors(**inputs(model.config)):
        torch.testing.assert_close(vectors.norm(dim=-1), torch.ones(vectors.shape[:-1]))


def test_an_absent_anchor_state_is_zero_whatever_stale_row_is_handed_in() -> None:
    model, given = lively(tiny_config()), inputs(tiny_config())
    valid = torch.tensor([True, False, False])
    with torch.no_grad():
        before = model.head.factors(**given, anchor_valid=valid)
        stale = given["anchor_state"].clone()
        stale[1:] = torch.randn_like(stale[1:]) * 9
        after = model.head.factors(**{**given, "anchor_state": stale}, anchor_valid=valid)
    for a, b in zip(before, after, strict=True):
        assert torch.equal(a, b)
    torch.testing.assert_close(before[2][1], before[2][2])
    assert not torch.allclose(before[2][0], before[2][1])


def test_the_anchor_joins_only_the_factor_heads_so_blocks_stay_independent() -> None:
    model, given = lively(tiny_config()), inputs(tiny_config())
    with torch.no_grad():
        together = model.head.factors(**given)
        alone = model.head.factors(**{name: tensor[1:2] for name, tensor in given.items()})
    for a, b in zip(together, alone, strict=True):
        torch.testing.assert_close(a[1:2], b, rtol=0, atol=2e-6)


def test_slots_see_each_other_in_both_directions() -> None:
    model, given = lively(tiny_config()), inputs(tiny_config())
    given["hidden"].requires_grad_()
    out, _, _ = model.head.factors(**given)
    for s in (0, 4):
        (reach,) = torch.autograd.grad(out[:, s].sum(), given["hidden"], retain_graph=True)
        assert (reach.abs().sum(dim=-1) > 0).all(), f"slot {s} must read every slot"


def test_gradients_reach_hidden_states_and_log_probs_but_not_candidate_embeddings() -> None:
    model, given = lively(tiny_config()), inputs(tiny_config())
    for tensor in given.values():
        tensor.requires_grad_()
    out, inp, anchor_out = model.head.factors(**given)
    (out[..., 0].sum() + inp[..., 1].sum() + anchor_out[..., 2].sum()).backward()
    assert given["embeds"].grad is None
    for name in ("log_probs", "hidden", "anchor_state"):
        assert given[name].grad.isfinite().all() and given[name].grad.abs().sum() > 0, name
    for name, parameter in model.head.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name


def test_a_fresh_head_can_leave_its_starting_point() -> None:
    torch.manual_seed(0)
    head = LiLiCorrModel(tiny_config()).head
    out, inp, anchor_out = head.factors(**inputs(tiny_config()))
    loss = (out[:, :-1, :, None] * inp[:, 1:, None]).sum() + (anchor_out[:, None, None] * inp[:, :1]).sum()
    loss.backward()
    for name in FACTOR_HEADS:
        assert getattr(head, name).weight.grad.abs().sum() > 0, name


def test_scores_of_a_bf16_model_are_fp32_and_close_to_the_fp32_scores() -> None:
    model, given = lively(tiny_config()), inputs(tiny_config())
    with torch.no_grad():
        want = model.head.factors(**given)
        got = model.to(torch.bfloat16).head.factors(**given)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == torch.float32
        torch.testing.assert_close(a, b, rtol=0, atol=0.04)
        torch.testing.assert_close(a.norm(dim=-1), torch.ones(a.shape[:-1]))


def test_a_draft_walks_its_own_lattice() -> None:
    config = tiny_config()
    model, given = lively(config), inputs(config)
    table = torch.randn(config.vocab_size, config.hidden_size)
    logits = torch.randn(3, 5, config.vocab_size).mul(2).round()
    block = Block(given["hidden"], logits, torch.zeros(3), given["anchor_state"], None, lambda ids: table[ids])
    with torch.no_grad():
        draft = model.head.draft(block, return_lattice=True)
        short = model.head.draft(block)
    lattice = draft.lattice
    assert short.lattice is None and torch.equal(short.tokens, draft.tokens) and draft.finite.all()
    order = logits.sort(dim=-1, descending=True, stable=True).indices[..., :4]
    assert torch.equal(lattice.candidates, order)
    torch.testing.assert_close(lattice.log_probs, logits.log_softmax(-1).gather(-1, order), rtol=0, atol=1e-5)
    for n in range(3):
        pick = int(lattice.first_scores[n].argmax())
        for s in range(5):
            pick = pick if s == 0 else int(lattice.pair_scores[n, s - 1, pick].argmax())
            assert lattice.picks[n, s] == pick and draft.tokens[n, s] == order[n, s, pick]


def test_a_draft_is_the_same_whichever_kernels_serve_it(monkeypatch) -> None:
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"  # there interpreted
    config = tiny_config(block=4)
    model, given = lively(config).to(device), {name: tensor.to(device) for name, tensor in inputs(config).items()}
    table = torch.randn(config.vocab_size, config.hidden_size, device=device)
    logits = torch.randn(3, 3, config.vocab_size, device=device).mul(2).round()
    logits[2, 1, 0] = torch.nan
    ids = torch.zeros(3, device=device)
    block = Block(given["hidden"], logits, ids, given["anchor_state"], None, lambda ids: table[ids])
    drafts = []
    for choice in ("reference", "triton"):
        monkeypatch.setenv("LILICORR_KERNELS", choice)
        with torch.no_grad():
            drafts += [model.head.draft(block), model.head.draft(block, return_lattice=True)]
    want, lattice = drafts[1], drafts[1].lattice
    usable = want.finite.all(dim=1)
    assert usable.tolist() == [True, True, False]
    for draft in drafts:
        assert torch.equal(draft.tokens[usable], want.tokens[usable]) and torch.equal(draft.finite, want.finite)
    other = drafts[3].lattice
    assert torch.equal(other.candidates, lattice.candidates) and torch.equal(other.picks[usable], lattice.picks[usable])
    for name in ("log_probs", "first_scores", "pair_scores"):
        got, expected = getattr(other, name)[usable], getattr(lattice, name)[usable]
        torch.testing.assert_close(got, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("head_type", ["none", "lilicorr"])
def test_nan_logits_are_reported_and_still_give_ids_of_the_vocabulary(head_type: str, sign: float) -> None:
    config = tiny_config(head_type=head_type)
    model, given = LiLiCorrModel(config), inputs(config)
    table = torch.randn(config.vocab_size, config.hidden_size)
    logits = torch.randn(3, 5, config.vocab_size)
    logits[1, 2] = torch.tensor(torch.nan).copysign(torch.tensor(sign))
    block = Block(given["hidden"], logits, torch.zeros(3), given["anchor_state"], None, lambda ids: table[ids])
    with torch.no_grad():
        draft = model.head.draft(block)
    assert (~draft.finite).nonzero().tolist() == [[1, 2]]
    assert draft.tokens.min() >= 0 and draft.tokens.max() < config.vocab_size
