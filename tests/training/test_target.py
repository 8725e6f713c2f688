import json
from types import SimpleNamespace

import pytest
import torch
from lilicorr import LiLiCorrConfig
from lilicorr.training import target as target_module
from lilicorr.training.data import Example, collate
from lilicorr.training.target import TargetStates, target_pass
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

EXAMPLES = [
    Example("a", [5, 6, 7, 8, 9], [False] * 3 + [True] * 2),
    Example("b", [5, 9, 10, 11, 12, 13], [False] * 2 + [True] * 4),
]


@pytest.fixture
def target(target_folder):
    return AutoModelForCausalLM.from_pretrained(target_folder).eval()


def test_kept_states_equal_a_fresh_pass_on_every_real_row(target, tmp_path):
    batch = collate(EXAMPLES)
    fresh = TargetStates(target, [1, 3], None)(EXAMPLES, batch)
    keeping = TargetStates(target, [1, 3], tmp_path)
    for kept in (keeping(EXAMPLES, batch), keeping(EXAMPLES, batch)):
        for ours, theirs in zip(kept, fresh, strict=True):
            assert ours.shape == theirs.shape
            for row, example in enumerate(EXAMPLES):
                real = slice(0, len(example))
                torch.testing.assert_close(ours[row, real], theirs[row, real], rtol=1e-2, atol=1e-2)


def test_a_sequence_runs_through_the_target_once(target, tmp_path, monkeypatch):
    calls = []
    original = target_module.target_pass
    monkeypatch.setattr(target_module, "target_pass", lambda *a: calls.append(1) or original(*a))
    for _ in range(3):
        TargetStates(target, [1, 3], tmp_path)(EXAMPLES, collate(EXAMPLES))
    assert len(calls) == len(EXAMPLES)


def test_states_of_other_layers_are_refused(target, tmp_path):
    TargetStates(target, [1, 3], tmp_path)
    with pytest.raises(ValueError, match="another target or of other layers"):
        TargetStates(target, [1, 2], tmp_path)


def test_states_of_a_target_with_the_same_lm_head_are_refused(target, tmp_path):
    target.requires_grad_(False)
    TargetStates(target, [1, 3], tmp_path)
    TargetStates(target, [1, 3], tmp_path)
    target.model.layers[2].self_attn.v_proj.weight[5, 7] += 1
    with pytest.raises(ValueError, match="another target or of other layers"):
        TargetStates(target, [1, 3], tmp_path)


def test_a_manifest_without_a_digest_of_the_weights_is_judged_by_what_it_has(target, tmp_path):
    TargetStates(target, [1, 3], tmp_path)
    manifest = tmp_path / "manifest.json"
    older = {name: value for name, value in json.loads(manifest.read_text()).items() if name != "weights"}
    manifest.write_text(json.dumps(older))
    TargetStates(target, [1, 3], tmp_path)
    for wrong in (older | {"probe": [0.0]}, {"layer_ids": [1, 3]}, [older]):
        manifest.write_text(json.dumps(wrong))
        with pytest.raises(ValueError, match="another target or of other layers"):
            TargetStates(target, [1, 3], tmp_path)


def test_torn_kept_states_are_made_again_and_a_torn_manifest_is_refused(target, tmp_path):
    batch = collate(EXAMPLES)
    whole = TargetStates(target, [1, 3], tmp_path)(EXAMPLES, batch)
    for path in tmp_path.glob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:50])
    again = TargetStates(target, [1, 3], tmp_path)(EXAMPLES, batch)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(again, whole, strict=True))
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(ValueError, match="choose another folder"):
        TargetStates(target, [1, 3], tmp_path)


def test_the_plan_tells_the_size_of_what_is_missing(target, tmp_path, monkeypatch):
    sequences = [[5, 6, 7, 8, 9], [5, 9, 10, 11, 12, 13]]
    states = TargetStates(target, [1, 3], tmp_path)
    assert states.plan(sequences).startswith("target states: 0 of 2 sequences kept")
    states._kept(sequences[0])
    size = sum(tensor.nbytes for tensor in load_file(states._path(sequences[0])).values())
    assert states.plan(sequences).startswith("target states: 1 of 2 sequences kept")
    for free, fits in ((size // 5 * 6, True), (size // 5 * 6 - 1, False)):
        monkeypatch.setattr(target_module.shutil, "disk_usage", lambda _, free=free: SimpleNamespace(free=free))
        if fits:
            states.plan(sequences)
        else:
            with pytest.raises(ValueError, match=r"The states of 1 sequences need 0\.0 MB .* MB free; make room"):
                states.plan(sequences)


def test_taps_are_raw_layer_outputs_and_the_last_layer_which_is_seen_normed_cannot_be_one(target):
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    raw = {}
    for number, layer in enumerate(target.model.layers):
        layer.register_forward_hook(lambda module, args, out, number=number: raw.update({number: out}))
    taps, last = target_pass(target, ids, [1, 4])
    assert torch.equal(taps, torch.cat([raw[1], raw[4]], dim=-1))
    assert torch.equal(last, target.model.norm(raw[5]))
    with pytest.raises(ValueError, match="its last one is only visible after the final norm"):
        LiLiCorrConfig.for_target(target.config, mask_token_id=3, target_layer_ids=[1, 5])
