"""A killed run loses nothing: states, signals, full disks."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext

import pytest
import torch
from lilicorr.training import checkpoint as checkpoint_module
from lilicorr.training import train as train_module
from lilicorr.training.checkpoint import kept_states, load_state, save_state
from lilicorr.training.interruption import Interrupted, Signals
from lilicorr.training.train import train
from safetensors.torch import load_file


def log_of(output):
    lines = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in ("unix_time", "tokens_per_second")} for line in lines]


def assert_same_run(ours, theirs):
    """Weights, moments and log, bit for bit."""
    a, b = load_file(ours / "checkpoint" / "model.safetensors"), load_file(theirs / "checkpoint" / "model.safetensors")
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    a, b = load_file(kept_states(ours)[0]), load_file(kept_states(theirs)[0])
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    assert log_of(ours) == log_of(theirs)


def start(recipe, settings, *more):
    command = [sys.executable, "-m", "lilicorr.training", str(recipe), "--data", settings.data[0]]
    command += ["--output", settings.output, "--target", settings.target, *more]
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def wait_for_state(process, output, step, seconds=600):
    """Until a state of at least `step` is there."""
    for _ in range(seconds * 100):
        states = kept_states(output)
        if states and int(states[0].stem.removeprefix("step-")) >= step:
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    raise AssertionError("no state came")


def test_a_run_killed_at_a_random_step_and_resumed_equals_an_uninterrupted_one(tmp_path, make_settings, write_recipe):
    options = {"steps": 60, "save_every": 3, "log_every": 4}
    whole, killed = make_settings(tmp_path / "whole", **options), make_settings(tmp_path / "killed", **options)
    process = start(write_recipe(tmp_path / "r.yaml", killed), killed)
    wait_for_state(process, tmp_path / "killed", step=int(torch.randint(3, 30, ())))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL and not (tmp_path / "killed" / "checkpoint").exists()
    train(killed)
    train(whole)
    assert_same_run(tmp_path / "killed", tmp_path / "whole")


def test_sigterm_saves_the_step_and_says_how_to_go_on(tmp_path, make_settings, write_recipe):
    settings = make_settings(tmp_path / "run", steps=5000, save_every=1, log_every=1000)
    process = start(write_recipe(tmp_path / "r.yaml", settings), settings)
    wait_for_state(process, tmp_path / "run", step=2)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=600)
    assert process.returncode == 128 + signal.SIGTERM and "Traceback" not in said
    saved = int(kept_states(tmp_path / "run")[0].stem.removeprefix("step-"))
    assert f"Stopped by SIGTERM after step {saved}, which is saved; give the same command to go on." in said


def test_an_interrupted_run_goes_on_bit_for_bit_without_a_step_to_save_at(tmp_path, make_settings, monkeypatch):
    steps_done = []
    one_step = train_module._one_step

    def counted(run, step, flags):
        steps_done.append(step)
        if len(steps_done) == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return one_step(run, step, flags)

    train(make_settings(tmp_path / "whole"))
    monkeypatch.setattr(train_module, "_one_step", counted)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted, match="after step 7, which is saved"):  # noticed when the next step begins
        train(make_settings(tmp_path / "stopped"))
    assert signal.getsignal(signal.SIGTERM) is before
    train(make_settings(tmp_path / "stopped"))
    assert steps_done == list(range(12))
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")


@pytest.fixture
def usual_sigint():
    """Ctrl-C as in a terminal, whatever started the tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_second_signal_acts_at_once(usual_sigint, capfd):
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.number == signal.SIGINT
        said = "SIGINT: stops after this step, once it is saved; a second SIGINT aborts."
        assert capfd.readouterr().err.strip() == said
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_an_ignored_signal_stays_ignored(usual_sigint):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with Signals() as signals:
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.number == 0


