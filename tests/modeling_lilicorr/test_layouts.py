"""Checkpoints of other runtimes load strictly and come back unchanged."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from lilicorr import LiLiCorrModel
from safetensors.torch import load_file, save_file

WIDTH, TAPS, HEADS, KV_HEADS, HEAD_DIM, INNER, LAYERS, BLOCK, COUNT = 32, [1, 3, 5], 4, 2, 8, 48, 5, 6, 4
HEAD_WIDTH, FACTOR, HEAD_INNER, HEAD_LAYERS = 16, 8, 24, 2
HEAD_CONFIG = {
    "num_candidates": COUNT,
    "hidden_size": HEAD_WIDTH,
    "num_layers": HEAD_LAYERS,
    "num_heads": 2,
    "intermediate_size": HEAD_INNER,
    "factor_dim": FACTOR,
    "logit_scale": 10.0,
    "vector_eps": 1e-4,
}
SERVING_KEYS = {
    "lilicorr_candidate_topk": COUNT,
    "lilicorr_hidden_size": HEAD_WIDTH,
    "lilicorr_num_layers": HEAD_LAYERS,
    "lilicorr_num_heads": 2,
    "lilicorr_mlp_ratio": 1.5,
    "lilicorr_factor_dim": FACTOR,
    "lilicorr_vector_eps": 1e-4,
    "lilicorr_logit_scale": 10.0,
}


def backbone_tensors() -> dict[str, torch.Tensor]:
    shapes = {"fc.weight": (WIDTH, len(TAPS) * WIDTH), "hidden_norm.weight": (WIDTH,), "norm.weight": (WIDTH,)}
    for i in range(LAYERS):
        layer = {
            "self_attn.q_proj": (HEADS * HEAD_DIM, WIDTH),
            "self_attn.k_proj": (KV_HEADS * HEAD_DIM, WIDTH),
            "self_attn.v_proj": (KV_HEADS * HEAD_DIM, WIDTH),
            "self_attn.o_proj": (WIDTH, HEADS * HEAD_DIM),
            "self_attn.q_norm": (HEAD_DIM,),
            "self_attn.k_norm": (HEAD_DIM,),
            "mlp.gate_proj": (INNER, WIDTH),
            "mlp.up_proj": (INNER, WIDTH),
            "mlp.down_proj": (WIDTH, INNER),
            "input_layernorm": (WIDTH,),
            "post_attention_layernorm": (WIDTH,),
        }
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in shapes.items()}


def head_tensors(served: bool = True) -> dict[str, torch.Tensor]:
    """The head's tensors as SGLang and vLLM name them, or as this package does."""
    norm = "feature_norm" if served else "feature_mlp.0"
    features = ("feature_mlp.up_proj", "feature_mlp.down_proj") if served else ("feature_mlp.1", "feature_mlp.3")
    inner = ("up_proj", "down_proj") if served else ("0", "2")
    width, linear = HEAD_WIDTH, {}
    linear |= {"token_proj": (width, WIDTH), "pass_hidden_proj": (width, WIDTH), "context_proj": (width, WIDTH)}
    linear |= {features[0]: (width, 5), features[1]: (width, width), "factor_input_proj": (width, 3 * width)}
    linear |= {name: (FACTOR, width) for name in ("out_head", "in_head", "anchor_out_head")}
    shapes = {
        f"{norm}.weight": (5,),
        f"{norm}.bias": (5,),
        "output_norm.weight": (width,),
        "anchor_norm.weight": (width,),
        "slot_embedding": (1, 1, BLOCK - 1, 1, width),
        "rank_embedding": (1, 1, 1, COUNT, width),
        "relative_slot_bias": (2, 2 * BLOCK - 1),
        "same_slot_bias": (2,),
    }
    for i in range(HEAD_LAYERS):
        shapes |= {f"layers.{i}.attn_norm.weight": (width,), f"layers.{i}.mlp_norm.weight": (width,)}
        shapes |= {f"layers.{i}.attn.in_proj_weight": (3 * width, width), f"layers.{i}.attn.in_proj_bias": (3 * width,)}
        linear |= {f"layers.{i}.attn.out_proj": (width, width)}
        linear |= {f"layers.{i}.mlp.{inner[0]}": (HEAD_INNER, width), f"layers.{i}.mlp.{inner[1]}": (width, HEAD_INNER)}
    for name, shape in linear.items():
        shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
    generator = torch.Generator().manual_seed(1)
    values = {name: torch.randn(shape, generator=generator).to(torch.bfloat16) for name, shape in shapes.items()}
    return {f"lilicorr.{name}": value for name, value in values.items()}


