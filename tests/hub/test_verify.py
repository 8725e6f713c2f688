"""`lilicorr verify`: code that is not the release's is named, and none of it runs."""

import json
import shutil

import pytest
from lilicorr.cli import app
from lilicorr.hub.bundle import released_code
from typer.testing import CliRunner

from .conftest import tiny_drafter

BOMB = "raise SystemExit('this ran')\n"


@pytest.fixture
def folder(checkpoint, tmp_path):
    return shutil.copytree(checkpoint, tmp_path / "drafter")


def verify(*arguments):
    result = CliRunner().invoke(app, ["verify", *map(str, arguments)])
    lines = [line.split(maxsplit=1) for line in result.output.splitlines()]
    return result.exit_code, {tuple(line) for line in lines if len(line) == 2 and line[0] != "equal"}, result.output


def test_what_was_saved_here_is_equal(folder):
    code, _, output = verify(folder)
    assert code == 0
    equal = {line.split(maxsplit=1)[1] for line in output.splitlines() if line.startswith("equal ")}
    assert equal == {*released_code(), "config.json: auto_map"}
    assert f"{len(equal)} equal, 0 differing, 0 unknown, 0 missing" in output


def test_each_difference_is_named_and_nothing_runs(folder):
    (folder / "hook.py").write_text((folder / "hook.py").read_text() + BOMB)
    (folder / "custom_generate" / "generate.py").write_text(BOMB)
    (folder / "heads.py").unlink()
    for name in ("extra.py", "__init__.py", "custom_generate/more.py", "model.bin", "native.so", "sitecustomize.py"):
        (folder / name).write_text(BOMB)
    (folder / "notes.txt").write_text("harmless")
    (folder / "linked").symlink_to(folder / "custom_generate", target_is_directory=True)
    code, told, output = verify(folder)
    assert code == 1 and "this ran" not in output
    assert {line for line in told if line[0] in ("differing", "unknown", "missing")} == {
        ("differing", "hook.py"),
        ("differing", "custom_generate/generate.py"),
        ("missing", "heads.py"),
        ("unknown", "extra.py"),
        ("unknown", "__init__.py"),
        ("unknown", "custom_generate/more.py"),
        ("unknown", "model.bin"),
        ("unknown", "native.so"),
        ("unknown", "sitecustomize.py"),
        ("unknown", "linked/"),
    }
    assert "not the code of the installed release" in output


@pytest.mark.parametrize(
    ("name", "change", "kind"),
    [
        ("config.json", {"auto_map": {"AutoModel": "someone/else--modeling_lilicorr.LiLiCorrModel"}}, "differing"),
        ("config.json", {"auto_map": {"AutoModel": "hook.Other"}}, "differing"),
        ("config.json", {"custom_pipelines": {"x": {"impl": "x.X"}}}, "differing"),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["x.X", None]}}, "unknown"),
    ],
)
def test_settings_that_name_other_code_are_told(folder, name, change, kind):
    path = folder / name
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**before, **change}))
    code, told, _ = verify(folder)
    assert code == 1 and any(line[0] == kind and line[1].startswith(name) for line in told)


def test_a_repository_is_verified_without_its_weights(hub, folder, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    tiny_drafter().push_to_hub("someone/drafter")
    repository = hub.repositories["someone/drafter"]
    hub.requests.clear()
    code, _, output = verify("someone/drafter")
    assert code == 0 and f"(commit {repository.branches['main']})" in output
    assert not any("safetensors" in line and "GET" in line for line in hub.requests)
    good = repository.branches["main"]
    repository.commit("main", {**repository.files(), "hook.py": BOMB.encode(), "optimizer.pt": b"x"}, "worse")
    code, told, _ = verify("someone/drafter")
    assert code == 1 and {("differing", "hook.py"), ("unknown", "optimizer.pt")} <= told
    assert verify("someone/drafter", "--revision", good)[0] == 0


def test_names_cannot_write_to_the_terminal(folder):
    (folder / "\x1b[2Jx.py").write_text("")
    _, told, output = verify(folder)
    assert ("unknown", "?[2Jx.py") in told and "\x1b" not in output


def test_mistakes_are_one_sentence(folder, tmp_path):
    for arguments, words in (
        ((tmp_path / "absent",), "does not exist"),
        ((tmp_path,), "holds no config.json"),
        ((folder, "--revision", "main"), "is a folder; leave it out"),
    ):
        code, _, output = verify(*arguments)
        assert code == 1 and words in output and len(output.splitlines()) == 1
