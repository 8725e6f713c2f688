"""Targets of many families, tiny and random: the same tokens as plain `generate`, alone and in a padded batch."""

import inspect

import lilicorr
import pytest
import torch
import transformers
from lilicorr import LiLiCorrConfig, LiLiCorrModel

from ..tiny import TARGET, VOCAB

SHAPE = TARGET | {"max_position_embeddings": 256, "initializer_range": 0.3}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
SHORT = 12  # a window that the texts outgrow
LAYERS = ["sliding_attention", "full_attention"] * 2
UNTIED = {"tie_word_embeddings": False}  # tied ones repeat their last token where embeddings are scaled up
GEMMA3 = UNTIED | {"sliding_window": 64, "query_pre_attn_scalar": 8}
GEMMA4 = UNTIED | {
    "sliding_window": 64, "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8,
    "num_global_key_value_heads": 2, "global_head_dim": 8,
}  # fmt: skip
QWEN_VL = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
VISION = {
    "hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "intermediate_size": 48, "patch_size": 4,
}  # fmt: skip

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
    "gemma4": ("Gemma4", GEMMA4),
    "gemma4 short": ("Gemma4", GEMMA4 | {"sliding_window": SHORT}),
    "gemma4 shared": ("Gemma4", GEMMA4 | {"num_kv_shared_layers": 2, "layer_types": LAYERS}),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention"] * 2}),
    "qwen2.5-vl": ("Qwen2_5_VL", QWEN_VL),
    "gemma3 conditional": ("Gemma3", GEMMA3),
    "gemma3 conditional short": ("Gemma3", GEMMA3 | {"sliding_window": SHORT}),
    "gemma4 conditional": ("Gemma4", GEMMA4),
}  # fmt: skip
# What sees besides reads, and its tokens.
SIGHTED = {
    "qwen2.5-vl": {
        "vision_config": {
            "hidden_size": 32, "num_heads": 4, "depth": 2, "intermediate_size": 48, "out_hidden_size": 32,
            "patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2, "window_size": 16,
            "fullatt_block_indexes": [1],
        },
        "image_token_id": 90, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93,
    },
    "gemma3": {
        "vision_config": VISION | {"image_size": 16}, "mm_tokens_per_image": 4,
        "image_token_index": 90, "boi_token_index": 91, "eoi_token_index": 92,
    },
    "gemma4": {
        "vision_config": VISION | {"num_key_value_heads": 4, "head_dim": 8}, "audio_config": None,
        "image_token_id": 90, "boi_token_id": 91, "eoi_token_id": 92, "video_token_id": 93,
        "audio_token_id": 94, "boa_token_id": 95,
    },
}  # fmt: skip
RECURRENT = {
    "qwen3-next": (
        "Qwen3Next",
        MOE | {
            "shared_expert_intermediate_size": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
            "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        },
    ),
    "falcon-h1": ("FalconH1", {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 8}),
    "jamba": ("Jamba", {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8}),
}  # fmt: skip


def build(name):
    family, changes = (FAMILIES | RECURRENT)[name]
    settings = SHAPE | changes
    if family in ("GPT2", "Mpt"):  # which have names of their own
        settings = {k: v for k, v in settings.items() if not k.startswith(("hidden", "num_", "head", "inter", "max_p"))}
    if family in ("Falcon", "DeepseekV3"):  # which derive it
        del settings["head_dim"]
    sighted = SIGHTED.get(name.removesuffix(" short").removesuffix(" conditional"))
    if sighted and (name.count("conditional") or family == "Qwen2_5_VL"):
        config_class = getattr(transformers, f"{family}Config")
        model_class = getattr(transformers, f"{family}ForConditionalGeneration")
        settings = {"text_config": settings} | sighted | UNTIED
    else:
        config_class = getattr(transformers, f"{family}TextConfig", None) or getattr(transformers, f"{family}Config")
        names = (f"{family}LMHeadModel", f"{family}ForCausalLM")
        model_class = next(getattr(transformers, each) for each in names if hasattr(transformers, each))
    torch.manual_seed(5)
    target = model_class(config_class(**settings)).eval()
    with torch.no_grad():
        for parameter in target.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) * 0.25)  # varied texts whatever the family starts with
    return target


