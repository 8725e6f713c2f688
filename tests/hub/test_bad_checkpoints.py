"""Each broken checkpoint gives one clear sentence."""

import json
import shutil

import pytest
from lilicorr import LiLiCorrModel
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from .conftest import tiny_config


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

        def load(self):
            return AutoModel.from_pretrained(self.folder)

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
