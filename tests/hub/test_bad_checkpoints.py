"""Each broken checkpoint gives one clear sentence."""

import json
import logging
import shutil
import socket

import pytest
import torch
from lilicorr import LiLiCorrModel
from lilicorr.modeling_lilicorr.config_checks import REQUIRED
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from .conftest import assert_same_weights, tiny_config, tiny_drafter


@pytest.fixture
def broken(checkpoint, tmp_path):
    """A copy of a good checkpoint to break, and ways to break it."""

    class Broken:
        folder = tmp_path / "broken"
        weights = folder / "model.safetensors"

        def configure(self, **changes):
            path = self.folder / "config.json"
            path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

        def store(self, **changes):
            tensors = {**load_file(self.weights), **changes}
            save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, self.weights)

        def forget(self, key):
            path = self.folder / "config.json"
            path.write_text(json.dumps({k: v for k, v in json.loads(path.read_text()).items() if k != key}))

        def load(self):
            return AutoModel.from_pretrained(self.folder)

        def refuse(self, error, sentence):
            """By either class, in one sentence, before a drafter is built."""
            for loads in (AutoModel, LiLiCorrModel):
                with pytest.raises(error, match=sentence) as refusal:
                    loads.from_pretrained(self.folder)
                assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 400

    shutil.copytree(checkpoint, Broken.folder)
    return Broken()


def test_missing_weights(broken):
    broken.weights.unlink()
    with pytest.raises(OSError, match=r"has no model\.safetensors; drafters are stored as safetensors only"):
        broken.load()


def test_pickled_weights_are_never_read(broken):
    broken.weights.rename(broken.folder / "pytorch_model.bin")
    with pytest.raises(OSError, match=r"model\.safetensors"):
        broken.load()
    with pytest.raises(ValueError, match="safetensors only"):
        LiLiCorrModel.from_pretrained(broken.folder, use_safetensors=False)


@pytest.mark.parametrize("size", [0, 5, 600, -40])
def test_torn_weights(broken, size):
    content = broken.weights.read_bytes()
    broken.weights.write_bytes(content[:size])
    with pytest.raises(ValueError, match="cut short or damaged, download or copy it again"):
        broken.load()


def test_torn_configuration(broken):
    path = broken.folder / "config.json"
    path.write_text(path.read_text()[:200])
    with pytest.raises(OSError, match="not a valid JSON file"):
        broken.load()


def test_missing_tensor(broken):
    broken.store(**{"norm.weight": None, "lilicorr.slot_embedding": None})
    with pytest.raises(ValueError, match=r"lacks 2 of the tensors .* first 'lilicorr\.slot_embedding'"):
        broken.load()


def test_unexpected_tensor(broken):
    broken.store(**{"selector.weight": load_file(broken.weights)["norm.weight"].clone()})
    with pytest.raises(
        ValueError, match=r"holds 1 tensors its config\.json does not call for, first 'selector\.weight'"
    ):
        broken.load()


@pytest.mark.parametrize("forgiving", [False, True])
def test_tensor_of_another_shape(broken, forgiving):
    broken.store(**{"norm.weight": load_file(broken.weights)["norm.weight"][:7].clone()})
    with pytest.raises(ValueError, match=r"'norm\.weight' in shape \[7\], its config\.json calls for \[32\]"):
        AutoModel.from_pretrained(broken.folder, ignore_mismatched_sizes=forgiving)


def test_newer_format_is_named_before_anything_it_changed(broken):
    broken.configure(lilicorr_format=99, head_type="of-the-future", head_config={"unknown": 1}, new_setting={"a": 1})
    with pytest.raises(ValueError, match=r"has format 99, this code reads up to 1; upgrade lilicorr"):
        broken.load()


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"block_size": 1}, "block_size is 1, but a block needs the anchor and at least one slot"),
        ({"head_config": {**tiny_config().head_config, "num_candidates": 98}}, "num_candidates is 98, expected 1 to"),
        ({"head_type": "unheard-of"}, "head_type is 'unheard-of', expected one of none, lilicorr"),
        ({"mask_token_id": 97}, "mask_token_id 97 is not a row"),
    ],
)
def test_configuration_that_cannot_work(broken, changes, sentence):
    broken.configure(**changes)
    with pytest.raises(ValueError, match=sentence):
        broken.load()


@pytest.mark.parametrize("key", REQUIRED)
def test_a_setting_that_gives_the_drafter_its_meaning_is_never_guessed(broken, key):
    broken.forget(key)
    broken.refuse(ValueError, rf"^config\.json lacks {key}; a guess would load as another drafter")


def test_all_missing_settings_are_named_at_once(broken):
    for key in ("mask_token_id", "target_layer_ids"):
        broken.forget(key)
    broken.refuse(ValueError, r"lacks mask_token_id, target_layer_ids;")


