"""The drafter's configuration: derived from any decoder-only target, checked in one sentence, stable through JSON."""

import json

import pytest
from huggingface_hub.errors import StrictDataclassError
from lilicorr import LiLiCorrConfig, LiLiCorrModel
from lilicorr.modeling_lilicorr.configuration_lilicorr import FORMAT_VERSION, default_target_layer_ids
from lilicorr.modeling_lilicorr.head_settings import HEAD_TYPES, default_head_config
from transformers import (
    BloomConfig,
    Gemma3Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MambaConfig,
    MptConfig,
    OPTConfig,
    PreTrainedConfig,
    Qwen3Config,
    T5Config,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

LILICORR_HEAD_KEYS = list(default_head_config("lilicorr", 64))
SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 8, "num_attention_heads": 4}


def llama(**overrides) -> LlamaConfig:
    settings = {"vocab_size": 100, "num_key_value_heads": 2, "pad_token_id": 7, "eos_token_id": 2, **SHAPE}
    return LlamaConfig(**{**settings, **overrides})


def qwen3(**overrides) -> Qwen3Config:
    settings = {"vocab_size": 128, "num_key_value_heads": 1, "head_dim": 32, "pad_token_id": 9, **SHAPE}
    return Qwen3Config(**{**settings, **overrides})


def gemma3(**overrides) -> Gemma3Config:
    """A text part inside a bigger config, with one set of rope settings for each layer type."""
    text = Gemma3TextConfig(
        **{"vocab_size": 100, "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, **SHAPE, **overrides}
    )
    return Gemma3Config(text_config=text)


def tiny(**overrides) -> LiLiCorrConfig:
    return LiLiCorrConfig.for_target(llama(), block_size=4, **overrides)


@pytest.mark.parametrize(
    "num_layers,count,ids",
    [(36, 5, [1, 9, 17, 25, 33]), (40, 5, [1, 10, 19, 28, 37]), (36, 1, [18]), (30, 1, [15]), (5, 2, [1, 2])],
)
def test_target_layers_are_spread_evenly_and_a_single_one_is_the_middle(
    num_layers: int, count: int, ids: list[int]
) -> None:
    assert default_target_layer_ids(num_layers, count) == ids


@pytest.mark.parametrize("num_layers", range(3, 81))
def test_default_target_layers_are_valid_for_targets_of_any_depth(num_layers: int) -> None:
    config = LiLiCorrConfig.for_target(llama(num_hidden_layers=num_layers))
    assert 1 <= len(config.target_layer_ids) <= 5
    assert config.num_target_layers == num_layers


def test_defaults_are_the_papers() -> None:
    config = LiLiCorrConfig()
    assert (config.block_size, config.num_slots, config.mask_token_id) == (16, 15, 151669)
    assert config.target_layer_ids == [1, 9, 17, 25, 33]
    assert config.layer_types == ["full_attention"] * 5
    assert config.head_type == "lilicorr"
    assert config.head_config == {
        "num_candidates": 8,
        "hidden_size": 1024,
        "num_layers": 2,
        "num_heads": 8,
        "intermediate_size": 2048,
        "factor_dim": 1024,
        "logit_scale": 8.0,
        "vector_eps": 1e-6,
    }


@pytest.mark.parametrize("target", [llama(), qwen3(), gemma3()], ids=["llama", "qwen3", "gemma3"])
def test_for_target_takes_over_what_must_match_the_target(target: PreTrainedConfig) -> None:
    text = target.get_text_config()
    config = LiLiCorrConfig.for_target(target, num_hidden_layers=2)
    assert config.vocab_size == text.vocab_size
    assert config.hidden_size == text.hidden_size
    assert config.num_target_layers == text.num_hidden_layers
    assert config.rms_norm_eps == text.rms_norm_eps
    assert config.head_dim == text.head_dim
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, text.num_key_value_heads)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(config, name) == getattr(text, name)
    assert config.num_hidden_layers == len(config.layer_types) == 2
    LiLiCorrModel(config)


