import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import HfApi, ModelCard
from huggingface_hub.errors import EntryNotFoundError
from lilicorr import LiLiCorrConfig, LiLiCorrModel
from lilicorr.hub.card import model_card
from transformers import AutoModel, PreTrainedModel
from transformers.utils.hub import PushToHubMixin

from .conftest import assert_same_weights, tiny_config, tiny_drafter


@pytest.fixture
def hub(monkeypatch):
    """Stands in for the Hub: `uploads` holds, for each commit, its arguments and the files it would carry."""
    state = SimpleNamespace(uploads=[], repositories=[], branches=[], has_card=False)

    def create_repo(self, repo_id, **options):
        state.repositories.append((repo_id, options))
        return SimpleNamespace(repo_id=repo_id)

    def upload_folder(self, *, folder_path, allow_patterns, ignore_patterns, **options):
        from huggingface_hub.utils import filter_repo_objects

        found = [path.relative_to(folder_path).as_posix() for path in Path(folder_path).rglob("*") if path.is_file()]
        files = set(filter_repo_objects(found, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns))
        card = os.path.join(folder_path, "README.md")
        options["card"] = Path(card).read_text() if "README.md" in files else None
        state.uploads.append((options, files))
        return "commit info"

    def create_commit(self, repo_id, operations, **options):
        state.uploads.append(({"repo_id": repo_id, **options}, {each.path_in_repo for each in operations}))

    monkeypatch.setattr(HfApi, "create_repo", create_repo)
    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    monkeypatch.setattr(HfApi, "create_commit", create_commit)
    monkeypatch.setattr(HfApi, "create_branch", lambda self, repo_id, branch, **_: state.branches.append(branch))
    monkeypatch.setattr(HfApi, "file_exists", lambda self, *_, **__: state.has_card)
    return state


def test_values_equal_the_file_and_buffers_are_rebuilt(checkpoint):
    saved = tiny_drafter()
    loaded = LiLiCorrModel.from_pretrained(checkpoint)
    assert_same_weights(loaded, saved)
    assert torch.equal(loaded.rotary_emb.inv_freq, saved.rotary_emb.inv_freq)
    unsaved = {name for name, _ in loaded.named_buffers()} - loaded.state_dict().keys()
    assert unsaved == {"rotary_emb.inv_freq", "rotary_emb.original_inv_freq"}

    class Subclass(LiLiCorrModel):
        pass

    assert_same_weights(Subclass.from_pretrained(checkpoint), saved)


