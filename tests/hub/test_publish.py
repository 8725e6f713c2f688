"""`lilicorr publish` against a Hub on loopback, and what it uploads in processes without this package."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from huggingface_hub import ModelCard, constants
from lilicorr import LiLiCorrModel
from lilicorr.cli import app
from lilicorr.evaluation.machine import fingerprint
from typer.testing import CliRunner

from .conftest import assert_same_weights, run_clean, tiny_drafter
from .fake_hub import Repository
from .test_remote_code import GENERATE

FROM_THE_HUB = """
name, revision, target = sys.argv[1:]
drafter = AutoModel.from_pretrained(name, revision=revision or None, trust_remote_code=True)
target = AutoModelForCausalLM.from_pretrained(target)
print(json.dumps({
    "lossless": generated(drafter, target),
    "module": type(drafter).__module__,
    "sum": sum(p.double().abs().sum().item() for p in drafter.parameters()),
}))
"""


def run(*arguments):
    return CliRunner().invoke(app, ["publish", *map(str, arguments)])


def published(*arguments):
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    return result.output


def refused(words, *arguments):
    result = run(*arguments)
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit), result.output
    last = result.output.strip().splitlines()[-1]
    assert words in last and last.endswith("."), result.output
    return last


def test_published_then_loaded_without_this_package_online_and_offline(hub, checkpoint, target_folder, tmp_path):
    output = published(checkpoint, "someone/drafter", "--commit-message", "First", "--max-shard-size", "30KB")
    repository = hub.repositories["someone/drafter"]
    commit = repository.branches["main"]
    assert commit in output and repository.messages[-1] == "First"
    assert "model.safetensors.index.json" in repository.files() and "model.safetensors" not in repository.files()
    script, total = GENERATE + FROM_THE_HUB, sum(p.double().abs().sum().item() for p in tiny_drafter().parameters())
    for revision, offline in (("", "0"), (commit, "1"), ("", "1")):
        known = len(hub.requests)
        arguments = (tmp_path, "someone/drafter", revision, target_folder)
        loaded = run_clean(script, *arguments, HF_ENDPOINT=hub.url, HF_HUB_OFFLINE=offline)
        assert loaded["lossless"] and loaded["module"].startswith("transformers_modules.someone.")
        assert loaded["sum"] == pytest.approx(total, rel=1e-12)
        assert (len(hub.requests) > known) is (offline == "0")


def test_push_to_hub_gives_the_same_files(hub, checkpoint):
    published(checkpoint, "someone/one")
    LiLiCorrModel.from_pretrained(checkpoint).push_to_hub("someone/two")
    one, two = (hub.repositories[f"someone/{name}"].files() for name in ("one", "two"))
    assert {**one, "README.md": b""} == {**two, "README.md": b""}
    assert one["README.md"].replace(b"someone/one", b"someone/two") == two["README.md"]


def test_a_dry_run_lists_exactly_what_is_uploaded_and_asks_nothing(hub, checkpoint):
    arguments = (checkpoint, "someone/drafter", "--max-shard-size", "30KB", "--language", "en")
    output = published(*arguments, "--dry-run")
    assert hub.requests == []
    listed = [line.split() for line in output.splitlines() if line.startswith("  ")]
    published(*arguments)
    files = hub.repositories["someone/drafter"].files()
    assert {name: int(size.replace(",", "")) for size, name in listed} == {
        name: len(content) for name, content in files.items() if name != ".gitattributes"
    }
    assert f"{len(listed)} files, " in output


def test_a_dry_run_works_offline(checkpoint, tmp_path):
    command = [sys.executable, "-m", "lilicorr", "publish", str(checkpoint), "someone/drafter", "--dry-run"]
    environment = {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9", "HOME": str(tmp_path), "PATH": ""}
    environment |= {name: value for name, value in os.environ.items() if name == "USE_HUB_KERNELS"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 0 and "  model.safetensors\n" in done.stdout, done.stderr
    done = subprocess.run(command[:-1], env=environment, capture_output=True, text=True, cwd=tmp_path, timeout=300)
    assert done.returncode == 1 and "HF_HUB_OFFLINE is set" in done.stderr


def test_a_dropped_connection_is_tried_again(hub, checkpoint):
    hub.drops = 2
    published(checkpoint, "someone/drafter")
    assert len(hub.stored()) == 3 and "model.safetensors" in hub.repositories["someone/drafter"].files()


def test_an_upload_that_broke_off_sends_only_what_is_missing(hub, checkpoint, tmp_path):
    hub.down = 2
    arguments = (checkpoint, "someone/drafter", "--max-shard-size", "30KB")
    last = refused("give the same command again, which goes on with what is missing", *arguments)
    assert "The connection broke while uploading to someone/drafter" in last
    repository = hub.repositories["someone/drafter"]
    assert set(repository.files()) == {".gitattributes"}  # nothing of a half upload is seen
    hub.down, arrived = None, set(hub.blobs)
    hub.requests.clear()
    published(*arguments)
    sent = {line.removeprefix("PUT /lfs/") for line in hub.stored()}
    assert len(arrived) >= 2 and sent and not sent & arrived and sent | arrived == set(hub.blobs)
    loaded = LiLiCorrModel.from_pretrained("someone/drafter", cache_dir=tmp_path)
    assert_same_weights(loaded, tiny_drafter())


def test_private_branches_and_revisions(hub, checkpoint, tmp_path, monkeypatch):
    published(checkpoint, "someone/drafter", "--private", "--branch", "trial")
    repository = hub.repositories["someone/drafter"]
    assert repository.private and set(repository.files()) == {".gitattributes"}
    loaded = LiLiCorrModel.from_pretrained("someone/drafter", revision="trial", cache_dir=tmp_path)
    assert_same_weights(loaded, tiny_drafter())
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(OSError, match="someone/drafter"):
        LiLiCorrModel.from_pretrained("someone/drafter", revision="trial", cache_dir=tmp_path / "stranger")


def test_a_public_repository_is_not_taken_for_a_private_one(hub, checkpoint):
    hub.repositories["someone/drafter"] = Repository(private=False)
    refused("is there already and is public; make it private", checkpoint, "someone/drafter", "--private")
    assert hub.repositories["someone/drafter"].messages == ["initial commit"]


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"config.json": b'{"model_type": "llama"}'}, "(a model of type 'llama')"),
        ({"config.json": b"torn"}, "(config.json and no drafter's config.json)"),
        ({"pytorch_model.bin": b"x", "README.md": b""}, "(pytorch_model.bin and no drafter's config.json)"),
    ],
)
def test_a_repository_of_another_kind_is_refused(hub, checkpoint, files, words):
    repository = hub.repositories["someone/else"] = Repository(private=False)
    repository.files().update(files)
    refused(f"someone/else holds something else than a drafter {words}", checkpoint, "someone/else")
    assert repository.messages == ["initial commit"] and hub.stored() == []
    with pytest.raises(ValueError, match="holds something else than a drafter"):
        tiny_drafter().push_to_hub("someone/else")


@pytest.mark.parametrize("settings", [{"model_type": "lilicorr"}, {"model_type": "qwen3", "dflash_config": {}}])
def test_a_repository_of_a_drafter_is_taken(hub, checkpoint, settings):
    repository = hub.repositories["someone/drafter"] = Repository(private=False)
    repository.files()["config.json"] = json.dumps(settings).encode()
    published(checkpoint, "someone/drafter")
    assert "modeling_lilicorr.py" in repository.files()


def test_mistakes_are_one_sentence(hub, checkpoint, tmp_path):
    refused("is no folder; give the folder of a drafter", tmp_path / "absent", "someone/drafter")
    refused("is no name of a repository", checkpoint, "a/b/c")
    refused("holds no config.json", tmp_path, "someone/drafter")
    hub.close()
    refused("is out of reach; connect to publish, or try --dry-run", checkpoint, "someone/drafter")


def report(weights: str) -> dict:
    arms = {
        "mine": {"over_seeds": {"acceptance_length": {"median": 3.14159}, "speed_up": {"median": 1.5}}},
        "plain": {"over_seeds": {}},
    }
    return {
        "settings": {"drafters": {"mine": {"weights": weights}}, "plan": {"max_new_tokens": 64}},
        "temperatures": {"0": {"all": {"sets": {"gsm8k": {"arms": arms}}}}},
    }


def test_the_card_holds_metadata_results_and_limits(hub, checkpoint, tmp_path):
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report(fingerprint(checkpoint, None))))
    options = ("--license", "mit", "--language", "en", "--language", "de", "--dataset", "org/prompts", "--tag", "mine")
    published(checkpoint, "someone/drafter", "--results", path, *options)
    card = ModelCard(hub.repositories["someone/drafter"].files()["README.md"].decode())
    data = card.data
    assert (data.license, data.language, data.datasets) == ("mit", ["en", "de"], ["org/prompts"])
    assert (data.library_name, data.pipeline_tag) == ("transformers", "text-generation") and "mine" in data.tags
    measured = {result.metric_type: result for result in data.eval_results}
    assert measured["acceptance_length"].metric_value == 3.142 and measured["speed_up"].metric_value == 1.5
    assert measured["speed_up"].dataset_name == "gsm8k"
    assert measured["speed_up"].dataset_args == {"temperature": 0.0, "max_new_tokens": 64}
    for words in (
        "| gsm8k | temperature 0.0, max_new_tokens 64 | 3.142 | 1.5 |",
        "## Limits",
        "lilicorr verify someone",
    ):
        assert words in card.text


def test_results_of_other_weights_are_refused(hub, checkpoint, tmp_path):
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report("other")))
    refused("holds figures of other weights (mine)", checkpoint, "someone/drafter", "--results", path)
    path.write_text("[]")
    refused("is no report of `lilicorr evaluate`", checkpoint, "someone/drafter", "--results", path)


def test_a_card_of_somebodys_own_is_published(hub, checkpoint, tmp_path):
    folder = tmp_path / "mine"
    shutil.copytree(checkpoint, folder)
    (folder / "README.md").write_text("# mine\n")
    (folder / "notes.json").write_text("{}")
    published(folder, "someone/drafter")
    files = hub.repositories["someone/drafter"].files()
    assert files["README.md"] == b"# mine\n" and "notes.json" not in files


def test_a_checkpoint_with_broken_weights_is_not_published(hub, tmp_path):
    drafter = tiny_drafter()
    with torch.no_grad():
        drafter.norm.weight[0] = float("nan")
    drafter.save_pretrained(tmp_path)
    refused("holds NaN or infinite values", tmp_path, "someone/drafter")
    assert "someone/drafter" not in hub.repositories and hub.url == constants.ENDPOINT
