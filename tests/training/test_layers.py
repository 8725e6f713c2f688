import pytest
import torch
from lilicorr import LiLiCorrConfig, LiLiCorrModel
from lilicorr.training.anchors import sample_blocks
from lilicorr.training.layers import apply_layer_options
from lilicorr.training.losses.joint import JointObjective
from lilicorr.training.losses.terms import Objective
from lilicorr.training.memory import _backbone, _head
from lilicorr.training.optimizer import build_optimizer, rate_share, set_rates
from lilicorr.training.target import target_pass
from transformers import AutoModelForCausalLM

LENGTH, ANCHORS, BLOCK = 40, 12, 5


def one_pass(target_folder, settings, layer_types=None, head_type="lilicorr", head_config=None, **shape):
    """Loss, gradients and bytes kept for the backward pass of one micro-batch, on the same draws every time."""
    torch.manual_seed(1)
    target = AutoModelForCausalLM.from_pretrained(target_folder).eval().requires_grad_(False)
    extra = {"layer_types": layer_types, "sliding_window": 8} if layer_types else {}
    config = LiLiCorrConfig.for_target(
        target.config, mask_token_id=3, block_size=BLOCK, num_hidden_layers=2,
        head_type=head_type, head_config=head_config or settings.config["head_config"], **extra, **shape,
    )  # fmt: skip
    drafter = LiLiCorrModel(config).train()
    apply_layer_options(drafter, settings)
    input_ids = torch.randint(4, 64, (2, LENGTH))
    loss_mask = torch.zeros(2, LENGTH, dtype=torch.bool)
    loss_mask[0, 6:] = True
    loss_mask[1, 9:30] = True
    blocks = sample_blocks(input_ids, loss_mask, BLOCK, ANCHORS, torch.Generator().manual_seed(0))
    joint = JointObjective(drafter, target, Objective(), settings.blocks_together)
    kept, weights = {}, {p.untyped_storage().data_ptr() for p in [*drafter.parameters(), *target.parameters()]}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    inputs = (input_ids, *target_pass(target, input_ids, config.target_layer_ids), blocks)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        sums = joint(*inputs)
    loss = joint.loss(sums, sums)
    loss.backward()
    return loss.item(), {n: p.grad for n, p in drafter.named_parameters()}, sum(kept.values()), config


def assert_alike(ours, theirs):
    assert ours[0] == pytest.approx(theirs[0], rel=1e-5)
    for name, gradient in theirs[1].items():
        if gradient is not None:
            torch.testing.assert_close(ours[1][name], gradient, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("layer_types", [None, ["sliding_attention", "full_attention"]])
@pytest.mark.parametrize("together", [5, 32])
def test_blocks_that_attend_as_one_equal_blocks_alone(tmp_path, make_settings, target_folder, together, layer_types):
    alone = one_pass(target_folder, make_settings(tmp_path, blocks_together=1), layer_types)
    assert_alike(one_pass(target_folder, make_settings(tmp_path, blocks_together=together), layer_types), alone)


@pytest.mark.parametrize("together", [1, 32])
def test_recomputed_layers_give_the_same_gradients_and_keep_less(tmp_path, make_settings, target_folder, together):
    plain = one_pass(target_folder, make_settings(tmp_path, blocks_together=together))
    settings = make_settings(tmp_path, blocks_together=together, gradient_checkpointing=True)
    recomputed = one_pass(target_folder, settings)
    assert_alike(recomputed, plain)
    assert recomputed[2] < 0.8 * plain[2]


def test_compiled_layers_give_the_same_gradients_and_keep_their_names(tmp_path, make_settings, target_folder):
    plain = one_pass(target_folder, make_settings(tmp_path))
    compiled = one_pass(target_folder, make_settings(tmp_path, compile="aot_eager"))
    assert compiled[1].keys() == plain[1].keys()
    assert_alike(compiled, plain)


@pytest.mark.parametrize("together", [1, 5, 32])
def test_the_memory_formula_is_near_what_autograd_keeps(tmp_path, make_settings, target_folder, together):
    settings = make_settings(tmp_path, max_length=LENGTH, anchors=ANCHORS, blocks_together=together)
    _, _, kept, config = one_pass(target_folder, settings)
    estimate = _backbone(settings, config, 2, ANCHORS, 4) + 2 * ANCHORS * _head(config, 4)
    assert 0.7 * kept < estimate < 1.4 * kept


HEADS = {
    "dcoco": {"num_candidates": 8, "width": 64, "hidden_size": 48},
    "selector": {"num_candidates": 8, "rank": 64},
    "domino": {"gru_hidden_dim": 128, "emb_dim": 64, "pure_draft_prefix_len": 1},
    "dspark": {"markov_rank": 128, "markov_head_type": "vanilla", "enable_confidence_head": True,
               "confidence_head_with_markov": True},
    "xpress": {"rank": 64, "mlp_ratio": 2, "num_jacobi_passes": 4},
}  # fmt: skip


@pytest.mark.parametrize("head", HEADS)
def test_the_memory_formula_knows_every_head(tmp_path, make_settings, target_folder, head):
    settings = make_settings(tmp_path, max_length=LENGTH, anchors=ANCHORS)
    bare = one_pass(target_folder, settings, head_type="none", head_config={})[2]
    _, _, kept, config = one_pass(target_folder, settings, head_type=head, head_config=HEADS[head])
    assert 0.6 * (kept - bare) < 2 * ANCHORS * _head(config, 4) < 1.6 * (kept - bare)


def test_the_memory_formula_knows_convolutions(tmp_path, make_settings, target_folder):
    settings = make_settings(tmp_path, max_length=LENGTH, anchors=ANCHORS)
    _, _, bare, plain = one_pass(target_folder, settings)
    _, _, kept, config = one_pass(target_folder, settings, conv_kernel_size=3, conv_group_size=4)
    added = _backbone(settings, config, 2, ANCHORS, 4) - _backbone(settings, plain, 2, ANCHORS, 4)
    assert 0.6 * (kept - bare) < added < 1.6 * (kept - bare)


def test_a_frozen_backbone_needs_no_gradient(tmp_path, make_settings, target_folder):
    settings = make_settings(tmp_path, freeze_backbone=True)
    _, gradients, _, _ = one_pass(target_folder, settings)
    assert {name for name, gradient in gradients.items() if gradient is not None} == {
        name for name in gradients if name.startswith("lilicorr.")
    }


def test_rates_of_drafter_and_head(tmp_path, make_settings, target_folder):
    target = AutoModelForCausalLM.from_pretrained(target_folder)
    settings = make_settings(tmp_path, learning_rate=6e-4, head_learning_rate=1.5e-4)
    config = LiLiCorrConfig.for_target(target.config, mask_token_id=3, head_config=settings.config["head_config"])
    optimizer = build_optimizer(LiLiCorrModel(config), settings)
    set_rates(optimizer, 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([3e-4, 0.75e-4])
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0, 0.01]


def test_the_rate_rises_linearly_and_falls_as_a_cosine():
    shares = [rate_share(step, 100, 0.04, 0.1) for step in range(100)]
    assert shares[:4] == [0.25, 0.5, 0.75, 1.0] and shares[4] == 1.0
    assert shares[52] == pytest.approx(0.55) and 0.1 < shares[99] < 0.101
