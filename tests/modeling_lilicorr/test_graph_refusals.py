"""Where drafts cannot be captured they are computed as usual, and the reason is told once."""

import pytest
import torch
from lilicorr.modeling_lilicorr.draft_graphs import KnownGraphs
from lilicorr.modeling_lilicorr.graphs import CudaGraph, graphs_asked_for
from torch import nn

from .conftest import CUDA, DEVICE, SIZES, Graph, Sequence, assert_same, drafter_for, prompt

pytestmark = pytest.mark.usefixtures("asked_for")


def hooked(module):
    return module.register_forward_hook(lambda *_: None).remove


def before(module):
    return module.register_forward_pre_hook(lambda *_: None).remove


def training(module):
    module.train()
    return module.eval


def offloaded(module):
    module._hf_hook = None
    return lambda: delattr(module, "_hf_hook")


def of_its_own_kind(module):
    weight = module.weight
    module.weight = nn.Parameter(weight.detach(), requires_grad=False)
    module.weight.__class__ = type("Packed", (nn.Parameter,), {})
    return lambda: setattr(module, "weight", weight)


def spread(module):
    weight = module.weight
    module.weight = nn.Parameter(weight.detach().to("meta"), requires_grad=False)
    return lambda: setattr(module, "weight", weight)


CASES = [
    (hooked, "has a hook"), (before, "has a hook"), (offloaded, "has a hook"), (training, "in training mode"),
    (of_its_own_kind, "weights of the kind Packed"), (spread, "weights on meta"),
]  # fmt: skip


@pytest.mark.parametrize("change,reason", CASES)
def test_only_the_head_is_captured_where_lm_head_or_backbone_forbid_more(target, said, change, reason):
    drafter = drafter_for(target)
    embedding, lm_head = target.get_input_embeddings(), target.get_output_embeddings()
    for module in (lm_head, drafter.layers[1].mlp.down_proj):
        undo = change(module)
        graphs = drafter.graphs.of(drafter, embedding, lm_head)
        assert graphs is drafter.graphs.of(drafter, embedding, lm_head) and not graphs._whole
        undo()
        assert drafter.graphs.of(drafter, embedding, lm_head)._whole
    assert len(said()) <= 2 and all(f"{reason}" in each and "only the head" in each for each in said())


@pytest.mark.parametrize("change,reason", CASES)
def test_nothing_is_captured_where_head_or_embedding_forbid_it(target, said, change, reason):
    drafter = drafter_for(target)
    embedding, lm_head = target.get_input_embeddings(), target.get_output_embeddings()
    for module in (embedding, drafter.head.out_head):
        undo = change(module)
        assert drafter.graphs.of(drafter, embedding, lm_head) is drafter.graphs.of(drafter, embedding, lm_head) is None
        undo()
        assert drafter.graphs.of(drafter, embedding, lm_head) is not None
    assert 1 <= len(said()) <= 2 and all(reason in each for each in said())


@pytest.mark.parametrize(
    "changes,reason",
    [
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic rotary"),
        ({}, "flash_attention_2 attention"),
    ],
)
def test_a_backbone_that_needs_the_host_has_only_its_head_captured(target, said, changes, reason):
    drafter = drafter_for(target, **changes)
    if not changes:
        drafter.config._attn_implementation_internal = "flash_attention_2"
    assert not drafter.graphs.of(drafter, target.get_input_embeddings(), target.get_output_embeddings())._whole
    assert len(said()) == 1 and reason in said()[0]


def test_drafts_that_are_drawn_or_learn_or_stand_in_another_capture_are_worked_out(target, said, monkeypatch):
    drafter = drafter_for(target, "none")  # which draws nothing
    one, other = (Sequence(target, drafter, [9] + [2] * 9) for _ in range(2))
    for sequence in (one, other):
        sequence.plain()
    for _ in range(2):
        assert_same(one.replayed(warp=lambda drafted, logits: logits), other.plain())
        with torch.enable_grad():
            assert one.replayed().probabilities().requires_grad
        with monkeypatch.context() as patch:
            patch.setattr(Graph, "capturing", staticmethod(lambda: True))
            one.replayed()
        for _ in range(2):
            other.plain()
        with torch.autocast(DEVICE, torch.bfloat16):
            assert_same(one.replayed(), other.plain())
        assert Graph.made == 0
    reasons = ("tokens are drawn", "gradients are on", "another capture", "autocast")
    assert len(said()) == 4 and all(reason in text for reason, text in zip(reasons, said(), strict=True))
    assert_same(one.replayed(), other.plain())
    assert Graph.made == 1


@pytest.mark.parametrize("whole", [True, False])
def test_a_capture_that_fails_is_not_tried_again_and_changes_nothing(target, said, whole):
    drafter = drafter_for(target)
    if not whole:
        hooked(drafter.norm)
    real = drafter.head.draft

    def reads(block, return_lattice=False):
        assert int(block.anchor_ids[0]) >= 0  # waits for the device
        return real(block, return_lattice)

    drafter.head.draft = reads
    one, other = (Sequence(target, drafter, SIZES) for _ in range(2))
    for _ in SIZES:
        assert_same(one.replayed(), other.plain())
    assert one.cache.length == other.cache.length == sum(SIZES)
    assert Graph.made == 1 and Graph.replays == 0
    assert sum("a capture failed" in text for text in said()) == 1 and len(said()) == 1 + (not whole)


def test_graphs_are_asked_for_by_one_variable(target, monkeypatch):
    drafter = drafter_for(target)
    modules = target.get_input_embeddings(), target.get_output_embeddings()
    for value, asked in (("1", True), ("0", False), ("", False), (None, False)):
        monkeypatch.delenv("LILICORR_GRAPHS", raising=False)
        if value is not None:
            monkeypatch.setenv("LILICORR_GRAPHS", value)
        assert graphs_asked_for() is asked
        assert (drafter.graphs.of(drafter, *modules) is not None) is asked
    monkeypatch.setenv("LILICORR_GRAPHS", "yes")
    with pytest.raises(ValueError, match=r"^LILICORR_GRAPHS is 'yes'; set it to 1 or 0, or unset it\.$"):
        drafter.graphs.of(drafter, *modules)


def test_cuda_graphs_refuse_other_devices_rocm_and_the_interpreter(monkeypatch):
    cuda = torch.device("cuda", 0)
    assert "the drafter is on cpu" in CudaGraph.refusal(torch.device("cpu"))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "interpreter" in CudaGraph.refusal(cuda)
    monkeypatch.delenv("TRITON_INTERPRET")
    assert CudaGraph.refusal(cuda) is None
    monkeypatch.setattr(torch.version, "cuda", None)
    assert CudaGraph.refusal(cuda) is not None


@pytest.mark.skipif(CUDA, reason="needs a machine without a GPU")
def test_generate_with_the_variable_set_falls_back_without_a_gpu(target, said):
    drafter = drafter_for(target)
    drafter.graphs = KnownGraphs()
    for _ in range(2):
        plain = target.generate(prompt(), max_new_tokens=20, do_sample=False)
        assert torch.equal(plain, target.generate(prompt(), max_new_tokens=20, assistant_model=drafter))
    assert said() == [
        "A draft is not replayed as a captured graph: graphs need a CUDA device, and the drafter is on cpu."
    ]


def test_sampled_drafts_are_worked_out(target, said):
    drafter = drafter_for(target, "dspark", proposal="sampled")
    out = target.generate(prompt(), max_new_tokens=20, do_sample=True, assistant_model=drafter)
    assert out.shape == (1, 29) and Graph.made == 0 and "tokens are drawn" in said()[0]