def write(folder: Path, tensors: dict[str, torch.Tensor], nested: dict | None = None, drop=(), **changes) -> Path:
    """A checkpoint as z-lab publishes it; `changes` and `nested` alter its config.json, `drop` removes keys."""
    settings = {
        "architectures": ["DFlashDraftModel"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "block_size": BLOCK,
        "bos_token_id": 1,
        "dflash_config": {"mask_token_id": 90, "target_layer_ids": TAPS, **(nested or {})},
        "dtype": "bfloat16",
        "eos_token_id": 2,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": WIDTH,
        "initializer_range": 0.02,
        "intermediate_size": INNER,
        "layer_types": ["full_attention"] * LAYERS,
        "max_position_embeddings": 256,
        "max_window_layers": LAYERS,
        "model_type": "qwen3",
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "num_target_layers": 8,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 500000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 91,
        **changes,
    }
    for key in drop:
        owner = settings if key in settings else settings["dflash_config"]
        del owner[key]
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(settings))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_serving(folder: Path, drop=(), tensors=None, **nested) -> Path:
    tensors = backbone_tensors() | head_tensors() if tensors is None else tensors
    nested = {"projector_type": "lilicorr", "lilicorr_enabled": True, **SERVING_KEYS, **nested}
    return write(folder, tensors, nested, drop, architectures=["LiLiCorrDraftModel"])


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name].view(torch.int16), tensor.view(torch.int16)), name


@pytest.mark.parametrize("head_type", ["none", "lilicorr"])
def test_dflash_checkpoint_comes_back_byte_equal(tmp_path, head_type):
    tensors = backbone_tensors()
    assert len(tensors) == 58
    source = write(tmp_path / "source", tensors)
    options = {"head_config": HEAD_CONFIG} if head_type == "lilicorr" else {}
    model = LiLiCorrModel.from_dflash(source, head_type, **options)
    assert model.config.head_type == head_type and not model.training and model.dtype == torch.bfloat16
    model.save_dflash(tmp_path / "back")
    assert_equal(load_file(tmp_path / "back" / "model.safetensors"), tensors)
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, tmp_path / "back"))
    unowned = {"auto_map", "dflash_config", "tie_word_embeddings", "use_cache", "rope_theta"}
    assert {key: after[key] for key in before.keys() - unowned} == {key: before[key] for key in before.keys() - unowned}
    assert before["dflash_config"].items() <= after["dflash_config"].items()
    assert after["rope_theta"] == 500000 and after["rope_parameters"] == {"rope_type": "default", "rope_theta": 500000}
    again = LiLiCorrModel.from_dflash(tmp_path / "back", "none")
    assert_equal(again.state_dict(), tensors)


def test_fresh_head_on_a_dflash_checkpoint_is_initialised(tmp_path):
    model = LiLiCorrModel.from_dflash(write(tmp_path, backbone_tensors()), head_config=HEAD_CONFIG)
    head = model.lilicorr
    for name, parameter in model.named_parameters():
        assert parameter.isfinite().all() and not parameter.is_meta, name
    for table in (head.slot_embedding, head.rank_embedding, head.relative_slot_bias, head.same_slot_bias):
        assert not table.any()
    for factor in (head.out_head, head.in_head, head.anchor_out_head):
        assert 0.01 < factor.weight.float().std() < 0.03 and not factor.bias.any()
    for layer in head.layers:
        assert 0.05 < layer.attn.in_proj_weight.float().std() < 0.5 and not layer.attn.in_proj_bias.any()
        assert (layer.attn_norm.weight == 1).all()


def test_default_head_fits_the_checkpoint(tmp_path):
    model = LiLiCorrModel.from_dflash(write(tmp_path, backbone_tensors()))
    assert model.config.head_config["num_candidates"] == 8


def test_block_size_may_stand_in_dflash_config(tmp_path):
    folder = write(tmp_path, backbone_tensors(), drop=["block_size"])
    settings = json.loads((folder / "config.json").read_text())
    settings["dflash_config"]["block_size"] = BLOCK
    (folder / "config.json").write_text(json.dumps(settings))
    assert LiLiCorrModel.from_dflash(folder, "none").config.block_size == BLOCK


