"""A run that diverges: nothing broken is saved, and what is said is so."""

import json

import pytest
import torch
from lilicorr.cli import app
from lilicorr.training import train as train_module
from lilicorr.training.checkpoint import kept_states, save_state
from lilicorr.training.log import StepLog
from lilicorr.training.train import train
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner


def finite(path):
    return all(tensor.isfinite().all() for tensor in load_file(path).values() if tensor.is_floating_point())


def breaking_at(step, monkeypatch):
    """Updates of this step leave NaN in a weight, though loss and gradients are finite."""
    one_step = train_module.set_rates

    def rates(optimizer, share):
        rates.calls += 1
        one_step(optimizer, float("nan") if rates.calls == step + 1 else share)

    rates.calls = 0
    monkeypatch.setattr(train_module, "set_rates", rates)


@pytest.mark.parametrize("save_every", [1, 0])
def test_an_update_that_breaks_weights_ends_the_run_and_is_never_saved(tmp_path, make_settings, save_every):
    with pytest.raises(ValueError, match=r"The drafter after the update is not finite at step 0 on p\d+, .*; look at"):
        train(make_settings(tmp_path, learning_rate=1e39, save_every=save_every, steps=3))
    assert kept_states(tmp_path) == [] and not (tmp_path / "checkpoint").exists()
    assert len(json.loads((tmp_path / "nonfinite-step-00000000.json").read_text())["ids"]) == 4


def test_the_last_update_is_looked_at_too(tmp_path, make_settings, monkeypatch):
    breaking_at(2, monkeypatch)
    with pytest.raises(ValueError, match="at step 2 "):
        train(make_settings(tmp_path, steps=3))
    assert not (tmp_path / "checkpoint").exists()


def test_what_there_is_to_go_on_from_is_said_and_is_there(tmp_path, make_settings, monkeypatch):
    breaking_at(3, monkeypatch)
    with pytest.raises(ValueError, match=r"step 3 .*: step-00000002\.safetensors is kept to go on from; look at"):
        train(make_settings(tmp_path / "kept", save_every=2))
    assert finite(kept_states(tmp_path / "kept")[0])
    breaking_at(3, monkeypatch)
    with pytest.raises(ValueError, match=r"step 3 .*: no state was saved before; look at"):
        train(make_settings(tmp_path / "none"))
    monkeypatch.undo()
    train(make_settings(tmp_path / "kept", save_every=2))
    assert list((tmp_path / "kept").glob("nonfinite-*")) == []  # it is over with
    assert finite(tmp_path / "kept" / "checkpoint" / "model.safetensors")


def test_moments_that_overflow_are_not_saved(tmp_path, make_settings, monkeypatch):
    looked = train_module.state_tensors

    def overflowing(model, optimizer):
        for name, tensor in looked(model, optimizer):
            yield name, tensor * torch.inf if name.endswith("exp_avg_sq") else tensor

    monkeypatch.setattr(train_module, "state_tensors", overflowing)
    with pytest.raises(ValueError, match="after the update is not finite at step 1 "):
        train(make_settings(tmp_path, save_every=2))
    assert kept_states(tmp_path) == []


def test_a_broken_state_of_before_is_named_and_the_one_before_it_resumes(tmp_path, make_settings):
    settings = make_settings(tmp_path, steps=3, save_every=1)
    train(settings)
    state = kept_states(tmp_path)[0]
    broken = load_file(state)
    name = next(name for name in broken if name.startswith("model."))
    broken[name].view(-1)[0] = torch.nan
    with safe_open(state, framework="pt") as file:
        metadata = file.metadata()
    save_file(broken, state, metadata=metadata)
    with pytest.raises(
        ValueError, match=rf"{state.name} holds numbers in {name} that are not finite; delete it to res"
    ):
        train(settings)
    state.unlink()
    train(settings)
    assert finite(tmp_path / "checkpoint" / "model.safetensors")


def test_the_sentence_stands_on_a_line_of_its_own(tmp_path, make_settings, write_recipe):
    settings = make_settings(tmp_path / "run", learning_rate=1e39, steps=3)
    recipe = write_recipe(tmp_path / "r.yaml", settings)
    arguments = ["--data", settings.data[0], "--output", settings.output, "--target", settings.target]
    result = CliRunner().invoke(app, ["train", str(recipe), *arguments])
    assert result.exit_code == 1
    told = [line for line in result.output.splitlines() if "not finite" in line]
    assert len(told) == 1 and told[0].startswith("The drafter after the update is not finite at step 0 on p")


def test_a_log_that_cannot_be_written_says_whether_there_is_a_state(tmp_path, make_settings):
    (tmp_path / "log.jsonl").mkdir()
    log = StepLog(tmp_path)
    log.add({"blocks": torch.tensor(1.0)})
    with pytest.raises(OSError, match=r"line of step 1 .*; no state was saved before: make room"):
        log.flush(1)
    model = torch.nn.Linear(1, 1)
    save_state(tmp_path, 1, model, torch.optim.AdamW(model.parameters()), {}, {}, keep=1)
    with pytest.raises(OSError, match=r"step-00000001\.safetensors is kept to go on from"):
        log.flush(2)