def test_for_target_takes_the_rope_of_the_target() -> None:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 64
    config = LiLiCorrConfig.for_target(llama(rope_parameters=rope))
    assert config.rope_parameters == rope
    assert config.rope_parameters is not rope


def test_for_target_takes_the_full_attention_rope_of_a_target_with_one_for_each_layer_type() -> None:
    target = gemma3()
    full = target.get_text_config().rope_parameters["full_attention"]
    config = LiLiCorrConfig.for_target(target)
    assert config.rope_parameters["rope_theta"] == full["rope_theta"]
    assert "full_attention" not in config.rope_parameters


@pytest.mark.parametrize(
    "target",
    [
        GPT2Config(vocab_size=100, n_embd=64, n_head=4, n_layer=6, pad_token_id=5, eos_token_id=1, bos_token_id=1),
        OPTConfig(vocab_size=100, hidden_size=64, num_attention_heads=4, num_hidden_layers=6, ffn_dim=96),
        GPTNeoXConfig(vocab_size=100, pad_token_id=5, **SHAPE),
        MptConfig(vocab_size=100, d_model=64, n_heads=4, n_layers=6, pad_token_id=5),
        BloomConfig(vocab_size=100, hidden_size=64, n_head=4, n_layer=6, pad_token_id=5),
    ],
    ids=["gpt2", "opt", "gpt-neox", "mpt", "bloom"],
)
def test_for_target_fits_decoders_that_name_or_lack_fields_differently(target: PreTrainedConfig) -> None:
    config = LiLiCorrConfig.for_target(target)
    assert (config.hidden_size, config.head_dim, config.vocab_size) == (64, 16, 100)
    assert config.intermediate_size > 0
    LiLiCorrModel(config)


def test_for_target_fits_a_target_whose_head_width_varies_by_layer() -> None:
    target = Gemma4TextConfig(vocab_size=100, num_key_value_heads=2, head_dim=16, pad_token_id=0, **SHAPE)
    config = LiLiCorrConfig.for_target(target)
    assert config.head_dim == 16 and config.num_key_value_heads == 2
    LiLiCorrModel(config)


@pytest.mark.parametrize(
    "target, sentence",
    [
        (MambaConfig(), "'mamba' names no num_attention_heads"),
        (Gemma3nTextConfig(num_hidden_layers=5), "'gemma3n_text' carries several hidden states for each token"),
    ],
    ids=["mamba", "gemma3n"],
)
def test_a_target_whose_states_no_drafter_can_read_is_refused(target: PreTrainedConfig, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        LiLiCorrConfig.for_target(target, mask_token_id=3)


@pytest.mark.parametrize("family", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
def test_every_family_of_transformers_gets_a_drafter_or_one_sentence(family: str) -> None:
    try:
        target = CONFIG_MAPPING[family]()
    except StrictDataclassError:
        pytest.skip("its configuration has no defaults")
    try:
        LiLiCorrConfig.for_target(target, mask_token_id=3).validate()
    except ValueError as refusal:
        assert "\n" not in str(refusal) and len(str(refusal)) < 300


@pytest.mark.parametrize("width,head_width", [(4096, 1024), (2560, 1024), (576, 256), (64, 64)])
def test_the_default_head_is_narrower_for_narrow_targets(width: int, head_width: int) -> None:
    config = LiLiCorrConfig.for_target(llama(hidden_size=width))
    assert config.head_config["hidden_size"] == head_width


def test_overrides_win() -> None:
    head = {**tiny().head_config, "num_candidates": 3}
    config = tiny(target_layer_ids=[0, 5], mask_token_id=42, head_config=head, rms_norm_eps=1e-3, sliding_window=9)
    assert config.target_layer_ids == [0, 5] and config.mask_token_id == 42 and config.rms_norm_eps == 1e-3
    assert config.head_config["num_candidates"] == 3 and config.block_size == 4 and config.sliding_window == 9


def test_another_number_of_target_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="num_target_layers is 10, but the target has 8 layers; leave it out"):
        tiny(num_target_layers=10)


def test_an_encoder_decoder_target_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"decoder-only target.*'t5'"):
        LiLiCorrConfig.for_target(T5Config())


