import json

import pytest
import typer
from lilicorr.training.losses.terms import Objective
from lilicorr.training.settings import TrainSettings
from transformers import AutoTokenizer
from typer.testing import CliRunner


@pytest.fixture
def target(tiny_folders, tmp_path):
    """The tiny target with a chat template."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_folders / "target")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] + '.' }}{% endfor %}"
    folder = tmp_path / "target"
    folder.mkdir()
    for file in (tiny_folders / "target").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def answers(tmp_path):
    path = tmp_path / "answers.jsonl"
    rows = [
        {
            "id": f"r{i}",
            "messages": [{"role": "user", "content": f"question {i}"}, {"role": "assistant", "content": "a"}],
            "output_ids": [(7 * i + 3 * j) % 250 for j in range(30)],
        }
        for i in range(20)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def settings(target, answers, output, **changes):
    given = {
        "target": target, "data": [answers], "output": str(output), "states": str(output), "block_size": 4,
        "config": {"mask_token_id": 260}, "anchors": 8, "batch_size": 2, "max_length": 60, "max_examples": 16,
        "objective": Objective(),
    }  # fmt: skip
    return TrainSettings(**(given | changes))


def test_stages_add_up_to_the_step_and_blocks_are_counted(script, target, answers, tmp_path):
    figures = script.measure(settings(target, answers, tmp_path / "run"), steps=3)
    assert figures["blocks"] == 3 * 2 * 8
    assert 0.9 < sum(figures["stages"].values()) / figures["seconds"] <= 1.0
    assert 0 < figures["products"] < 1 and figures["peak"] > figures["added"] >= 0


def command_of(script):
    app = typer.Typer()
    app.command()(script.main)
    return app


def test_a_line_for_every_number_of_anchors(script, target, answers, monkeypatch):
    asked = []
    made_up = {
        "seconds": 2.0, "stages": dict.fromkeys(script.STAGES, 0.5), "blocks": 30, "steps": 4, "products": 0.6,
        "peak": 3 * 2**20, "added": 2**20,
    }  # fmt: skip
    monkeypatch.setattr(script, "in_own_process", lambda given, steps: asked.append(given) or made_up)
    options = ["--data", answers, "--target", target, "--anchors", "8", "--anchors", "16", "--at-once", "4"]
    result = CliRunner().invoke(command_of(script), options)
    assert result.exit_code == 0, result.output
    assert [given.anchors for given in asked] == [8, 16] and all(given.blocks_at_once == 4 for given in asked)
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in result.output.splitlines() if "%" in line]
    assert lines[0] == ["8", "15.0", "500", "25 %", "25 %", "25 %", "25 %", "60 %", "3", "1"]


def test_unusable_data_is_one_sentence(script, target, tmp_path):
    (tmp_path / "broken.jsonl").write_text("{\n")
    result = CliRunner().invoke(command_of(script), ["--data", str(tmp_path / "broken.jsonl"), "--target", target])
    assert result.exit_code == 1
    said = " ".join(result.output.split())
    assert "No usable answer in" in said and "not JSON: 1" in said and "broken.jsonl line 1" in said
