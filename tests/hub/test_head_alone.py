"""A head alone is published without its backbone and meets it again, and no other."""

import json

import pytest
import torch
from lilicorr import LiLiCorrModel
from lilicorr.cli import app
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from .conftest import assert_same_weights, tiny_drafter
from .fake_hub import Repository

BACKBONE = ("--head-only", "--backbone", "lab/backbone")


def publish(*arguments):
    return CliRunner().invoke(app, ["publish", *map(str, arguments)])


def put(hub, name, folder):
    """A repository on the Hub that holds the files of a folder."""
    repository = hub.repositories[name] = Repository(private=False)
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    repository.commit("main", files, "files")
    return repository


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def backbone(hub, cache, tmp_path):
    """The folder of a public backbone, which is on the Hub too: that of `tiny_drafter()`."""
    folder = tmp_path / "backbone"
    tiny_drafter().save_dflash(folder)
    put(hub, "lab/backbone", folder)
    return folder


@pytest.fixture
def published(hub, backbone, checkpoint):
    result = publish(checkpoint, "someone/head", *BACKBONE)
    assert result.exit_code == 0, result.output
    return hub.repositories["someone/head"]


def test_a_head_alone_meets_its_backbone_again(hub, backbone, published, tmp_path):
    (tmp_path / "head.safetensors").write_bytes(published.files()["model.safetensors"])
    assert all(name.startswith("lilicorr.") for name in load_file(tmp_path / "head.safetensors"))
    about = json.loads(published.files()["config.json"])["frozen_backbone"]
    assert (about["name"], about["revision"]) == ("lab/backbone", hub.repositories["lab/backbone"].branches["main"])
    for source in ("lab/backbone", backbone):
        drafter = LiLiCorrModel.from_dflash(source, head="someone/head")
        assert_same_weights(drafter, tiny_drafter())
    drafter.save_pretrained(tmp_path / "whole")  # together they are a drafter as any other
    assert_same_weights(LiLiCorrModel.from_pretrained(tmp_path / "whole"), tiny_drafter())


def test_its_card_says_how_both_are_loaded(published):
    card = published.files()["README.md"].decode()
    assert "base_model: lab/backbone" in card and "holds the head alone" in card
    assert 'from_dflash("lab/backbone", revision="' in card and 'head="someone/head"' in card


def test_another_backbone_is_refused(backbone, published):
    tensors = load_file(backbone / "model.safetensors")
    changed = {**tensors, "norm.weight": tensors["norm.weight"] + 1e-3}
    save_file(changed, backbone / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"are not those that the head was trained on \(lab/backbone at \w{40}\)"):
        LiLiCorrModel.from_dflash(backbone, head="someone/head")
    save_file(tensors, backbone / "model.safetensors", metadata={"format": "pt"})
    settings = json.loads((backbone / "config.json").read_text())
    settings["rope_parameters"]["rope_theta"] = settings["rope_theta"] = 5.0
    (backbone / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"has rope_parameters .* the head belongs to a backbone with"):
        LiLiCorrModel.from_dflash(backbone, head="someone/head")


def test_a_head_alone_and_a_whole_drafter_are_not_taken_for_each_other(published, backbone, checkpoint, cache):
    with pytest.raises(ValueError, match=r"holds a head alone; load it with LiLiCorrModel\.from_dflash"):
        LiLiCorrModel.from_pretrained("someone/head")
    with pytest.raises(ValueError, match="holds a whole drafter, expected a head alone"):
        LiLiCorrModel.from_dflash(backbone, head=checkpoint)
    with pytest.raises(ValueError, match="brings its own settings; leave out block_size"):
        LiLiCorrModel.from_dflash(backbone, head="someone/head", block_size=3)


def test_a_head_with_a_broken_note_of_its_backbone_is_refused(published, backbone):
    settings = json.loads(published.files()["config.json"])
    for broken in ("lab/backbone", {"name": "lab/backbone"}):
        content = json.dumps({**settings, "frozen_backbone": broken}).encode()
        published.commit("main", {**published.files(), "config.json": content}, f"broken {broken}")
        with pytest.raises(ValueError, match="expected a mapping with a sha256"):
            LiLiCorrModel.from_dflash(backbone, head="someone/head")


def test_a_jointly_trained_backbone_is_not_left_out(hub, backbone, tmp_path):
    drafter = tiny_drafter()
    with torch.no_grad():
        drafter.norm.weight[0] += 1
    drafter.save_pretrained(tmp_path / "joint")
    result = publish(tmp_path / "joint", "someone/head", *BACKBONE)
    assert result.exit_code == 1 and "1 of its tensors differ, first 'norm.weight'" in result.output
    assert "someone/head" not in hub.repositories


def test_a_dry_run_asks_nobody_for_the_backbone(hub, backbone, checkpoint):
    result = publish(checkpoint, "someone/head", *BACKBONE, "--dry-run")
    assert result.exit_code == 1 and "lab/backbone is not in the cache" in result.output and hub.requests == []
    LiLiCorrModel.from_dflash("lab/backbone")
    hub.requests.clear()
    result = publish(checkpoint, "someone/head", *BACKBONE, "--dry-run")
    assert result.exit_code == 0 and "  model.safetensors" in result.output and hub.requests == []


@pytest.mark.parametrize("options", [["--head-only"], ["--backbone", "lab/backbone"], ["--backbone-revision", "x"]])
def test_both_options_are_needed(checkpoint, options):
    result = publish(checkpoint, "someone/head", "--dry-run", *options)
    assert result.exit_code == 1 and "belong together" in result.output


def test_a_drafter_without_a_head_has_none_to_publish(hub, backbone, tmp_path):
    tiny_drafter(head_type="none", head_config={}).save_pretrained(tmp_path / "none")
    result = publish(tmp_path / "none", "someone/head", *BACKBONE)
    assert result.exit_code == 1 and "has no head to publish alone" in result.output
