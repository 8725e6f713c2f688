import json

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from lilicorr import LiLiCorrConfig, LiLiCorrModel
from lilicorr.training import train as train_module
from lilicorr.training.checkpoint import kept_states
from lilicorr.training.losses import lilicorr as loss_module
from lilicorr.training.losses.terms import Objective
from lilicorr.training.sources import training_examples
from lilicorr.training.tally import Tally
from lilicorr.training.train import train
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoTokenizer, LlamaConfig


def log_of(output):
    return [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]


def test_training_lowers_the_loss_and_writes_a_loadable_checkpoint(tmp_path, make_settings):
    finished = train(make_settings(tmp_path, steps=60, log_every=10))
    log = log_of(tmp_path)
    assert log[-1]["dflash"] < 0.8 * log[0]["dflash"]
    assert log[-1]["walk_length"] >= 1 and log[-1]["oracle_length"] >= log[-1]["walk_length"]
    drafter = LiLiCorrModel.from_pretrained(finished)
    assert drafter.dtype == torch.bfloat16 and drafter.config.head_type == "lilicorr"
    data = drafter.config.training_data
    assert data["sequences"] == 16 and data["tokens"] > 0 and data["template_options"] == {}


def test_warm_start_takes_the_backbone_of_another_head(tmp_path, make_settings):
    plain = train(make_settings(tmp_path / "none", head_type="none", steps=2))
    joint = make_settings(tmp_path / "joint", init=str(plain), steps=1, learning_rate=0.0)
    started = load_file(train(joint) / "model.safetensors")
    backbone = load_file(plain / "model.safetensors")
    assert all(torch.equal(started[name], backbone[name]) for name in backbone)
    assert any(name.startswith("lilicorr.") for name in started)


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_batch(tmp_path, make_settings, monkeypatch):
    right = train_module.JointObjective.loss
    monkeypatch.setattr(train_module.JointObjective, "loss", lambda self, *given: right(self, *given) * float("nan"))
    with pytest.raises(ValueError, match=r"The loss is nan at step 0 on p\d+, .* \(nonfinite-step-00000000.json names"):
        train(make_settings(tmp_path))
    told = json.loads((tmp_path / "nonfinite-step-00000000.json").read_text())
    assert told["step"] == 0 and len(told["ids"]) == 4 and all(name.startswith("p") for name in told["ids"])
    assert kept_states(tmp_path) == [] and not (tmp_path / "checkpoint").exists()


def test_a_gradient_that_is_not_finite_never_reaches_the_weights(tmp_path, make_settings, monkeypatch):
    poisoned = []

    def loss(self, *arguments):
        value = JointObjective_loss(self, *arguments)
        poisoned.append(value)
        return value * torch.tensor(float("inf")) if len(poisoned) == 6 else value  # a backward pass of the third step

    JointObjective_loss = train_module.JointObjective.loss
    monkeypatch.setattr(train_module.JointObjective, "loss", loss)
    with pytest.raises(ValueError, match=r"The gradient norm is .* at step 2 "):
        train(make_settings(tmp_path, save_every=1))
    assert [path.name for path in kept_states(tmp_path)] == ["step-00000002.safetensors", "step-00000001.safetensors"]
    with safe_open(kept_states(tmp_path)[0], framework="pt") as file:
        assert all(file.get_tensor(name).isfinite().all() for name in file.keys())  # noqa: SIM118 (no mapping)


