"""The head on its lattice kernels: the same vectors and tokens, and what makes it take the plain path."""

import pytest
import torch
from lilicorr.kernels import choice, lattice_network
from lilicorr.modeling_lilicorr.lattice import Block
from torch import nn

from .test_head import inputs, lively, tiny_config

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # there interpreted
needs_triton = pytest.mark.skipif(not choice.triton_installed(), reason="needs triton")


def served(model, monkeypatch, kernels: str, given, **rest):
    """Unit vectors of the head on one choice of kernels."""
    monkeypatch.setenv("LILICORR_KERNELS", kernels)
    given = {name: tensor.to(DEVICE) for name, tensor in given.items()}
    with torch.no_grad():
        return model.to(DEVICE).head.factors(**given, **rest)


def assert_same(model, monkeypatch, given, tolerance: float = 5e-6, **rest) -> None:
    want, got = (served(model, monkeypatch, kernels, given, **rest) for kernels in ("reference", "triton"))
    for one, other in zip(got, want, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance)


@needs_triton
@pytest.mark.parametrize("hidden", [48, 32], ids=["projected", "as wide"])
def test_vectors_are_the_same_whichever_kernels_serve_them(hidden: int, monkeypatch) -> None:
    config = tiny_config(hidden=hidden, count=3)
    valid = torch.tensor([True, False, True], device=DEVICE)
    assert_same(lively(config), monkeypatch, inputs(config), anchor_valid=valid)
    assert_same(lively(config), monkeypatch, inputs(config, blocks=1, slots=2, count=2))


@needs_triton
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_stays_near_full(dtype: torch.dtype, monkeypatch) -> None:
    config = tiny_config()
    model, given = lively(config), inputs(config, blocks=2)
    want = served(model, monkeypatch, "reference", given)
    got = served(model.to(dtype), monkeypatch, "triton", given)
    for one, other in zip(got, want, strict=True):
        assert torch.nn.functional.cosine_similarity(one, other, dim=-1).min() > 0.998


@needs_triton
def test_no_blocks_give_no_vectors(monkeypatch) -> None:
    config = tiny_config()
    out, inp, anchor_out = served(lively(config), monkeypatch, "triton", inputs(config, blocks=0))
    assert out.shape == inp.shape == (0, 5, 4, 24) and anchor_out.shape == (0, 24)


@needs_triton
@pytest.mark.parametrize("residual", [False, True], ids=["paper", "residual"])
def test_walked_tokens_are_the_same_whichever_kernels_serve_them(residual: bool, monkeypatch) -> None:
    config = tiny_config(block=4)
    if residual:
        config = tiny_config(block=4, head_config={**config.head_config, "residual": True})
    model, given = lively(config).to(DEVICE), inputs(config)
    table = torch.randn(config.vocab_size, config.hidden_size, device=DEVICE)
    logits = torch.randn(3, 3, config.vocab_size, device=DEVICE)
    states = given["hidden"].to(DEVICE), given["anchor_state"].to(DEVICE)
    block = Block(states[0], logits, torch.zeros(3, device=DEVICE), states[1], None, lambda ids: table[ids])
    tokens = []
    for kernels in ("reference", "triton"):
        monkeypatch.setenv("LILICORR_KERNELS", kernels)
        with torch.no_grad():
            tokens.append(model.head.draft(block).tokens)
    assert torch.equal(*tokens)


# --- what the kernels cannot honour -----------------------------------------------------------------------------------


@pytest.fixture
def head(monkeypatch):
    """A head that asks for Triton where that would serve it."""
    monkeypatch.setenv("LILICORR_KERNELS", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(choice, "triton_installed", lambda: True)
    return lively(tiny_config()).to(DEVICE).head


def wants(head) -> bool:
    given = [tensor.to(DEVICE, head.pass_hidden_proj.weight.dtype) for tensor in inputs(tiny_config()).values()]
    return lattice_network.wants_kernels(head, given[2], given[1], given[3])


def test_gradients_take_the_plain_path(head, monkeypatch) -> None:
    with pytest.raises(ValueError, match=r"^LILICORR_KERNELS=triton cannot serve this call: its kernels have no grad"):
        wants(head)
    with torch.no_grad():
        assert wants(head)
    assert wants(head.requires_grad_(False))
    monkeypatch.setenv("LILICORR_KERNELS", "auto")
    head.requires_grad_(True)
    assert not wants(head)
    given = {name: tensor.to(DEVICE) for name, tensor in inputs(tiny_config()).items()}
    head.factors(**given)[0][..., 0].sum().backward()
    assert head.relative_slot_bias.grad.abs().sum() > 0


def replaced(head) -> None:
    class Adapted(nn.Linear):
        """More than its weights."""

    layer = head.layers[1].mlp[0]
    head.layers[1].mlp[0] = Adapted(layer.in_features, layer.out_features)


@pytest.mark.parametrize(
    "change,reason",
    [
        (lambda head: head.double(), "fp32, bf16 or fp16, got torch.float64"),
        (replaced, "plain linear layers only"),
        (lambda head: head.out_head.register_forward_hook(lambda *_: None), "plain linear layers only"),
        (lambda head: head.factor_input_proj.to(torch.bfloat16), "wants all weights in torch.float32"),
        (lambda head: head.in_head.to("meta"), "wants all weights in torch.float32"),
    ],
    ids=["double", "adapted", "hooked", "mixed", "elsewhere"],
)
def test_heads_that_are_more_than_their_weights_are_refused(head, change, reason: str) -> None:
    change(head)
    with torch.no_grad(), pytest.raises(ValueError, match=rf"cannot serve this call: its lattice network .*{reason}"):
        wants(head)


def test_autocast_is_refused(head) -> None:
    with torch.no_grad(), torch.autocast(DEVICE, torch.bfloat16), pytest.raises(ValueError, match="autocast asks for"):
        wants(head)


def test_sizes_beyond_a_program_are_refused(head, monkeypatch) -> None:
    for name, limit in (("MAX_WIDTH", 31), ("MAX_HEAD_DIM", 7), ("MAX_SLOTS", 4)):
        with monkeypatch.context() as patch, torch.no_grad():
            patch.setattr(lattice_network, name, limit)
            with pytest.raises(ValueError, match=r"at most, got 32, 8 and 5; set it to auto or reference"):
                wants(head)


@pytest.mark.skipif(DEVICE == "cuda", reason="auto takes Triton here")
def test_a_cpu_is_served_by_the_modules_without_a_look_at_the_head(monkeypatch) -> None:
    monkeypatch.delenv("LILICORR_KERNELS", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(lattice_network, "_refusal", lambda *_: pytest.fail("looked at the head"))
    with torch.no_grad():
        assert not wants(lively(tiny_config()).head)
