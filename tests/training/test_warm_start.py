import pytest
import torch
from lilicorr import LiLiCorrConfig, LiLiCorrModel
from lilicorr.training.warm_start import balance_head, start_from_checkpoint, start_from_target
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM


def drafter_for(target, **changes):
    torch.manual_seed(0)
    return LiLiCorrModel(LiLiCorrConfig.for_target(target.config, mask_token_id=3, block_size=4, **changes))


@pytest.fixture
def llama(target_folder):
    return AutoModelForCausalLM.from_pretrained(target_folder)


def test_the_last_layers_and_the_final_norm_are_the_targets(llama):
    drafter = drafter_for(llama, num_hidden_layers=2)
    assert start_from_target(drafter, llama)
    for ours, theirs in zip(drafter.layers, llama.model.layers[-2:], strict=True):
        for name, tensor in theirs.state_dict().items():
            assert torch.equal(ours.state_dict()[name], tensor), name
    assert torch.equal(drafter.norm.weight, llama.model.norm.weight)


def test_the_last_tap_passes_through(llama):
    drafter = drafter_for(llama)
    start_from_target(drafter, llama)
    width, layers = drafter.config.hidden_size, len(drafter.config.target_layer_ids)
    states = torch.zeros(1, 1, layers * width)
    states[..., -width:] = torch.randn(width)
    change = drafter.fc(states) - states[..., -width:]
    assert change.norm() < 0.5 * states.norm()


def test_query_and_key_norms_of_a_qwen3_target_are_taken_over():
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen3Config(vocab_size=64, num_hidden_layers=6, head_dim=8, eos_token_id=2, pad_token_id=0, **sizes)
    target = Qwen3ForCausalLM(config)
    torch.nn.init.normal_(target.model.layers[-1].self_attn.q_norm.weight)
    drafter = drafter_for(target)
    assert start_from_target(drafter, target)
    assert torch.equal(drafter.layers[-1].self_attn.q_norm.weight, target.model.layers[-1].self_attn.q_norm.weight)


def test_convolutions_stay_fresh_and_may_join_a_backbone_without(llama, tmp_path):
    plain = drafter_for(llama)
    plain.save_pretrained(tmp_path)
    drafter = drafter_for(llama, conv_kernel_size=2, conv_group_size=4)
    assert start_from_target(drafter, llama)
    start_from_checkpoint(drafter, llama, tmp_path)
    assert torch.equal(drafter.fc.weight, plain.fc.weight)
    for layer in drafter.layers:
        assert not layer.mlp_conv.kernel_projection.weight.any() and layer.mlp_conv.base_kernel[:, 0].eq(1).all()


def test_trained_convolutions_are_neither_dropped_nor_taken_in_part(llama, tmp_path):
    convolved = drafter_for(llama, conv_kernel_size=2, conv_group_size=4)
    convolved.save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match="has convolutions in its backbone, this drafter has none; set conv_kernel_size"
    ):
        start_from_checkpoint(drafter_for(llama), llama, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["layers.0.mlp_conv.base_kernel"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"lacks 'layers\.0\.mlp_conv\.base_kernel'"):
        start_from_checkpoint(convolved, llama, tmp_path)


def test_other_shapes_leave_the_drafter_alone(llama):
    drafter = drafter_for(llama, intermediate_size=48)
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    assert not start_from_target(drafter, llama)
    assert all(torch.equal(before[name], tensor) for name, tensor in drafter.state_dict().items())


def test_token_and_hidden_state_enter_a_balanced_head_alike(llama):
    llama.get_input_embeddings().weight.data.mul_(0.01)
    drafter = drafter_for(llama)
    drafter.norm.weight.data.fill_(3.0)
    balance_head(drafter, llama)
    head, width = drafter.head, drafter.config.hidden_size
    tokens = head.token_proj(llama.get_input_embeddings().weight)
    hidden = head.pass_hidden_proj(3.0 * torch.randn(500, width))
    for entering in (tokens, hidden):
        assert 0.7 < entering.square().mean().sqrt() < 1.4
