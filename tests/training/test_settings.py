import re
from pathlib import Path

import pytest
from lilicorr.training import settings as settings_module
from lilicorr.training.settings import TrainSettings
from lilicorr.training.train import drafter_config
from transformers import LlamaConfig

RECIPES = sorted((Path(settings_module.__file__).parent / "recipes").rglob("*.yaml"))
TRAIN = Path(__file__).parents[2] / "docs" / "train.md"
REQUIRED = {"target": "t", "data": ["d"], "output": "o"}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_in_the_repository_reads(path):
    settings = TrainSettings.from_recipe(path, **REQUIRED)
    assert isinstance(settings.learning_rate, float) and settings.objective.beta > 0


def test_the_arms_of_a_stage_differ_in_the_head_only():
    arms = [TrainSettings.from_recipe(p, **REQUIRED).identity() for p in RECIPES if p.stem.startswith("4-")]
    assert len(arms) == 3
    differing = {key for arm in arms for key in arm if arm[key] != arms[0][key]}
    assert differing == {"head_type", "head_learning_rate", "config"}
    assert len({arm["config"].pop("head_config", None) is None for arm in arms}) == 2
    assert all(arm["config"] == arms[0]["config"] for arm in arms)


def test_every_setting_that_the_documentation_shows_makes_a_drafter():
    rows = re.findall(r"^\| (`(?:config|objective)\..*?`) \|", TRAIN.read_text("utf-8"), re.MULTILINE)
    assert len(rows) == 6
    target = LlamaConfig(hidden_size=576, num_attention_heads=9, num_key_value_heads=3, num_hidden_layers=30)
    plain = TrainSettings.from_recipe("smollm2-135m-cpu/4-lilicorr", **REQUIRED)
    for row in rows:
        changes = re.findall(r"`(.*?)`", row)
        settings = TrainSettings.from_recipe("smollm2-135m-cpu/4-lilicorr", changes=changes, **REQUIRED)
        assert settings != plain, row
        drafter_config(settings, target, 32000)


def test_options_win_over_the_file(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("steps: 5\nobjective: {gamma: 0.5}\n")
    settings = TrainSettings.from_recipe(path, **REQUIRED, steps=7)
    assert settings.steps == 7 and settings.objective.gamma == 0.5 and settings.objective.penalty == 1.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("step: 5", "sets 'step'; did you mean steps?"),
        ("wings: 5", "sets 'wings', which is none of target"),
        ("mask_token_id: 5", "sets 'mask_token_id', which is config.mask_token_id: --set config.mask_token_id=…"),
        ("penalty: 5", "which is objective.penalty"),
        ("num_candidates: 5", "which is config.head_config.num_candidates"),
        ("objective: {delta: 1}", "sets 'delta'; did you mean beta?"),
        ("- 1", "holds list, expected a mapping"),
        ("a: [", "is not valid YAML"),
        ("steps: abc", "steps is 'abc', expected int"),
        ("learning_rate: 6e-4", r"learning_rate is '6e-4', expected float \(YAML needs a point"),
        ("betas: [0.9]", "betas is"),
        ("from_target: 1", "from_target is 1, expected bool"),
        ("objective: 3", "sets objective to 3, expected a mapping"),
        ("objective: {beta: x}", "beta is 'x', expected float"),
        ("batch_size: 0", "batch_size is 0, expected 1 or more"),
        ("steps: -1", "steps is -1, expected a finite number, 0 or more"),
        ("learning_rate: .inf", "learning_rate is inf, expected a finite number"),
        ("head_weight_decay: .nan", "head_weight_decay is nan, expected a finite number, 0 or more"),
        ("head_weight_decay: -0.1", "head_weight_decay is -0.1"),
        ("clip: .nan", "clip is nan, expected a gradient norm above 0"),
        ("clip: -1.0", "clip is -1.0"),
        ("final_rate: .nan", "final_rate is nan, expected a share from 0 to 1"),
        ("final_rate: 1.5", "final_rate is 1.5"),
        ("warmup: .nan", "warmup is nan, expected a share from 0 to 1"),
        ("warmup: 2", "warmup is 2, expected a share"),
        ("objective: {beta: .inf}", r"objective\.beta is inf, expected a finite number"),
        ("objective: {gamma: .nan}", r"objective\.gamma is nan"),
        ("objective: {rho: -.inf}", r"objective\.rho is -inf"),
        ("objective: {head: {rho: .nan}}", r"objective\.head\.rho is nan, expected a finite number"),
        ("objective: {head: {rho: x}}", r"objective\.head\.rho is 'x'"),
        ("objective: {head: {rho: true}}", r"objective\.head\.rho is True"),
        ("config: {blok: 4}", "config sets 'blok'"),
        ("config: {head_type: none}", "head_type stands in config"),
        ("mixed_precision: fp8", "mixed_precision is 'fp8'"),
    ],
)
def test_a_bad_recipe_is_one_sentence(tmp_path, text, message):
    path = tmp_path / "r.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        TrainSettings.from_recipe(path, **REQUIRED)


def test_missing_essentials_are_named(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("steps: 5")
    with pytest.raises(ValueError, match="does not set data, output"):
        TrainSettings.from_recipe(path, target="t")


def test_data_given_as_text_is_refused(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("data: answers.jsonl")
    with pytest.raises(ValueError, match=r"data is 'answers\.jsonl', expected list\[str\]"):
        TrainSettings.from_recipe(path, target="t", output="o")


@pytest.mark.parametrize("name,kept", [("fp32", "float32"), ("bf16", "bfloat16"), ("fp16", "float16")])
def test_dtypes_are_kept_as_older_states_hold_them(name, kept):
    assert TrainSettings(**REQUIRED, dtype=name).identity() == TrainSettings(**REQUIRED, dtype=kept).identity()
    assert TrainSettings(**REQUIRED, dtype=name).dtype == kept
    assert TrainSettings(**REQUIRED, dtype="auto").dtype in ("float32", "bfloat16")
