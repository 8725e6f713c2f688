import json

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
    for arm in ("lilicorr", "none", "lilicorr, chain", "none, without text"):
        figures = report["all"]["arms"][arm]
        assert figures["equal"] == 3 and figures["largest_logit_gap"] is None
        assert 1 <= figures["acceptance_length"] <= 5
        assert figures["acceptance_length"] <= 1 + sum(figures["acceptance_by_slot"])
        assert set(figures["milliseconds_per_pass"]) == {"draft", "target"}
    assert report["without_loops"]["answers"] == sum(not row["loops"] for row in report["rows"])
    assert "without loops" in result.output and "equal to plain" in result.output


def test_arms_answer_alike_and_leave_the_drafter_as_it_was(script, data, tiny_folders, tmp_path, monkeypatch):
    loaded, load = [], script.load_pair
    monkeypatch.setattr(script, "load_pair", lambda *given, **more: loaded.append(load(*given, **more)) or loaded[-1])
    common = ["--target", tiny_folders / "target", "--data", data, "--dtype", "fp32", "--device", "cpu", "--nodes", 3]
    result = run(
        script, f"--drafter=none={tiny_folders / 'none'}", *common, "--prompts", 2, "--max-new-tokens", 24,
        "--out", tmp_path / "report.json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    arms = json.loads((tmp_path / "report.json").read_text())["all"]["arms"]
    assert list(arms) == [
        "plain", "prompt lookup 3", "prompt lookup 10", "none", "none, chain", "none, without text"
    ]  # fmt: skip
    assert all(figures["equal"] == 2 for figures in arms.values())
    assert arms["plain"]["tokens_per_pass"] == 1
    assert all(figures["tokens_per_pass"] >= 1 for figures in arms.values())
    assert arms["none"]["drafted_per_pass"] <= 3 < arms["none, chain"]["drafted_per_pass"] <= 4
    drafter = loaded[0].drafters["none"].config
    assert (drafter.decoding, drafter.lookup, drafter.max_nodes) == ("auto", True, None)


def test_arms_are_chosen(script, data, tiny_folders, tmp_path):
    common = ["--target", tiny_folders / "target", "--data", data, "--dtype", "fp32", "--device", "cpu"]
    drafter = f"--drafter=none={tiny_folders / 'none'}"
    chosen = ["--arms", "tree without text", "--arms", "prompt lookup 3", "--prompts", 1, "--max-new-tokens", 8]
    result = run(script, drafter, *common, *chosen, "--out", tmp_path / "report.json")
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert list(report["all"]["arms"]) == ["plain", "prompt lookup 3", "none, without text"]
    assert set(report["rows"][0]["arms"]["none, without text"]["stages"]) == {"prefill", "draft", "target"}
    result = run(script, drafter, *common, "--arms", "vines")
    assert result.exit_code == 1 and "There is no arm 'vines'" in " ".join(result.output.split())


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


def test_drafters_are_named(script, data):
    result = run(script, "--drafter", "folder", "--data", data)
    assert result.exit_code == 1 and "name=folder" in " ".join(result.output.split())


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