def test_rope_theta_is_never_guessed(broken):
    broken.configure(rope_parameters={"rope_type": "default"})
    broken.refuse(ValueError, "rope_parameters lacks rope_theta, which rope_type 'default' needs")


@pytest.mark.parametrize(
    "key", ["attention_dropout", "initializer_range", "draft_lengths", "proposal", "conv_kernel_size", "training_data"]
)
def test_settings_that_older_checkpoints_lack_may_be_absent(broken, key):
    broken.forget(key)
    assert_same_weights(broken.load(), tiny_drafter())


def test_settings_that_a_later_version_adds_are_kept(broken, tmp_path):
    broken.configure(lookup=False, later_flag=3, something={"new": [1]})
    drafter = broken.load()
    assert drafter.config.something == {"new": [1]}
    drafter.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["something"] == {"new": [1]}


def test_a_folder_without_configuration_says_so_before_anything_is_built(broken, monkeypatch):
    (broken.folder / "config.json").unlink()
    monkeypatch.setattr(LiLiCorrModel, "__init__", None)
    with pytest.raises(FileNotFoundError, match=r"has no config\.json; is it a checkpoint\?$"):
        LiLiCorrModel.from_pretrained(broken.folder)


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "a/b/c", "~/drafter"])
def test_a_path_that_no_repository_is_called_like_is_not_looked_for_on_the_hub(name, monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", None)
    with pytest.raises(FileNotFoundError, match="neither a folder nor the name of a repository on the Hub"):
        LiLiCorrModel.from_pretrained(name)


def test_a_folder_is_read_without_asking_the_hub(broken, monkeypatch):
    asked = []
    monkeypatch.setattr(socket.socket, "connect", lambda *arguments: asked.append(arguments))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **_: asked.append(arguments))
    broken.load()
    broken.weights.unlink()
    with pytest.raises(OSError, match=r"has no model\.safetensors"):
        broken.load()
    assert not asked


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"mask_token_id": 0.5}, "mask_token_id is 0.5, expected a whole number"),
        ({"mask_token_id": True}, "mask_token_id is True, expected a whole number"),
        ({"mask_token_id": "7"}, "mask_token_id is '7', expected a whole number"),
        ({"block_size": None}, "lacks block_size"),
        ({"block_size": 10**9}, "block_size is 1000000000, expected a whole number up to 4,096"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, expected a whole number from 1 up to 1,024"),
        ({"num_target_layers": "4"}, "num_target_layers is '4', expected a whole number"),
        ({"hidden_size": 2**40}, "hidden_size is 1099511627776, expected a whole number from 1 up to"),
        ({"sliding_window": -1}, "sliding_window is -1, expected a whole number from 1"),
        (
            {"target_layer_ids": [1, 2.0]},
            r"target_layer_ids is \[1, 2\.0\], expected a list, each entry a whole number",
        ),
        ({"head_config": [1]}, r"head_config is \[1\], expected a mapping"),
        ({"rope_parameters": "yarn"}, "rope_parameters is 'yarn', expected a mapping"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
            "rope_parameters lacks factor, which rope_type",
        ),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan, expected a number above 0"),
        ({"hidden_act": "sigh"}, "hidden_act is 'sigh', which names no activation"),
        ({"head_dim": 7}, "head_dim is 7, expected an even number"),
        ({"dtype": "load"}, "dtype is 'load', expected one of float32"),
        ({"quantization_config": {"quant_method": "gptq"}}, "sets quantization_config, which would be ignored"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "sets rope_scaling, which would be ignored"),
    ],
)
def test_a_setting_of_another_type_or_range_is_refused(broken, changes, sentence):
    broken.configure(**changes)
    broken.refuse(ValueError, sentence)


def test_layers_that_no_file_holds_are_not_even_built(broken, monkeypatch):
    broken.configure(num_hidden_layers=1000, layer_types=["full_attention"] * 1000)
    monkeypatch.setattr(LiLiCorrModel, "__init__", None)
    with pytest.raises(ValueError, match=r"tensors, but its config\.json calls for 1001 layers"):
        broken.load()


def test_shapes_are_compared_before_any_tensor_is_allocated(broken, monkeypatch):
    broken.configure(vocab_size=2**28, hidden_size=2**20, intermediate_size=2**20, head_dim=2**14)
    initialised = LiLiCorrModel.__init__

    def on_meta_only(self, config):
        assert torch.empty(0).is_meta
        initialised(self, config)

    monkeypatch.setattr(LiLiCorrModel, "__init__", on_meta_only)
    broken.refuse(ValueError, r"in shape \[.*\], its config\.json calls for")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_not_finite_are_refused(broken, value, dtype):
    weight = load_file(broken.weights)["layers.1.mlp.up_proj.weight"].to(dtype)
    weight[-1, -1] = value
    broken.store(**{"layers.1.mlp.up_proj.weight": weight})
    broken.refuse(ValueError, r"holds NaN or infinite values in 'layers\.1\.mlp\.up_proj\.weight'")


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_tensors_that_are_no_real_numbers_are_refused(broken, dtype):
    broken.store(**{"norm.weight": torch.ones(32).to(dtype)})
    broken.refuse(ValueError, r"holds 'norm\.weight' as .*, expected one of F64, F32, F16, BF16")