def test_the_mask_is_the_first_unused_row_of_a_padded_embedding() -> None:
    assert LiLiCorrConfig.for_target(llama(), tokenizer_size=93).mask_token_id == 93


def test_the_mask_is_the_pad_row_where_the_embedding_has_no_unused_row() -> None:
    assert LiLiCorrConfig.for_target(llama()).mask_token_id == 7
    assert LiLiCorrConfig.for_target(llama(), tokenizer_size=100).mask_token_id == 7
    assert LiLiCorrConfig.for_target(llama(pad_token_id=0)).mask_token_id == 0


@pytest.mark.parametrize("pad,eos", [(None, 2), (2, 2), (5, [4, 5]), (-1, 2)])
def test_no_mask_is_guessed_where_the_pad_token_is_missing_or_ends_texts(pad, eos) -> None:
    target = llama(eos_token_id=eos)
    target.pad_token_id = pad
    with pytest.raises(ValueError, match=r"pass mask_token_id=.* or tokenizer_size=max"):
        LiLiCorrConfig.for_target(target)
    assert LiLiCorrConfig.for_target(target, mask_token_id=11).mask_token_id == 11


BAD = {
    "proposal": ({"proposal": "random"}, "proposal is 'random', expected one of point, sampled"),
    "no-draws": (
        {"proposal": "sampled", "head_type": "none", "head_config": {}},
        "proposal is 'sampled', which only dspark, lilicorr, dcoco, selector can make, not none",
    ),
    "block-size-1": ({"block_size": 1}, "block_size is 1, but a block needs the anchor and at least one slot"),
    "newer-format": ({"lilicorr_format": FORMAT_VERSION + 1}, "format 2, this code reads up to 1; upgrade"),
    "unknown-head": ({"head_type": "oracle"}, "head_type is 'oracle', expected one of none, lilicorr"),
    "mask-too-high": ({"mask_token_id": 100}, "mask_token_id 100 is not a row of the target's embedding"),
    "mask-negative": ({"mask_token_id": -1}, "mask_token_id -1 is not a row"),
    "layers-descending": ({"target_layer_ids": [3, 1]}, r"must be ascending and distinct, got \[3, 1\]"),
    "layers-repeated": ({"target_layer_ids": [1, 1]}, "must be ascending and distinct"),
    "layers-empty": ({"target_layer_ids": []}, "must be ascending and distinct"),
    "tap-on-last-layer": ({"target_layer_ids": [1, 7]}, r"must lie in 0 … 6: .* only visible after the final norm"),
    "tap-negative": ({"target_layer_ids": [-1, 3]}, "must lie in 0 … 6"),
    "kv-heads": ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
    "no-kv-heads": ({"num_key_value_heads": 0}, "num_key_value_heads 0, expected 1 or more of each"),
    "no-attention-heads": ({"num_attention_heads": 0}, "num_attention_heads is 0 and"),
    "layer-type-unknown": (
        {"num_hidden_layers": 1, "layer_types": ["linear_attention"]},
        "layer type 'linear_attention' is not supported",
    ),
    "no-window": (
        {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]},
        "sliding_window must be a positive number",
    ),
    "causal": ({"is_causal": True}, "is_causal is true, but blocks here are bidirectional"),
}
BAD_HEAD = {
    "K-above-vocabulary": ({"num_candidates": 101}, "num_candidates is 101, expected 1 to the vocabulary's 100"),
    "K-zero": ({"num_candidates": 0}, "num_candidates is 0"),
    "heads-not-dividing": ({"num_heads": 3}, "hidden_size 64 is not a multiple of its num_heads 3"),
    "no-layers": ({"num_layers": 0}, "num_layers must be positive, got 0"),
    "residual": ({"residual": "yes"}, "residual is 'yes', expected true or false"),
    "no-heads": ({"num_heads": 0}, "num_heads must be positive, got 0"),
    "heads-negative": ({"num_heads": -2}, "num_heads must be positive, got -2"),
    "width-zero": ({"hidden_size": 0}, "hidden_size must be positive, got 0"),
    "width-text": ({"hidden_size": "64"}, "hidden_size is '64', expected a whole number"),
    "layers-half": ({"num_layers": 2.5}, "num_layers is 2.5, expected a whole number"),
    "K-true": ({"num_candidates": True}, "num_candidates is True, expected a whole number"),
    "scale-text": ({"logit_scale": "8"}, "logit_scale is '8', expected a number"),
    "scale-nan": ({"logit_scale": float("nan")}, "logit_scale must be positive, got nan"),
    "scale": ({"logit_scale": -8.0}, "logit_scale must be positive, got -8.0"),
    **{f"lacks-{key}": ({key: None}, f"head_config lacks {key};") for key in LILICORR_HEAD_KEYS},
}


