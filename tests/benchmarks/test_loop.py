import json

import pytest
import torch
import typer
from lilicorr.candidate_generator import decoding_loop
from typer.testing import CliRunner


def run(script, folders, *more):
    app = typer.Typer()
    app.command()(script.main)
    common = ["--drafter", folders / "lilicorr", "--target", folders / "target", "--dtype", "fp32", "--device", "cpu"]
    return CliRunner().invoke(app, [str(option) for option in (*common, "--max-new-tokens", 8, *more)])


def test_parts_of_a_pass_add_up_for_both_loops(script, tiny_folders, tmp_path):
    before = decoding_loop.grow_trees
    result = run(script, tiny_folders, "--prompts", 1, "--nodes", 3, "--out", tmp_path / "loop.json")
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "loop.json").read_text())
    assert report["machine"]["torch"] == torch.__version__ and report["settings"]["nodes"] == 3
    assert list(report["passes"]) == ["loop", "loop, without text", "stock loop"]
    for name, made in report["passes"].items():
        assert made["tokens"] == 7 and 1 <= made["passes"] <= 7
        assert made["target"] > 0 and made["draft"] > 0 and (made["tree"] > 0) == (name != "stock loop")
        assert made["block"] == pytest.approx(made["target"] + made["draft"] + made["tree"] + made["rest"])
        assert 0 < made["overhead"] < 1
    assert "growing trees" in result.output and "loop, without text" in result.output
    assert decoding_loop.grow_trees is before


def test_a_batch_is_decoded_beside_plain_generate(script, tiny_folders, tmp_path):
    result = run(script, tiny_folders, "--batch", 3, "--repeats", 1, "--out", tmp_path / "loop.json")
    assert result.exit_code == 0, result.output
    made = json.loads((tmp_path / "loop.json").read_text())["batch"]
    assert made["rows"] == made["equal"] == 3
    assert made["arms"]["loop"]["tokens"] == made["arms"]["plain"]["tokens"] <= 24
    assert made["ratio"] == pytest.approx(
        made["arms"]["loop"]["tokens_per_second"] / made["arms"]["plain"]["tokens_per_second"]
    )
    assert "3 rows at once, 3 equal to plain" in result.output


def test_answers_end_with_the_token_that_ends_them(script):
    assert script.answers(torch.tensor([[5, 2, 0, 0], [5, 6, 7, 8]]), {2}) == [[5, 2], [5, 6, 7, 8]]


def test_a_report_that_cannot_be_written_is_said_first(script, tiny_folders, tmp_path):
    result = run(script, tiny_folders, "--out", tmp_path)
    assert result.exit_code == 1 and "cannot be written" in " ".join(result.output.split())
