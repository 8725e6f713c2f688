import json

import pytest
import torch
import typer
from lilicorr.modeling_lilicorr.head_settings import HEAD_TYPES
from typer.testing import CliRunner

SMALL = ["--hidden", "64", "--vocab", "97", "--block-size", "4", "--repeats", "2", "--device", "cpu", "--dtype", "fp32"]


def run(script, *arguments):
    app = typer.Typer()
    app.command()(script.main)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_every_head_is_measured_against_lilicorr(script, tmp_path):
    result = run(script, *SMALL, "--out", tmp_path / "heads.json")
    assert result.exit_code == 0, result.output
    heads = json.loads((tmp_path / "heads.json").read_text())["heads"]
    assert list(heads) == list(HEAD_TYPES)
    base = heads["lilicorr"]["milliseconds"]["called"]
    for name, made in heads.items():
        assert made["to_base"]["called"] == pytest.approx(made["milliseconds"]["called"] / base)
        assert f"| {name} " in result.output
    assert heads["lilicorr"]["to_base"]["called"] == 1.0


def test_heads_have_the_papers_sizes(script):
    # At 4096 with 151,936 words: the counts that the papers give (specs of each head).
    for name, millions in {"domino": 55.93, "dspark": 77.80, "xpress": 80.54, "dcoco": 2.23, "none": 0.0}.items():
        with torch.device("meta"):
            head = script.fresh_head(name, 4096, 151936, 16, torch.bfloat16, torch.device("meta"))
        assert sum(parameter.numel() for parameter in head.parameters()) / 1e6 == pytest.approx(millions, abs=0.01)


def test_a_device_that_is_not_there_is_one_sentence(script):
    result = run(script, "--device", "meta")
    assert result.exit_code == 1 and "cannot be used here" in result.output
