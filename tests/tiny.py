"""Tiny random targets and drafters, seeded: the one place where tests get theirs from."""

from typing import Any

import torch
from lilicorr import LiLiCorrConfig, LiLiCorrModel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

FAMILIES = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
VOCAB = 97


def tiny_target(family: str = "llama", seed: int = 7, **settings: Any) -> PreTrainedModel:
    """A target of four layers; weights wide enough for varied texts and clear winners."""
    shape = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.35,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
    } | settings
    config, model = FAMILIES[family]
    torch.manual_seed(seed)
    return model(config(head_dim=shape["hidden_size"] // shape["num_attention_heads"], **shape)).eval()


def tiny_drafter(target: PreTrainedModel, head_type: str, seed: int = 11, head: Any = None, **settings: Any) -> Any:
    """A drafter of two layers for `target`, with changes `head` to the head's settings."""
    settings = {"num_hidden_layers": 2} | settings
    config = LiLiCorrConfig.for_target(target.config, head_type=head_type, **settings)
    config.head_config.update(head or {})
    torch.manual_seed(seed)
    return LiLiCorrModel(config).eval()
