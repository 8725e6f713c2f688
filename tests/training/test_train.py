import json

import pytest
import torch
from lilicorr import LiLiCorrModel
from lilicorr.training import train as train_module
from lilicorr.training.losses import Objective
from lilicorr.training.regenerate import regenerate
from lilicorr.training.settings import TrainSettings
from lilicorr.training.train import train
from safetensors.torch import load_file


@pytest.fixture(scope="module")
def answers(tmp_path_factory, target_folder):
    folder = tmp_path_factory.mktemp("answers")
    rows = [{"id": f"p{i}", "messages": [{"role": "user", "content": f"w{i} w{2 * i} w{3 * i}"}]} for i in range(16)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    regenerate(target_folder, [str(folder / "prompts.jsonl")], str(folder / "answers.jsonl"), 24, dtype="float32")
    return str(folder / "answers.jsonl")


def settings(target_folder, answers, output, **changes):
    head = {
        "num_candidates": 4, "hidden_size": 16, "num_layers": 1, "num_heads": 2, "intermediate_size": 32,
        "factor_dim": 8, "logit_scale": 8.0, "vector_eps": 1e-6,
    }  # fmt: skip
    config = {"mask_token_id": 3, "num_hidden_layers": 2}
    if changes.get("head_type", "lilicorr") == "lilicorr":
        config["head_config"] = head
    defaults = {
        "block_size": 4, "max_length": 64, "batch_size": 4, "anchors": 8, "steps": 12, "learning_rate": 5e-3,
        "head_learning_rate": 5e-3, "log_every": 4, "objective": Objective(beta=4.0), "config": config,
    }  # fmt: skip
    return TrainSettings(target=target_folder, data=[answers], output=str(output), **(defaults | changes))


def log_of(output):
    return [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]


def test_training_lowers_the_loss_and_writes_a_loadable_checkpoint(tmp_path, target_folder, answers):
    finished = train(settings(target_folder, answers, tmp_path, steps=60, log_every=10))
    log = log_of(tmp_path)
    assert log[-1]["dflash"] < 0.8 * log[0]["dflash"]
    assert log[-1]["walk_length"] >= 1 and log[-1]["oracle_length"] >= log[-1]["walk_length"]
    drafter = LiLiCorrModel.from_pretrained(finished)
    assert drafter.dtype == torch.bfloat16 and drafter.config.head_type == "lilicorr"


def test_killed_and_resumed_equals_uninterrupted_bit_for_bit(tmp_path, target_folder, answers, monkeypatch):
    whole = train(settings(target_folder, answers, tmp_path / "whole"))
    monkeypatch.setattr(train_module, "save_state", _killed_after_saving(train_module.save_state, step=5))
    with pytest.raises(KeyboardInterrupt):
        train(settings(target_folder, answers, tmp_path / "killed", save_minutes=0))
    monkeypatch.undo()
    resumed = train(settings(target_folder, answers, tmp_path / "killed"))
    ours, theirs = load_file(resumed / "model.safetensors"), load_file(whole / "model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def _killed_after_saving(save, step):
    def wrapper(directory, at, *rest):
        save(directory, at, *rest)
        if at == step:
            raise KeyboardInterrupt

    return wrapper


def test_state_of_another_run_is_refused_by_what_changed(tmp_path, target_folder, answers):
    train(settings(target_folder, answers, tmp_path, steps=2))
    with pytest.raises(ValueError, match="a run with another seed"):
        train(settings(target_folder, answers, tmp_path, steps=2, seed=1))


def test_torn_state_is_one_sentence(tmp_path, target_folder, answers):
    train(settings(target_folder, answers, tmp_path, steps=2))
    state = tmp_path / "state.safetensors"
    state.write_bytes(state.read_bytes()[:100])
    with pytest.raises(ValueError, match="cannot be read"):
        train(settings(target_folder, answers, tmp_path, steps=2))


def test_warm_start_takes_the_backbone_of_another_head(tmp_path, target_folder, answers):
    plain = train(settings(target_folder, answers, tmp_path / "none", head_type="none", steps=2))
    joint = settings(target_folder, answers, tmp_path / "joint", init=str(plain), steps=1, learning_rate=0.0)
    started = load_file(train(joint) / "model.safetensors")
    backbone = load_file(plain / "model.safetensors")
    assert all(torch.equal(started[name], backbone[name]) for name in backbone)
    assert any(name.startswith("lilicorr.") for name in started)


def test_a_loss_that_is_not_finite_names_the_batch(tmp_path, target_folder, answers):
    with pytest.raises(ValueError, match=r"The loss is nan at step 0 on \['p"):
        train(settings(target_folder, answers, tmp_path, objective=Objective(gamma=float("nan"))))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_type": "unheard-of"}, "head_type is 'unheard-of', expected one of"),
        ({"block_size": 1}, "block_size is 1"),
        ({"config": {"mask_token_id": "x"}}, "config .* cannot work"),
        ({"config": {"mask_token_id": 3, "head_config": 5}}, "config .* cannot work"),
        ({"dtype": "fp32"}, "dtype is 'fp32', expected one of float32"),
        ({"init": "absent"}, r"absent has no model\.safetensors to start from"),
    ],
)
def test_settings_that_cannot_work_are_one_sentence(tmp_path, target_folder, answers, changes, message):
    with pytest.raises(ValueError, match=message):
        train(settings(target_folder, answers, tmp_path, **changes))


def test_torn_or_foreign_start_is_one_sentence(tmp_path, target_folder, answers):
    plain = train(settings(target_folder, answers, tmp_path / "none", head_type="none", steps=1))
    wider = {"mask_token_id": 3, "num_hidden_layers": 2, "intermediate_size": 40}
    with pytest.raises(ValueError, match="start from a checkpoint of the same target"):
        train(settings(target_folder, answers, tmp_path / "o", init=str(plain), head_type="none", config=wider))
    weights = plain / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ValueError, match="cut short or damaged"):
        train(settings(target_folder, answers, tmp_path / "o", init=str(plain), head_type="none"))


def test_answers_of_a_larger_vocabulary_are_refused(tmp_path, target_folder):
    data = tmp_path / "a.jsonl"
    messages = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]
    data.write_text(json.dumps({"id": "a", "messages": messages, "output_ids": [5, 64, 7]}))
    with pytest.raises(ValueError, match=r"token id 64, which .* lacks"):
        train(settings(target_folder, str(data), tmp_path / "o", batch_size=1))
    data.write_text(json.dumps({"id": "a", "messages": messages, "output_ids": ["x"]}))
    with pytest.raises(ValueError, match="row 'a' has output_ids that are no token ids"):
        train(settings(target_folder, str(data), tmp_path / "o", batch_size=1))
