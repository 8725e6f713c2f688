"""The one factory of tiny random targets and drafters, seeded; a test names what it wants otherwise."""

import torch
from lilicorr import LiLiCorrConfig, LiLiCorrModel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

VOCAB = 97
FAMILIES = {"llama": (LlamaForCausalLM, LlamaConfig), "qwen3": (Qwen3ForCausalLM, Qwen3Config)}
TARGET = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.35,  # wide enough for varied texts and clear winners
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
HEAD = {  # of the type `lilicorr`
    "num_candidates": 4,
    "hidden_size": 16,
    "num_layers": 1,
    "num_heads": 2,
    "intermediate_size": 32,
    "factor_dim": 8,
    "logit_scale": 8.0,
    "vector_eps": 1e-6,
}
DRAFTER = {name: TARGET[name] for name in list(TARGET)[:8]} | {
    "num_hidden_layers": 2,
    "mask_token_id": VOCAB - 1,
    "target_layer_ids": [1, 2],
    "num_target_layers": 4,
    "head_config": HEAD,
}


def tiny_target(kind: str = "llama", seed: int = 7, **changes) -> PreTrainedModel:
    """A target of the family `kind`, in evaluation mode; `changes` are of its configuration."""
    model, config = FAMILIES[kind]
    torch.manual_seed(seed)
    return model(config(**(TARGET | changes))).eval()


def tiny_drafter_for(target: PreTrainedModel, head_type: str = "lilicorr", seed: int = 11, **changes) -> LiLiCorrModel:
    """A fresh drafter for `target`, in evaluation mode; `changes` are of its configuration."""
    settings = {"num_hidden_layers": 2, "block_size": 8, "mask_token_id": 0, "target_layer_ids": [0, 1, 2]} | changes
    torch.manual_seed(seed)
    return LiLiCorrModel(LiLiCorrConfig.for_target(target.config, head_type=head_type, **settings)).eval()


def tiny_config(block_size: int = 6, **changes) -> LiLiCorrConfig:
    """A drafter's configuration where no target is at hand."""
    return LiLiCorrConfig(**(DRAFTER | {"block_size": block_size} | changes))