def test_accumulated_batches_equal_one_batch_in_value_and_gradients(tmp_path, make_settings, monkeypatch):
    seen = {}

    def clip(self, parameters, *rest):
        seen.setdefault("gradients", []).append([p.grad.clone() for p in parameters])
        return torch.tensor(1.0)

    monkeypatch.setattr(Accelerator, "clip_grad_norm_", clip)
    for micro in (0, 2, 1):
        train(make_settings(tmp_path / str(micro), micro_batch_size=micro, steps=1, log_every=1))
    whole, halves, quarters = seen["gradients"]
    for parts in (halves, quarters):
        for ours, theirs in zip(parts, whole, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-6)
    lines = [log_of(tmp_path / str(micro))[0] for micro in (0, 2, 1)]
    for name in ("dflash", "cross_entropy", "distractor", "walk_length", "blocks"):
        assert lines[1][name] == pytest.approx(lines[0][name], rel=1e-5), name
        assert lines[2][name] == pytest.approx(lines[0][name], rel=1e-5), name


def test_slots_sampled_by_sequence_accumulate_alike(tmp_path, make_settings):
    sampled = Objective(beta=2.0, sample_slots=True)
    for micro in (0, 1):
        train(make_settings(tmp_path / str(micro), micro_batch_size=micro, steps=2, log_every=1, objective=sampled))
    for whole, parts in zip(log_of(tmp_path / "0"), log_of(tmp_path / "1"), strict=True):
        assert parts["dflash"] == pytest.approx(whole["dflash"], rel=1e-4)


def test_a_batch_that_cannot_be_shared_out_is_one_sentence(tmp_path, make_settings):
    with pytest.raises(ValueError, match=r"batch_size is 4, expected a multiple of 1 \(processes\) times 3"):
        train(make_settings(tmp_path, micro_batch_size=3))


def test_masters_and_moments_are_fp32_in_bf16_training_and_after_resuming(tmp_path, make_settings):
    AcceleratorState._reset_state(True)  # one process, one precision: this test has its own
    try:
        train(make_settings(tmp_path, mixed_precision="bf16", steps=2, save_every=1))
        assert_all_fp32(tmp_path, step=1)
        kept_states(tmp_path)[0].unlink()
        train(make_settings(tmp_path, mixed_precision="bf16", steps=2))
        assert_all_fp32(tmp_path, step=2)
    finally:
        AcceleratorState._reset_state(True)


def assert_all_fp32(output, step):
    with safe_open(output / "resume" / f"step-{step:08d}.safetensors", framework="pt") as file:
        kinds = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118 (no mapping)
    assert {kind for name, kind in kinds.items() if name.startswith("model.")} == {"F32"}
    moments = {name: kind for name, kind in kinds.items() if name.endswith(("exp_avg", "exp_avg_sq"))}
    assert len(moments) == 2 * sum(name.startswith("model.") for name in kinds) and set(moments.values()) == {"F32"}


def test_the_mask_token_is_a_row_of_the_target_and_ends_no_text(tmp_path, make_settings):
    bad = {"mask_token_id": 64, "num_hidden_layers": 2}
    with pytest.raises(ValueError, match=r"mask_token_id 64 is not a row of the target's embedding \(0 … 63\)"):
        train(make_settings(tmp_path, config=bad, head_type="none"))
    config = LlamaConfig(vocab_size=64, num_hidden_layers=6, pad_token_id=2, eos_token_id=2)
    settings = make_settings(tmp_path, config={}, head_type="none")
    tokenizer = AutoTokenizer.from_pretrained(settings.target)
    with pytest.raises(ValueError, match=r"row of .* is in use .* \(--set config\.mask_token_id=ID\)"):
        training_examples(settings, tokenizer, config, Tally())


def test_a_frozen_backbone_keeps_its_weights_and_the_head_learns(tmp_path, make_settings):
    plain = train(make_settings(tmp_path / "none", head_type="none", steps=1))
    finished = train(make_settings(tmp_path / "head", init=str(plain), freeze_backbone=True, steps=8, log_every=1))
    before, after = load_file(plain / "model.safetensors"), load_file(finished / "model.safetensors")
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    log = log_of(tmp_path / "head")
    assert log[-1]["cross_entropy"] < log[0]["cross_entropy"]