def test_a_full_disk_is_one_sentence_and_the_older_state_goes_on(tmp_path, make_settings, monkeypatch):
    train(make_settings(tmp_path / "whole", log_every=1))
    save_file = checkpoint_module.save_file

    def full(tensors, path, metadata):
        if metadata["step"] == "8":
            path.write_bytes(b"half a file")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save_file(tensors, path, metadata=metadata)

    monkeypatch.setattr(checkpoint_module, "save_file", full)
    settings = make_settings(tmp_path / "full", save_every=2, log_every=1)
    with pytest.raises(
        OSError,
        match=r"The state of step 8 \(\d+\.\d MB\) .*No space left on device.*step-00000006.* is kept to go on from",
    ):
        train(settings)
    assert sorted(p.name for p in (tmp_path / "full" / "resume").iterdir()) == [
        "step-00000004.safetensors",
        "step-00000006.safetensors",
    ]
    monkeypatch.undo()
    train(settings)
    assert_same_run(tmp_path / "full", tmp_path / "whole")


def test_only_the_latest_states_are_kept(tmp_path, make_settings):
    train(make_settings(tmp_path, save_every=2, keep_states=3))
    assert [path.name for path in kept_states(tmp_path)] == [
        f"step-000000{step}.safetensors" for step in (12, 10, "08")
    ]


def test_what_does_not_change_weights_may_change_on_resuming(tmp_path, make_settings):
    train(make_settings(tmp_path, save_every=6))
    kept_states(tmp_path)[0].unlink()
    train(make_settings(tmp_path, micro_batch_size=2, log_every=3, gradient_checkpointing=True, keep_states=1))
    assert [path.name for path in kept_states(tmp_path)] == ["step-00000012.safetensors"]


def test_state_of_another_run_is_refused_by_what_changed(tmp_path, make_settings, answers):
    train(make_settings(tmp_path, steps=2))
    with pytest.raises(ValueError, match="a run with another seed"):
        train(make_settings(tmp_path, steps=2, seed=1))
    fewer = tmp_path / "fewer.jsonl"
    with open(answers) as lines:
        fewer.write_text("".join(list(lines)[:8]))
    with pytest.raises(ValueError, match="a run with another data"):
        train(make_settings(tmp_path, steps=2, data=[str(fewer)]))


@pytest.mark.parametrize(("data", "refused"), [("a-b", False), ("a", False), ("a-c", True), ("c", True), ("c-b", True)])
def test_a_state_is_of_the_same_data_by_tokens_or_an_older_one_by_lengths(tmp_path, data, refused):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    save_state(tmp_path, 3, model, optimizer, {"seed": 0, "data": data}, {}, keep=1)
    with pytest.raises(ValueError, match="a run with another data") if refused else nullcontext():
        assert load_state(tmp_path, model, optimizer, {"seed": 0, "data": "a-b"})[0] == 3


def test_torn_state_is_one_sentence_and_the_one_before_it_resumes(tmp_path, make_settings):
    train(make_settings(tmp_path, steps=2, save_every=1))
    state = kept_states(tmp_path)[0]
    state.write_bytes(state.read_bytes()[:100])
    with pytest.raises(ValueError, match=r"cannot be read .*; delete it to resume from the state before it"):
        train(make_settings(tmp_path, steps=2))
    state.unlink()
    train(make_settings(tmp_path, steps=2))
    for path in kept_states(tmp_path):
        path.unlink()
    (tmp_path / "state.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="a state in an older format"):
        train(make_settings(tmp_path, steps=2))


def test_a_torn_log_line_and_lines_behind_the_state_go(tmp_path, make_settings):
    train(make_settings(tmp_path / "whole", log_every=1))
    settings = make_settings(tmp_path / "run", log_every=1, save_every=4)
    train(settings)
    kept_states(tmp_path / "run")[0].unlink()
    with open(tmp_path / "run" / "log.jsonl", "a") as log:
        log.write('{"step": 13, "dfl')
    train(settings)
    assert [line["step"] for line in log_of(tmp_path / "run")] == list(range(1, 13))
    assert log_of(tmp_path / "run") == log_of(tmp_path / "whole")


def test_a_log_without_a_state_is_kept_aside(tmp_path, make_settings):
    (tmp_path / "log.jsonl").write_text('{"step": 3}\n')
    train(make_settings(tmp_path, steps=1))
    assert (tmp_path / "log.jsonl.old").read_text() == '{"step": 3}\n' and len(log_of(tmp_path)) == 1
