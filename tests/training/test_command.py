import json
import sys

import pytest
import torch
import yaml
from lilicorr.cli import app
from lilicorr.training import command
from lilicorr.training.settings import TrainSettings
from safetensors import SafetensorError
from safetensors.torch import load_file
from typer.testing import CliRunner

runner = CliRunner()


def train(*arguments):
    return runner.invoke(app, ["train", *map(str, arguments)])


@pytest.fixture
def arguments(tmp_path, make_settings, write_recipe):
    settings = make_settings(tmp_path / "run", steps=2, log_every=1)
    recipe = write_recipe(tmp_path / "r.yaml", settings)
    return [recipe, "--data", settings.data[0], "--output", settings.output, "--target", settings.target]


def test_training_says_where_the_checkpoint_is_and_options_win(arguments, tmp_path):
    result = train(*arguments, "--steps", 1)
    assert result.exit_code == 0, result.output
    assert f"The log is written to {tmp_path / 'run' / 'log.jsonl'}." in result.output
    assert f"checkpoint in {tmp_path / 'run' / 'checkpoint'}" in result.output.replace("\n", "")
    assert len((tmp_path / "run" / "log.jsonl").read_text().splitlines()) == 1


def test_one_recipe_trains_every_head_from_any_seed(arguments, tmp_path):
    weights = {}
    for name, options in {"a": [], "b": ["--seed", 0], "c": ["--seed", 5], "d": ["--head", "none"]}.items():
        arguments[4] = tmp_path / name
        assert train(*arguments, "--steps", 1, *options).exit_code == 0
        weights[name] = load_file(tmp_path / name / "checkpoint" / "model.safetensors")
    assert torch.equal(weights["a"]["fc.weight"], weights["b"]["fc.weight"])  # the recipe's seed is 0
    assert not torch.equal(weights["a"]["fc.weight"], weights["c"]["fc.weight"])
    assert any(name.startswith("lilicorr.") for name in weights["a"])
    assert not any(name.startswith("lilicorr.") for name in weights["d"])


def test_a_recipe_names_only_what_differs_of_a_heads_settings(arguments, tmp_path):
    recipe = yaml.safe_load(arguments[0].read_text())
    recipe["config"]["head_config"] = {"residual": True, "num_candidates": 3}
    arguments[0].write_text(yaml.safe_dump(recipe))
    assert train(*arguments, "--steps", 1).exit_code == 0
    head = json.loads((tmp_path / "run" / "checkpoint" / "config.json").read_text())["head_config"]
    assert head["residual"] is True and head["num_candidates"] == 3 and head["logit_scale"] == 8.0
    recipe["config"]["head_config"] = {"layers": 3}
    arguments[0].write_text(yaml.safe_dump(recipe))
    arguments[4] = tmp_path / "other"
    result = train(*arguments)
    assert (
        result.exit_code == 1
        and "head_config sets 'layers', but the head lilicorr takes num_candidates" in result.output
    )


def test_any_setting_of_a_recipe_can_be_set(arguments, tmp_path):
    assert train(*arguments, "--set", "config.head_config.num_candidates=3", "--set", "anchors=2").exit_code == 0
    saved = json.loads((tmp_path / "run" / "checkpoint" / "config.json").read_text())["head_config"]
    assert saved["num_candidates"] == 3
    run = TrainSettings.from_recipe(
        arguments[0], changes=["objective.penalty=0", "betas=[0.5, 0.9]"], target="t", data=["d"], output="o"
    )
    assert run.objective.penalty == 0 and run.betas == [0.5, 0.9]
    for change, said in {
        "penalty": "--set takes NAME=VALUE such as objective.penalty=0, got 'penalty'",
        "objective.=1": "--set takes NAME=VALUE",
        "anchors.x=1": "no mapping of settings",
        "betas=[": "is not valid YAML",
        "objective.wings=1": "sets 'wings', which is none of",
        "config.width=3": "config sets 'width', which is no argument",
    }.items():
        result = train(*arguments, "--set", change)
        assert result.exit_code == 1 and said in result.output.replace("\n", " "), result.output


def test_a_dry_run_prints_and_leaves_nothing(arguments, tmp_path):
    result = train(*arguments, "--dry-run")
    assert result.exit_code == 0, result.output
    for word in ("Parameters: target", "GiB", "2 steps of 4 sequences", "⟦"):
        assert word in result.output
    assert not (tmp_path / "run").exists()


def test_the_recipes_target_is_used_where_none_is_given(arguments, monkeypatch):
    monkeypatch.setattr(command, "smollm2", lambda: "absent/target")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    result = train(*arguments[:-2], "--dry-run")
    assert result.exit_code == 1 and "The target absent/target could not be loaded" in result.output
    result = train("qwen3-8b", *arguments[1:-2], "--dry-run")
    assert result.exit_code == 1 and "The target Qwen/Qwen3-8B could not be loaded" in result.output


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["gpt-9"], "There is no recipe gpt-9; give a YAML file or one of qwen3-4b"),
        (["smollm2-135m-cpu"], "The recipe smollm2-135m-cpu has several stages"),
    ],
)
def test_unknown_recipes_are_one_sentence(arguments, change, message):
    result = train(*change, *arguments[1:])
    assert result.exit_code == 1 and message in result.output and "Traceback" not in result.output


def test_a_missing_file_is_one_sentence_with_the_process_it_came_from(arguments, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    arguments[2] = "absent.jsonl"
    result = train(*arguments, "--dry-run")
    assert result.exit_code == 1
    assert "process 1: absent.jsonl: No such file or directory; give another path." in result.output


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("can't allocate memory:\nyou tried 8 TB"), "you tried 8 TB; --dry-run says how much it needs."),
        (RuntimeError("shapes\ndo not fit"), "The run failed: shapes do not fit"),
        (SafetensorError("header too large"), "The run failed: header too large"),
    ],
)
def test_a_run_that_fails_inside_a_library_is_one_sentence(arguments, monkeypatch, error, said):
    def fail(settings):
        raise error

    monkeypatch.setattr("lilicorr.training.train.train", fail)
    result = train(*arguments)
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit) and said in result.output


def test_missing_packages_are_named(arguments, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    for name in ("settings", "dry_run", "train"):
        monkeypatch.delitem(sys.modules, f"lilicorr.training.{name}", raising=False)
    result = train(*arguments)
    assert result.exit_code == 1 and "Training needs yaml: pip install 'lilicorr[train]'." in result.output