def test_every_parameter_has_a_gradient_where_no_slot_is_covered(tmp_path, make_settings, monkeypatch):
    # Processes wait for the gradient of every parameter: a head without any would stop them for good.
    nothing = lambda candidates, labels, supervised: (torch.zeros_like(supervised), torch.zeros_like(labels))  # noqa: E731
    monkeypatch.setattr(loss_module, "oracle_prefix", nothing)
    missing = []

    def clip(self, parameters, *rest):
        missing.extend(p for p in parameters if p.grad is None)
        return torch.tensor(1.0)

    monkeypatch.setattr(Accelerator, "clip_grad_norm_", clip)
    train(make_settings(tmp_path, steps=1))
    assert missing == []


def test_trackers_are_used_by_name_and_unknown_ones_refused(tmp_path, make_settings):
    with pytest.raises(ValueError, match=r"There is no tracker 'pencil'; give one of .*tensorboard, "):
        train(make_settings(tmp_path, trackers=["pencil"]))
    pytest.importorskip("tensorboard")
    train(make_settings(tmp_path, steps=1, trackers=["tensorboard"]))
    assert list((tmp_path / "trackers").rglob("events.*"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_type": "unheard-of"}, "head_type is 'unheard-of', expected one of"),
        ({"block_size": 1}, "block_size is 1"),
        ({"config": {"mask_token_id": "x"}}, "mask_token_id is 'x', expected a whole number"),
        ({"config": {"mask_token_id": 3, "head_config": 5}}, "head_config is 5, expected the head's settings by name"),
        (
            {"head_type": "none", "config": {"head_config": {"num_candidates": None}}},
            "num_candidates is None, expected 1",
        ),
        ({"dtype": "int3"}, "dtype is 'int3', expected one of auto, fp32"),
        ({"compile": "magic"}, "compile is 'magic', expected 'no' or one of"),
        ({"init": "absent"}, r"absent has no model\.safetensors to start from"),
    ],
)
def test_settings_that_cannot_work_are_one_sentence(tmp_path, make_settings, changes, message):
    with pytest.raises(ValueError, match=message):
        train(make_settings(tmp_path, **changes))


def test_our_own_errors_are_not_said_to_be_the_recipes(tmp_path, make_settings, monkeypatch):
    def broken(*_, **__):
        raise AttributeError("a bug of ours")

    monkeypatch.setattr("lilicorr.training.train.LiLiCorrModel", broken)
    with pytest.raises(AttributeError, match="a bug of ours"):
        train(make_settings(tmp_path))
    monkeypatch.setattr(LiLiCorrConfig, "for_target", broken)
    with pytest.raises(AttributeError, match="a bug of ours"):
        train(make_settings(tmp_path))


def test_torn_or_foreign_start_is_one_sentence(tmp_path, make_settings):
    plain = train(make_settings(tmp_path / "none", head_type="none", steps=1))
    wider = {"mask_token_id": 3, "num_hidden_layers": 2, "intermediate_size": 40}
    with pytest.raises(ValueError, match="start from a checkpoint of the same target"):
        train(make_settings(tmp_path / "o", init=str(plain), head_type="none", config=wider))
    weights = plain / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])
    with pytest.raises(ValueError, match="cut short or damaged"):
        train(make_settings(tmp_path / "o", init=str(plain), head_type="none"))


def test_answers_of_a_larger_vocabulary_are_refused(tmp_path, make_settings):
    data = tmp_path / "a.jsonl"
    messages = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2"}]
    data.write_text(json.dumps({"id": "a", "messages": messages, "output_ids": [5, 64, 7]}))
    with pytest.raises(ValueError, match=r"token id 64, which .* lacks"):
        train(make_settings(tmp_path / "o", data=[str(data)], batch_size=1))
    data.write_text(json.dumps({"id": "a", "messages": messages, "output_ids": ["x"]}))
    with pytest.raises(ValueError, match="row 'a' has output_ids that are no token ids"):
        train(make_settings(tmp_path / "o", data=[str(data)], batch_size=1))