@pytest.mark.parametrize("head_type", ["none", "lilicorr"])
def test_a_drafter_is_built_on_the_meta_device(head_type):
    head_config = {} if head_type == "none" else tiny_config().head_config
    with torch.device("meta"):
        model = LiLiCorrModel(tiny_config(head_type=head_type, head_config=head_config))
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_configuration_cannot_choose_code(checkpoint, tmp_path):
    settings = json.loads((checkpoint / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes((checkpoint / "model.safetensors").read_bytes())
    for key in ("_attn_implementation", "attn_implementation", "_attn_implementation_internal"):
        (tmp_path / "config.json").write_text(json.dumps({**settings, key: "someone/kernel"}))
        for load in (LiLiCorrModel.from_pretrained, AutoModel.from_pretrained):
            assert load(tmp_path).config._attn_implementation == "sdpa", key
            assert load(tmp_path, attn_implementation="eager").config._attn_implementation == "eager", key


def test_the_card_pins_a_commit():
    card = model_card(tiny_config(target_model="org/target"), repo_id="someone/drafter")
    assert 'from_pretrained("someone/drafter", revision="<commit>", trust_remote_code=True)' in card
    data = ModelCard(card).data
    assert (data.library_name, data.license, data.base_model) == ("transformers", "apache-2.0", "org/target")
    assert "lilicorr" in data.tags
    assert ModelCard(model_card(tiny_config())).data.base_model is None


def test_the_card_tells_the_thinking_mode_and_the_data(tmp_path):
    data = {"tokens": 1234567, "sequences": 890, "revision": "abc", "template_options": {"enable_thinking": False}}
    config = tiny_config(training_data={**data, "decoding": {"temperature": 0.7}})
    card = model_card(config)
    assert "| Chat template options | `enable_thinking=false`; serve with the same |" in card
    assert "1,234,567 tokens of answers in 890 sequences" in card and "sampled at temperature 0.7" in card
    config.save_pretrained(tmp_path)
    assert LiLiCorrConfig.from_pretrained(tmp_path).training_data == config.training_data
    assert "Learned from" not in model_card(tiny_config())
    assert "the template's defaults" in model_card(tiny_config(training_data={"template_options": {}}))


def test_push_uploads_the_repository_and_nothing_else(hub):
    assert (
        tiny_drafter().push_to_hub("someone/drafter", commit_message="First", private=True, tags=["mine"])
        == "commit info"
    )
    ((options, files),) = hub.uploads
    assert {"model.safetensors", "config.json", "README.md", "modeling_lilicorr.py", "hook.py"} <= files
    assert "custom_generate/generate.py" in files
    assert all(name.endswith((".py", ".json", ".safetensors")) or name == "README.md" for name in files)
    assert (options["repo_id"], options["commit_message"]) == ("someone/drafter", "First")
    assert 'from_pretrained("someone/drafter"' in options["card"] and "- mine\n" in options["card"]
    assert hub.repositories == [("someone/drafter", {"private": True, "exist_ok": True})]


def test_push_while_saving_leaves_private_files_at_home(hub, tmp_path):
    (tmp_path / "optimizer.pt").write_text("x")
    (tmp_path / "notes.txt").write_text("x")
    tiny_drafter().save_pretrained(tmp_path, push_to_hub=True, repo_id="someone/drafter", revision="try")
    ((options, files),) = hub.uploads
    assert not {"optimizer.pt", "notes.txt"} & files and "model.safetensors" in files
    assert options["revision"] == "try" and hub.branches == ["try"]


def test_push_keeps_the_card_that_is_on_the_hub(hub):
    hub.has_card = True
    tiny_drafter().push_to_hub("someone/drafter")
    assert "README.md" not in hub.uploads[0][1]


def test_push_through_transformers_own_method_is_complete(hub, monkeypatch, checkpoint):
    def load(*_, **__):
        raise EntryNotFoundError("no card yet")

    monkeypatch.setattr(ModelCard, "load", load)
    PushToHubMixin.push_to_hub(tiny_drafter(), "someone/drafter")
    written = {path.relative_to(checkpoint).as_posix() for path in checkpoint.rglob("*") if path.is_file()}
    assert hub.uploads[0][1] == written


def test_saving_leaves_no_traces_and_keeps_what_it_does_not_own(tmp_path):
    (tmp_path / "README.md").write_text("mine")
    drafter = tiny_drafter()
    drafter.save_pretrained(tmp_path, max_shard_size="10KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert_same_weights(LiLiCorrModel.from_pretrained(tmp_path), drafter)
    other = tiny_drafter(seed=3)
    other.save_pretrained(tmp_path)
    assert [path.name for path in tmp_path.glob("*.safetensors*")] == ["model.safetensors"]
    assert_same_weights(LiLiCorrModel.from_pretrained(tmp_path), other)
    assert (tmp_path / "README.md").read_text() == "mine"
    assert not list(tmp_path.glob(".*"))


def test_a_save_that_dies_leaves_the_earlier_one(tmp_path, monkeypatch):
    drafter = tiny_drafter()
    drafter.save_pretrained(tmp_path)

    def die(self, folder, **_):
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", die)
    with pytest.raises(KeyboardInterrupt):
        tiny_drafter(seed=3).save_pretrained(tmp_path)
    monkeypatch.undo()
    assert_same_weights(LiLiCorrModel.from_pretrained(tmp_path), drafter)


def test_saving_to_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match="is a file; give the name of a folder"):
        tiny_drafter().save_pretrained(tmp_path / "file")


def test_only_the_main_process_writes(tmp_path):
    tiny_drafter().save_pretrained(tmp_path / "out", is_main_process=False)
    assert not (tmp_path / "out").exists()


def test_dtype_is_the_checkpoints_unless_asked(tmp_path):
    tiny_drafter().to(torch.bfloat16).save_pretrained(tmp_path)
    assert LiLiCorrModel.from_pretrained(tmp_path).dtype == torch.bfloat16
    assert LiLiCorrModel.from_pretrained(tmp_path, dtype=torch.float32).dtype == torch.float32


def test_saved_configuration_names_no_local_path(checkpoint, tmp_path):
    LiLiCorrModel.from_pretrained(checkpoint).save_pretrained(tmp_path)
    assert str(checkpoint) not in (tmp_path / "config.json").read_text() + (tmp_path / "README.md").read_text()
