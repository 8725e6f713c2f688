"""Targets of many families, tiny and random: the same tokens as plain `generate`, alone and in a padded batch."""

import pytest
import torch
import transformers
from lilicorr import LiLiCorrConfig, LiLiCorrModel

from ..tiny import TARGET, VOCAB

SHAPE = TARGET | {"max_position_embeddings": 256, "initializer_range": 0.3}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
SHORT = 12  # a window that the texts outgrow

FAMILIES = {
    "llama": ("Llama", {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {}),
    "qwen2 sliding": ("Qwen2", {"use_sliding_window": True, "sliding_window": SHORT, "max_window_layers": 0}),
    "qwen3": ("Qwen3", {}),
    "qwen3-moe": ("Qwen3Moe", MOE),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "gemma2": ("Gemma2", {"sliding_window": 64, "query_pre_attn_scalar": 8}),
    "gemma2 short": ("Gemma2", {"sliding_window": SHORT, "query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3", {"sliding_window": 64, "query_pre_attn_scalar": 8}),
    "mistral sliding": ("Mistral", {"sliding_window": SHORT}),
    "phi3": ("Phi3", {}),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", {"sliding_window": 64}),
    "granite": ("Granite", {}),
    "glm4": ("Glm4", {}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 1, 1, 0]}),
    "cohere2": ("Cohere2", {"sliding_window": 64}),
    "starcoder2": ("Starcoder2", {}),
    "gpt-oss": ("GptOss", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64}),
    "gpt2": ("GPT2", {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 256}),
    "gpt-neox": ("GPTNeoX", {}),
    "falcon": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon alibi": ("Falcon", {"alibi": True, "new_decoder_architecture": False}),
    "mpt": ("Mpt", {"d_model": 32, "n_layers": 4, "n_heads": 4, "max_seq_len": 256, "use_cache": True}),
    "deepseek-v3": (
        "DeepseekV3",
        {
            "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
            "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16,
            "first_k_dense_replace": 1, "num_key_value_heads": 4,
        },
    ),
}  # fmt: skip


def build(name):
    family, changes = FAMILIES[name]
    config_class = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
    model_class = getattr(transformers, f"{family}LMHeadModel", None) or getattr(transformers, f"{family}ForCausalLM")
    settings = SHAPE | changes
    if family in ("GPT2", "Mpt"):  # which have names of their own
        settings = {k: v for k, v in settings.items() if not k.startswith(("hidden", "num_", "head", "inter", "max_p"))}
    if family in ("Falcon", "DeepseekV3"):  # which derive it
        del settings["head_dim"]
    torch.manual_seed(5)
    target = model_class(config_class(**settings)).eval()
    with torch.no_grad():
        for parameter in target.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) * 0.25)  # varied texts whatever the family starts with
    return target


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_familys_outputs_are_plain_ones(name, attention, teach):
    target = build(name)
    if not (attention == "eager" or target._supports_sdpa):
        pytest.skip("the family has no sdpa attention")
    target.set_attn_implementation(attention)
    torch.manual_seed(6)
    config = LiLiCorrConfig.for_target(
        target.config, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=8, block_size=8,
        mask_token_id=0, target_layer_ids=[0, 1, 2], rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        intermediate_size=48, head_type="lilicorr",
    )  # fmt: skip
    drafter = LiLiCorrModel(config).eval()
    ids = torch.randint(1, VOCAB, (1, 6), generator=torch.Generator().manual_seed(2))
    options = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
    plain = target.generate(ids, **options)
    teach(drafter, plain[0], wrong_slots=(3,), spare=True)
    assert torch.equal(target.generate(ids, assistant_model=drafter, **options), plain)
    assert drafter.last_generation.accepted > 10

    rows = torch.randint(1, VOCAB, (3, 6), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(rows)
    mask[1, :3], mask[2, :5] = 0, 0
    padded = {"attention_mask": mask} | options
    plain = target.generate(rows, **padded)
    real = torch.nn.functional.pad(mask, (0, 30), value=1).bool()
    teach(drafter, [row[given] for row, given in zip(plain, real, strict=True)])
    assert torch.equal(target.generate(rows, assistant_model=drafter, **padded), plain)
    assert drafter.last_generation.accepted > 10 and len(drafter.last_generation.rows) == 3