@pytest.mark.parametrize(
    "changes, drop, expected",
    [
        ({"rope_theta": 1e6}, [], {"rope_type": "default", "rope_theta": 1e6}),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
            [],
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 500000},
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 7e5}},
            ["rope_theta", "rope_scaling"],
            {"rope_type": "default", "rope_theta": 7e5},
        ),
    ],
)
def test_rope_in_the_old_and_the_new_spelling(tmp_path, changes, drop, expected):
    model = LiLiCorrModel.from_dflash(write(tmp_path / "a", backbone_tensors(), drop=drop, **changes), "none")
    assert model.config.rope_parameters == expected
    model.save_dflash(tmp_path / "b")
    saved = json.loads((tmp_path / "b" / "config.json").read_text())
    assert saved["rope_theta"] == expected["rope_theta"] and saved["rope_parameters"] == expected
    scaling = {key: value for key, value in expected.items() if key != "rope_theta"}
    assert saved["rope_scaling"] == (None if expected["rope_type"] == "default" else scaling)
    # A runtime of the older generation reads the two old keys only.
    del saved["rope_parameters"]
    (tmp_path / "b" / "config.json").write_text(json.dumps(saved))
    again = LiLiCorrModel.from_dflash(tmp_path / "b", "none")
    assert again.config.rope_parameters == expected
    assert torch.equal(again.rotary_emb.inv_freq, model.rotary_emb.inv_freq)