def assert_refused(config: LiLiCorrConfig, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as refusal:
        config.validate()
    assert "\n" not in str(refusal.value)
    with pytest.raises(ValueError, match=sentence):
        LiLiCorrModel(config)


def bare(**overrides) -> LiLiCorrConfig:
    """As `tiny()`, but not validated at birth."""
    return LiLiCorrConfig(**{**tiny().to_dict(), "layer_types": None, **overrides})


@pytest.mark.parametrize("overrides,sentence", BAD.values(), ids=BAD.keys())
def test_what_cannot_work_is_refused_in_one_sentence_before_a_model_is_built(overrides, sentence: str) -> None:
    assert_refused(bare(**overrides), sentence)


@pytest.mark.parametrize("overrides,sentence", BAD_HEAD.values(), ids=BAD_HEAD.keys())
def test_a_head_that_cannot_work_is_refused_in_one_sentence(overrides, sentence: str) -> None:
    assert_refused(bare(head_config={**tiny().head_config, **overrides}), sentence)


@pytest.mark.parametrize("key", LILICORR_HEAD_KEYS)
def test_an_absent_head_setting_is_never_defaulted_on_load(key: str, tmp_path) -> None:
    settings = tiny().to_dict()
    del settings["head_config"][key]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=f"head_config lacks {key};"):
        LiLiCorrConfig.from_pretrained(tmp_path)


def test_a_wrong_number_of_layer_types_is_refused_in_one_sentence() -> None:
    config = tiny()
    config.layer_types = ["full_attention"]
    assert_refused(config, "layer_types names 1 layers")


def test_an_empty_head_config_names_every_missing_setting() -> None:
    assert_refused(bare(head_config={}), "head_config lacks " + ", ".join(LILICORR_HEAD_KEYS))


@pytest.mark.parametrize("head_type", HEAD_TYPES)
def test_a_configuration_survives_json(head_type: str, tmp_path) -> None:
    config = tiny(
        head_type=head_type,
        num_hidden_layers=2,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=8,
        target_layer_ids=[1, 4, 6],
    )
    config.save_pretrained(tmp_path)
    loaded = LiLiCorrConfig.from_pretrained(tmp_path)
    loaded.validate()
    ignored = {"transformers_version", "_name_or_path", "dtype"}
    first, second = config.to_dict(), loaded.to_dict()
    assert {k: v for k, v in first.items() if k not in ignored} == {k: v for k, v in second.items() if k not in ignored}
    assert loaded.model_type == "lilicorr" and loaded.lilicorr_format == FORMAT_VERSION


def test_two_configurations_share_no_mutable_defaults() -> None:
    first, second = LiLiCorrConfig(), LiLiCorrConfig()
    first.head_config["num_candidates"] = 2
    first.target_layer_ids.append(34)
    first.rope_parameters["rope_theta"] = 1.0
    assert second.head_config["num_candidates"] == 8
    assert second.target_layer_ids == [1, 9, 17, 25, 33]
    assert second.rope_parameters["rope_theta"] == 1_000_000.0


def test_the_head_none_needs_no_settings() -> None:
    config = tiny(head_type="none")
    assert config.head_config == {}
    assert not [name for name in LiLiCorrModel(config).state_dict() if name.startswith("none")]