def shard(broken, file, **names):
    """An index whose entries name `file` for the tensor that is asked for, and the whole file for the others."""
    single = broken.folder / "model-00001-of-00001.safetensors"
    broken.weights.rename(single)
    weight_map = dict.fromkeys(load_file(single), single.name) | {"norm.weight": file}
    (broken.folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return single


@pytest.mark.parametrize(
    "file", ["../other.safetensors", "{root}/other.safetensors", "norm.bin", "sub/x.safetensors", ""]
)
def test_an_index_names_safetensors_beside_it_only(broken, file, tmp_path):
    norm = load_file(broken.weights)["norm.weight"]
    (broken.folder / "sub").mkdir()
    for path in (tmp_path / "other.safetensors", broken.folder / "sub" / "x.safetensors"):
        save_file({"norm.weight": norm}, path)
    torch.save({"norm.weight": norm}, broken.folder / "norm.bin")
    shard(broken, file.format(root=tmp_path))
    broken.refuse(ValueError, "which points outside its folder or is no safetensors file; do not load it")


def test_two_files_with_a_tensor_of_one_name_are_refused(broken):
    single = shard(broken, "model-00002-of-00002.safetensors")
    save_file({"norm.weight": load_file(single)["norm.weight"]}, broken.folder / "model-00002-of-00002.safetensors")
    broken.refuse(ValueError, r"model-00001-of-00001\.safetensors and model-00002-.* both hold 'norm\.weight'")


def test_an_index_without_files_is_refused(broken):
    shard(broken, "x")
    (broken.folder / "model.safetensors.index.json").write_text('{"weight_map": []}')
    broken.refuse(ValueError, "has no weight_map that names files")


def test_an_adapter_in_the_folder_leads_nowhere_else(broken):
    (broken.folder / "adapter_config.json").write_text(
        '{"base_model_name_or_path": "someone/else", "peft_type": "LORA"}'
    )
    assert_same_weights(LiLiCorrModel.from_pretrained(broken.folder), tiny_drafter())


def test_no_report_of_tensors_stands_before_the_sentence(broken, caplog, capfd):
    broken.store(**{"norm.weight": None})
    with caplog.at_level(logging.WARNING, logger="transformers"), pytest.raises(ValueError, match="lacks 1 of the"):
        broken.load()
    assert not caplog.records and "REPORT" not in capfd.readouterr().err


def test_a_fresh_head_on_a_backbone_comes_without_a_report(tmp_path, caplog, capfd):
    tiny_drafter().save_dflash(tmp_path)
    with caplog.at_level(logging.WARNING, logger="transformers"):
        LiLiCorrModel.from_dflash(tmp_path, head_config=tiny_config().head_config)
    said = capfd.readouterr()
    assert not caplog.records and "REPORT" not in said.err and "training" not in said.err + said.out


@pytest.mark.parametrize("parts", ["head", "norms"])
def test_mixed_dtypes_come_back_as_they_were_saved(tmp_path, parts):
    drafter = tiny_drafter().to(torch.bfloat16)
    (drafter.lilicorr if parts == "head" else drafter.norm).float()
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.rand_like(parameter) / 997)
    drafter.save_pretrained(tmp_path)
    for load in (AutoModel.from_pretrained, LiLiCorrModel.from_pretrained):
        loaded = load(tmp_path)
        assert_same_weights(loaded, drafter)
        assert loaded.dtype == drafter.dtype == torch.bfloat16
        assert {p.dtype for p in load(tmp_path, dtype=torch.float32).parameters()} == {torch.float32}


def test_a_configuration_with_another_dtype_than_the_weights_changes_no_value(broken):
    broken.configure(dtype="bfloat16")
    assert_same_weights(broken.load(), tiny_drafter())


def test_settings_given_while_loading_win_and_are_checked(broken):
    drafter = LiLiCorrModel.from_pretrained(broken.folder, draft_lengths="adaptive", attn_implementation="eager")
    assert drafter.config.draft_lengths == "adaptive" and drafter.config._attn_implementation == "eager"
    assert AutoModel.from_pretrained(broken.folder, draft_lengths="adaptive").config.draft_lengths == "adaptive"
    with pytest.raises(ValueError, match="draft_lengths is 'odd'"):
        LiLiCorrModel.from_pretrained(broken.folder, draft_lengths="odd")


def test_a_subfolder_is_loaded(broken, tmp_path):
    shutil.copytree(broken.folder, tmp_path / "outer" / "inner")
    for load in (AutoModel.from_pretrained, LiLiCorrModel.from_pretrained):
        assert_same_weights(load(tmp_path / "outer", subfolder="inner"), tiny_drafter())