def drafter_of(target):
    torch.manual_seed(6)
    config = LiLiCorrConfig.for_target(
        target.config, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, head_dim=8, block_size=8,
        mask_token_id=0, target_layer_ids=[0, 1, 2], rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        intermediate_size=48, head_type="lilicorr",
    )  # fmt: skip
    return LiLiCorrModel(config).eval()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_familys_outputs_are_plain_ones(name, attention, teach):
    if not hasattr(transformers, f"{FAMILIES[name][0]}PreTrainedModel"):
        pytest.skip("this release of Transformers has no such family")
    target = build(name)
    if not (attention == "eager" or target._supports_sdpa):
        pytest.skip("the family has no sdpa attention")
    target.set_attn_implementation(attention)
    drafter = drafter_of(target)
    ids = torch.randint(1, 90, (1, 6), generator=torch.Generator().manual_seed(2))
    options = {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
    plain = target.generate(ids, **options)
    teach(drafter, plain[0], wrong_slots=(3,), spare=True)
    assert torch.equal(target.generate(ids, assistant_model=drafter, **options), plain)
    assert drafter.last_generation.accepted > 10

    rows = torch.randint(1, 90, (3, 6), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(rows)
    mask[1, :3], mask[2, :5] = 0, 0
    padded = {"attention_mask": mask} | options
    plain = target.generate(rows, **padded)
    real = torch.nn.functional.pad(mask, (0, 30), value=1).bool()
    teach(drafter, [row[given] for row, given in zip(plain, real, strict=True)])
    assert torch.equal(target.generate(rows, assistant_model=drafter, **padded), plain)
    assert drafter.last_generation.accepted > 10 and len(drafter.last_generation.rows) == 3


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", [name for name, (_, changes) in FAMILIES.items() if SHORT in changes.values()])
def test_prompts_longer_than_a_window(name, rows, chunk, teach):
    if not hasattr(transformers, f"{FAMILIES[name][0]}PreTrainedModel"):
        pytest.skip("this release of Transformers has no such family")
    target = build(name)
    drafter = drafter_of(target)
    ids = torch.randint(1, 90, (rows, SHORT + 8), generator=torch.Generator().manual_seed(2))
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0, "prefill_chunk_size": chunk}
    plain = target.generate(ids, **options)
    teach(drafter, list(plain), wrong_slots=(3,))
    assert torch.equal(target.generate(ids, assistant_model=drafter, **options), plain)
    assert drafter.last_generation.accepted > 8


def seen(name, rows):
    """A prompt with an image, the same in each of so many rows."""
    noise = torch.randn(rows, 16, 96, generator=torch.Generator().manual_seed(4))
    if name == "qwen2.5-vl":
        ids = torch.tensor([[5, 6, 92, 90, 90, 90, 90, 93, 7, 8]] * rows)
        images = {"pixel_values": noise.flatten(0, 1), "image_grid_thw": torch.tensor([[1, 4, 4]] * rows)}
        return {"input_ids": ids, "mm_token_type_ids": (ids == 90).int()} | images
    ids = torch.tensor([[5, 6, 91, 90, 90, 90, 90, 92, 7]] * rows)
    return {
        "input_ids": ids,
        "token_type_ids": (ids == 90).int(),
        "pixel_values": noise.reshape(rows, -1)[:, :768].view(rows, 3, 16, 16),
    }


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", ["qwen2.5-vl", "gemma3 conditional"])
def test_texts_about_images_are_plain_ones(name, rows, teach):
    target = build(name)
    drafter = drafter_of(target)
    call = seen(name, rows) | {"max_new_tokens": 30, "do_sample": False, "pad_token_id": 0}
    plain = target.generate(**call)
    assert rows == 1 or not torch.equal(plain[0], plain[1])
    teach(drafter, list(plain), wrong_slots=(3,), spare=True)
    if rows > 1 and name != "qwen2.5-vl":  # 39 tokens, and nodes beyond them, do not fit its window of 64
        with pytest.raises(ValueError, match=r"batch of 2 prompts with .*once for each prompt"):
            target.generate(**call, assistant_model=drafter)
        return
    assert torch.equal(target.generate(**call, assistant_model=drafter), plain)
    assert drafter.last_generation.accepted > 10


@pytest.mark.parametrize("decoding", ["auto", "stock"])
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_targets_are_refused_before_they_read_anything(name, decoding):
    target = build(name)
    drafter = drafter_of(target)
    drafter.config.decoding = decoding
    target.register_forward_pre_hook(lambda *_: pytest.fail("the target read something"))
    with pytest.raises(ValueError, match=r"has recurrent layers.*call generate.. without assistant_model") as caught:
        target.generate(torch.tensor([[5, 6]]), assistant_model=drafter, max_new_tokens=4)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="has recurrent layers"):
        lilicorr.generate(target, drafter, [[5, 6]], max_new_tokens=4)


@pytest.mark.parametrize("name", ["lfm2", "mistral sliding"])
def test_a_batch_that_goes_on_from_a_cache_row_by_row(name, teach):
    """Each row takes along what convolutions and windows have kept of it alone."""
    target = build(name)
    drafter = drafter_of(target)
    ids = torch.randint(1, 90, (3, 9), generator=torch.Generator().manual_seed(3))
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    plain = target.generate(ids, **options)
    teach(drafter, list(plain))
    cache = transformers.DynamicCache(config=target.config)
    names = inspect.signature(target.forward).parameters
    given = {"cache" if "cache" in names else "past_key_values": cache}
    target(ids[:, :6], **given)  # with gradients, which a copy has to leave behind
    assert torch.equal(target.generate(ids, assistant_model=drafter, **given, **options), plain)
    assert drafter.last_generation.accepted > 10