def test_sharded_checkpoint(tmp_path):
    tensors = backbone_tensors()
    write(tmp_path, tensors)
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"model-00001-of-00002.safetensors": names[:20], "model-00002-of-00002.safetensors": names[20:]}
    for file, members in shards.items():
        save_file({name: tensors[name] for name in members}, tmp_path / file)
    index = {"weight_map": {name: file for file, members in shards.items() for name in members}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_equal(LiLiCorrModel.from_dflash(tmp_path, "none").state_dict(), tensors)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no model-00002-of-00002\.safetensors"):
        LiLiCorrModel.from_dflash(tmp_path, "none")
    index["weight_map"][names[0]] = "../elsewhere.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="points outside its folder"):
        LiLiCorrModel.from_dflash(tmp_path, "none")


def test_hub_repository_is_fetched_without_code_or_pickles(tmp_path, monkeypatch):
    source, asked = write(tmp_path / "source", backbone_tensors()), {}

    def snapshot_download(repo_id, **options):
        asked.update(options, repo_id=repo_id)
        return str(source)

    monkeypatch.setattr("lilicorr.modeling_lilicorr.layouts.snapshot_download", snapshot_download)
    LiLiCorrModel.from_dflash("someone/dflash", "none", revision="abc")
    assert asked == {"repo_id": "someone/dflash", "revision": "abc", "allow_patterns": ["*.json", "*.safetensors"]}


def test_mixed_dtypes_keep_their_values(tmp_path):
    tensors = backbone_tensors()
    tensors["norm.weight"] = torch.randn(WIDTH)
    model = LiLiCorrModel.from_dflash(write(tmp_path, tensors), "none")
    assert model.dtype == torch.float32
    assert all(torch.equal(value, tensors[name].float()) for name, value in model.state_dict().items())


def test_missing_unexpected_and_misshapen_tensors(tmp_path):
    good = backbone_tensors()
    lacking = {name: tensor for name, tensor in good.items() if name != "layers.2.mlp.up_proj.weight"}
    with pytest.raises(ValueError, match=r"lacks 1 of the tensors .* first 'layers\.2\.mlp\.up_proj\.weight'"):
        LiLiCorrModel.from_dflash(write(tmp_path, lacking))
    with pytest.raises(ValueError, match=r"holds 1 tensors .* first 'prefix_gru\.weight_ih_l0'"):
        LiLiCorrModel.from_dflash(write(tmp_path, good | {"prefix_gru.weight_ih_l0": torch.zeros(3)}))
    with pytest.raises(ValueError, match=r"'fc\.weight' in shape \[32, 64\], its config\.json calls for \[32, 96\]"):
        LiLiCorrModel.from_dflash(write(tmp_path, good | {"fc.weight": good["fc.weight"][:, :64].clone()}))


def test_missing_and_torn_files(tmp_path):
    folder = write(tmp_path / "a", backbone_tensors())
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-9])
    with pytest.raises(ValueError, match="cut short or damaged"):
        LiLiCorrModel.from_dflash(folder)
    weights.unlink()
    with pytest.raises(FileNotFoundError, match=r"has no model\.safetensors"):
        LiLiCorrModel.from_dflash(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not valid JSON"):
        LiLiCorrModel.from_dflash(folder)
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        LiLiCorrModel.from_dflash(folder)
    with pytest.raises(FileNotFoundError, match="neither a folder nor the name of a repository"):
        LiLiCorrModel.from_dflash(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "key",
    ["hidden_size", "num_target_layers", "head_dim", "block_size", "mask_token_id", "target_layer_ids", "rope_theta"],
)
def test_required_keys_are_not_guessed(tmp_path, key):
    with pytest.raises(ValueError, match=rf"config\.json lacks .*{key}"):
        LiLiCorrModel.from_dflash(write(tmp_path, backbone_tensors(), drop=[key]))


@pytest.mark.parametrize(
    "changes, nested, sentence",
    [
        ({}, {"conv_kernel_size": 2}, "conv_kernel_size is 2 and conv_group_size 0, expected 0 and 0, or 1 to"),
        ({}, {"conv_kernel_size": 2, "conv_group_size": 5}, "a divisor of hidden_size 32"),
        ({}, {"conv_kernel_size": 2, "conv_group_size": -8}, "a divisor of hidden_size 32"),
        ({}, {"conv_kernel_size": 2, "conv_group_size": 16}, "lacks 20 of the tensors"),
        ({}, {"final_logit_softcapping": 20.0}, "sets final_logit_softcapping to 20.0, which this drafter does not"),
        ({}, {"selector_rank": 256}, "sets selector_rank to 256"),
        ({}, {"block_size": 8}, r"gives two block sizes, \[6, 8\]"),
        ({"is_causal": True}, {}, "asks for causal blocks"),
        ({"layer_types": ["sliding_attention"] * LAYERS, "sliding_window": 64}, {}, "asks for causal blocks"),
        ({"block_size": 1}, {}, "block_size is 1"),
    ],
)
def test_settings_that_would_draft_something_else_are_refused(tmp_path, changes, nested, sentence):
    with pytest.raises(ValueError, match=sentence):
        LiLiCorrModel.from_dflash(write(tmp_path, backbone_tensors(), nested, **changes))


def test_neutral_settings_and_declared_windows_load(tmp_path):
    nested = {"conv_kernel_size": 0, "conv_group_size": 0, "final_logit_softcapping": None, "output_multiplier": 1.0}
    windows = {"layer_types": ["sliding_attention"] * LAYERS, "sliding_window": 64, "is_causal": False}
    model = LiLiCorrModel.from_dflash(write(tmp_path / "a", backbone_tensors(), nested, **windows), "none")
    model.save_dflash(tmp_path / "b")
    saved = json.loads((tmp_path / "b" / "config.json").read_text())
    assert (saved["use_sliding_window"], saved["sliding_window"], saved["is_causal"]) == (True, 64, False)


def test_more_candidates_than_the_vocabulary(tmp_path):
    with pytest.raises(ValueError, match="num_candidates is 92, expected 1 to the vocabulary's 91"):
        LiLiCorrModel.from_dflash(
            write(tmp_path, backbone_tensors()), head_config={**HEAD_CONFIG, "num_candidates": 92}
        )


def test_serving_layout_comes_back_byte_equal(tmp_path):
    tensors = backbone_tensors() | head_tensors()
    model = LiLiCorrModel.from_dflash(write_serving(tmp_path / "a"))
    assert model.config.head_config == HEAD_CONFIG
    assert_equal(model.state_dict(), backbone_tensors() | head_tensors(served=False))
    model.save_serving(tmp_path / "b")
    assert_equal(load_file(tmp_path / "b" / "model.safetensors"), tensors)
    before, after = (json.loads((tmp_path / name / "config.json").read_text()) for name in "ab")
    assert after["architectures"] == ["LiLiCorrDraftModel"] and after["model_type"] == "qwen3"
    assert after["dflash_config"] == {**before["dflash_config"], "block_size": BLOCK}


def test_serving_layout_with_this_packages_older_names_loads_and_leaves_with_the_servers(tmp_path):
    older = backbone_tensors() | head_tensors(served=False)
    model = LiLiCorrModel.from_dflash(write_serving(tmp_path / "a", tensors=older))
    assert_equal(model.state_dict(), older)
    model.save_serving(tmp_path / "b")
    assert_equal(load_file(tmp_path / "b" / "model.safetensors"), backbone_tensors() | head_tensors())


def test_serving_layout_with_a_tensor_under_both_names_is_refused(tmp_path):
    tensors = backbone_tensors() | head_tensors()
    tensors["lilicorr.layers.1.mlp.2.bias"] = tensors["lilicorr.layers.1.mlp.down_proj.bias"].clone()
    with pytest.raises(ValueError, match=r"holds 'lilicorr\.layers\.1\.mlp\.2\.bias' under two names"):
        LiLiCorrModel.from_dflash(write_serving(tmp_path, tensors=tensors))


def test_serving_layout_takes_zero_for_the_drafts_width(tmp_path):
    head = head_tensors()
    settings = {"lilicorr_hidden_size": 0, "lilicorr_mlp_ratio": HEAD_INNER / WIDTH}
    with pytest.raises(ValueError, match=r"lilicorr\."):
        LiLiCorrModel.from_dflash(write_serving(tmp_path / "a", tensors=backbone_tensors() | head, **settings))
    wide = {**HEAD_CONFIG, "hidden_size": WIDTH}
    LiLiCorrModel.from_dflash(write(tmp_path / "c", backbone_tensors()), head_config=wide).save_serving(tmp_path / "b")
    saved = json.loads((tmp_path / "b" / "config.json").read_text())
    saved["dflash_config"]["lilicorr_hidden_size"] = 0
    (tmp_path / "b" / "config.json").write_text(json.dumps(saved))
    again = LiLiCorrModel.from_dflash(tmp_path / "b")
    assert again.config.head_config == wide
    assert not any("token_proj" in name for name in again.state_dict())


@pytest.mark.parametrize("key", SERVING_KEYS)
def test_serving_layout_needs_every_setting_of_the_head(tmp_path, key):
    with pytest.raises(ValueError, match=rf"dflash_config lacks {key}; without all of its settings"):
        LiLiCorrModel.from_dflash(write_serving(tmp_path, drop=[key]))


@pytest.mark.parametrize(
    "nested, sentence",
    [
        ({"lilicorr_enabled": False}, "lilicorr_enabled is false, but the architecture is LiLiCorrDraftModel"),
        ({"lilicorr_num_heads": 3}, "not a multiple of its num_heads 3"),
    ],
)
def test_serving_layout_refuses_contradictions(tmp_path, nested, sentence):
    with pytest.raises(ValueError, match=sentence):
        LiLiCorrModel.from_dflash(write_serving(tmp_path, **nested))


def test_convolutions_of_a_serving_checkpoint_load_and_come_back(tmp_path):
    tensors = backbone_tensors() | head_tensors()
    for i in range(LAYERS):
        for name in ("attention_conv", "mlp_conv"):
            tensors[f"layers.{i}.{name}.base_kernel"] = torch.randn(2, 2, WIDTH).to(torch.bfloat16)
            tensors[f"layers.{i}.{name}.kernel_projection.weight"] = torch.randn(16, WIDTH).to(torch.bfloat16)
    folder = write_serving(tmp_path / "a", tensors=tensors, conv_kernel_size=2, conv_group_size=8)
    LiLiCorrModel.from_dflash(folder).save_serving(tmp_path / "b")
    assert_equal(load_file(tmp_path / "b" / "model.safetensors"), tensors)
    saved = json.loads((tmp_path / "b" / "config.json").read_text())["dflash_config"]
    assert (saved["conv_kernel_size"], saved["conv_group_size"]) == (2, 8)


def test_serving_layout_lacking_a_head_tensor(tmp_path):
    tensors = backbone_tensors() | head_tensors()
    del tensors["lilicorr.same_slot_bias"]
    with pytest.raises(ValueError, match=r"lacks 1 of the tensors .* first 'lilicorr\.same_slot_bias'"):
        LiLiCorrModel.from_dflash(write_serving(tmp_path, tensors=tensors))


def test_backbone_of_a_serving_checkpoint_alone(tmp_path):
    model = LiLiCorrModel.from_dflash(write_serving(tmp_path), "none")
    assert_equal(model.state_dict(), backbone_tensors())


@pytest.mark.parametrize("count", [3, 32])
def test_save_serving_refuses_what_no_runtime_serves(tmp_path, count):
    source = write(tmp_path / "a", backbone_tensors())
    model = LiLiCorrModel.from_dflash(source, head_config={**HEAD_CONFIG, "num_candidates": count})
    with pytest.raises(ValueError, match=f"1, 2, 4, 8 or 16 candidates, this head has {count}"):
        model.save_serving(tmp_path / "b")
    with pytest.raises(ValueError, match=r"the head 'none' in this layout \(save_dflash writes"):
        LiLiCorrModel.from_dflash(source, "none").save_serving(tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_a_write_that_dies_leaves_the_earlier_checkpoint(tmp_path, monkeypatch):
    model = LiLiCorrModel.from_dflash(write(tmp_path / "a", backbone_tensors()), "none")
    model.save_dflash(tmp_path / "b")
    kept = shutil.copytree(tmp_path / "b", tmp_path / "kept")

    def die(tensors, path, **_):
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr("lilicorr.modeling_lilicorr.layouts.save_file", die)
    with pytest.raises(KeyboardInterrupt):
        model.float().save_dflash(tmp_path / "b")
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == ["config.json", "model.safetensors"]
    for path in kept.iterdir():
        assert (tmp_path / "b" / path.name).read_bytes() == path.read_bytes()
