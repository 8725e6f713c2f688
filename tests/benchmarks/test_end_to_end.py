import json
import shutil

import pytest
import torch
import typer
from typer.testing import CliRunner


@pytest.fixture
def data(tmp_path):
    folder = tmp_path / "eval"
    folder.mkdir()
    for name, count in (("maths", 4), ("chat", 1)):
        turns = [[{"role": "system", "content": "s"}, {"role": "user", "content": f"{name} {i}"}] for i in range(count)]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"messages": turn}) + "\n" for turn in turns))
    return folder


def run(script, *arguments):
    app = typer.Typer()
    app.command()(script.main)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_report_of_a_tiny_run(script, data, tiny_folders, tmp_path):
    drafters = [f"--drafter={name}={tiny_folders / name}" for name in ("lilicorr", "none")]
    common = ["--target", tiny_folders / "target", "--data", data, "--dtype", "fp32", "--device", "cpu"]
    result = run(script, *drafters, *common, "--prompts", 3, "--max-new-tokens", 12, "--out", tmp_path / "report.json")
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["settings"]["prompts"] == 3 and report["machine"]["torch"] == torch.__version__
    assert set(report["sets"]) == {"maths", "chat"} and report["sets"]["maths"]["answers"] == 2
    for arm in ("lilicorr", "none"):
        figures = report["all"]["arms"][arm]
        assert figures["equal"] == 3 and figures["largest_logit_gap"] is None
        assert 1 <= figures["acceptance_length"] <= 5
        assert figures["acceptance_length"] == pytest.approx(1 + sum(figures["acceptance_by_slot"]))
        assert set(figures["milliseconds_per_pass"]) == {"draft", "target"}
    assert report["without_loops"]["answers"] == sum(not row["loops"] for row in report["rows"])
    assert "without loops" in result.output and "equal to plain" in result.output


def test_a_drafter_that_adapts_also_runs_with_whole_blocks(script, data, tiny_folders, tmp_path):
    folder = tmp_path / "paced"
    shutil.copytree(tiny_folders / "none", folder)
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"draft_lengths": "adaptive"}))
    common = ["--target", tiny_folders / "target", "--data", data, "--dtype", "fp32", "--device", "cpu"]
    result = run(script, f"--drafter=none={folder}", *common, "--prompts", 2, "--out", tmp_path / "report.json")
    assert result.exit_code == 0, result.output
    arms = json.loads((tmp_path / "report.json").read_text())["all"]["arms"]
    assert list(arms) == ["plain", "none", "none, whole blocks"]
    assert arms["none"]["equal"] == arms["none, whole blocks"]["equal"] == 2
    assert arms["none, whole blocks"]["drafted_per_pass"] > 3 > arms["none"]["drafted_per_pass"]


def test_prompts_come_from_every_file_in_turn(script, data):
    chosen = script.choose_prompts(data, 4, seed=0)
    assert [name for name, _ in chosen] == ["chat", "maths", "maths", "maths"]
    assert len(set(chosen)) == 4 and all(turn.startswith(name) for name, turn in chosen)
    assert chosen == script.choose_prompts(data, 4, seed=0)


def test_missing_data_says_where_to_get_prompts(script, tmp_path):
    with pytest.raises(SystemExit, match=r"no \*\.jsonl files; give --data"):
        script.choose_prompts(tmp_path / "absent", 4, seed=0)


def test_broken_line_is_named(script, data):
    (data / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n{"messages": [\n')
    with pytest.raises(SystemExit, match=r"chat\.jsonl line 2"):
        script.choose_prompts(data, 4, seed=0)


@pytest.mark.parametrize("text", ["folder", "=folder", "name=", "plain=folder"])
def test_drafters_are_named(script, text):
    with pytest.raises(SystemExit, match="name=folder"):
        script._named([text])


def test_empty_and_foreign_files_and_content_that_is_no_text(script, tmp_path):
    file = tmp_path / "a.jsonl"
    for content, message in (
        (b"\n", "hold no rows"),
        (b"\xff\xfe", "is not UTF-8"),
        (b'{"messages": [{"role": "user", "content": 5}]}', "line 1 is not a JSON object with messages"),
    ):
        file.write_bytes(content)
        with pytest.raises(SystemExit, match=message):
            script.choose_prompts(tmp_path, 4, seed=0)


def test_a_report_that_cannot_be_written_and_twin_names_are_said_first(script, data, tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path, tmp_path / "file" / "report.json"):
        result = run(script, "--drafter", "a=b", "--data", data, "--out", out)
        assert result.exit_code == 1 and "cannot be written" in " ".join(result.output.split())
    result = run(script, "--drafter", "a=b", "--drafter", "a=c", "--data", data)
    assert result.exit_code == 1 and "share a name" in result.output
