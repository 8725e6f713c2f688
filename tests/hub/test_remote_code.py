"""Checkpoints in processes where this package cannot be imported."""

import json
import shutil
from pathlib import Path

import pytest
from lilicorr import LiLiCorrConfig
from safetensors.torch import load_file

from .conftest import assert_same_weights, run_clean, tiny_drafter

COMMIT = "0123456789abcdef0123456789abcdef01234567"

GENERATE = """
def generated(drafter, target):
    ids = torch.arange(5, 12)[None]
    options = dict(max_new_tokens=20, do_sample=False, pad_token_id=0)
    plain = target.generate(ids, **options)
    assisted = target.generate(ids, assistant_model=drafter, **options)
    return torch.equal(plain, assisted) and plain.shape[1] > ids.shape[1]

def without_hook(drafter, target, repository):
    sys.modules[type(drafter).__module__.rpartition(".")[0] + ".hook"].uninstall()
    ids, blocks = torch.arange(3, 15)[None], drafter.last_generation
    options = dict(max_new_tokens=20, do_sample=False, pad_token_id=0)
    assisted = target.generate(
        ids, custom_generate=repository, trust_remote_code=True, assistant_model=drafter, **options
    )
    return torch.equal(target.generate(ids, **options), assisted) and drafter.last_generation is not blocks

def triton_absent():
    try:
        import triton
    except ImportError:
        return True
"""

FROM_HUB = """
name, commit, target, resaved, snapshot = sys.argv[1:]
drafter = AutoModel.from_pretrained(name, revision=commit, trust_remote_code=True)
target = AutoModelForCausalLM.from_pretrained(target)
result = {
    "module": type(drafter).__module__,
    "lossless": generated(drafter, target),
    "blocks": drafter.last_generation.blocks,
    "triton_absent": triton_absent(),
    "without_hook": without_hook(drafter, target, snapshot),
    "attention": drafter.config._attn_implementation,
}
drafter.save_pretrained(resaved)
print(json.dumps(result))
"""

TWO_FOLDERS = """
first, second, target = sys.argv[1:]
target = AutoModelForCausalLM.from_pretrained(target)
drafters = [AutoModel.from_pretrained(name, trust_remote_code=True) for name in (first, second)]
print(json.dumps({
    "modules": [type(drafter).__module__ for drafter in drafters],
    "lossless": [generated(drafter, target) for drafter in drafters + drafters[:1]],
    "sums": [sum(p.double().abs().sum().item() for p in drafter.parameters()) for drafter in drafters],
    "inverse_frequencies": [drafter.rotary_emb.inv_freq.tolist() for drafter in drafters],
}))
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def from_hub(home, checkpoint, target_folder) -> tuple[dict, Path]:
    """A drafter from a filled Hub cache, without a network, saved again from there."""
    repository = home / "hub" / "models--someone--tiny-drafter"
    shutil.copytree(checkpoint, repository / "snapshots" / COMMIT)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    resaved = home / "resaved"
    script = GENERATE + FROM_HUB
    snapshot = repository / "snapshots" / COMMIT
    return run_clean(script, home, "someone/tiny-drafter", COMMIT, target_folder, resaved, snapshot), resaved


@pytest.fixture(scope="module")
def two_folders(home, from_hub, tmp_path_factory, target_folder) -> dict:
    other = tmp_path_factory.mktemp("other")
    tiny_drafter(seed=5, head_type="none", head_config={}).save_pretrained(other)
    # Checkpoints of two releases differ in their code: the second must not run on the first's.
    (other / "head_none.py").write_text((other / "head_none.py").read_text() + "\nRELEASE = 2\n")
    return run_clean(GENERATE + TWO_FOLDERS, home, from_hub[1], other, target_folder)


def test_what_remote_code_saves_again_is_complete(from_hub, checkpoint, two_folders):
    _, resaved = from_hub
    assert {path.name for path in resaved.iterdir()} == {path.name for path in checkpoint.iterdir()}
    for path in checkpoint.glob("*.py"):
        assert (resaved / path.name).read_bytes() == path.read_bytes(), path.name
    assert (resaved / "config.json").read_text() == (checkpoint / "config.json").read_text()
    first, again = load_file(checkpoint / "model.safetensors"), load_file(resaved / "model.safetensors")
    assert first.keys() == again.keys() and all(first[name].equal(again[name]) for name in first)
    assert two_folders["lossless"][0]


def test_a_kept_repository_loads_and_generates_offline(from_hub):
    result, _ = from_hub
    assert result["module"].startswith("transformers_modules.someone.") and COMMIT in result["module"]
    assert result["lossless"] and result["blocks"] > 0


def test_a_published_folder_decodes_without_the_hook(from_hub):
    assert from_hub[0]["without_hook"]


def test_triton_is_not_needed(from_hub):
    assert from_hub[0]["triton_absent"]


def test_two_checkpoints_with_different_code_in_one_process(two_folders):
    first, second = two_folders["modules"]
    assert first.startswith("transformers_modules.") and second.startswith("transformers_modules.") and first != second
    assert two_folders["lossless"] == [True, True, True]
    expected = [tiny_drafter(), tiny_drafter(seed=5, head_type="none", head_config={})]
    for drafter, total in zip(expected, two_folders["sums"], strict=True):
        assert total == pytest.approx(sum(p.double().abs().sum().item() for p in drafter.parameters()), rel=1e-12)


def test_buffers_that_are_not_saved_are_rebuilt_by_remote_code(two_folders):
    assert two_folders["inverse_frequencies"] == [tiny_drafter().rotary_emb.inv_freq.tolist()] * 2


def test_no_class_is_taken_from_another_repository(from_hub):
    auto_map = json.loads((from_hub[1] / "config.json").read_text())["auto_map"]
    assert set(auto_map) == {"AutoConfig", "AutoModel"}
    assert not any("--" in reference for reference in auto_map.values())


def test_the_package_itself_loads_the_same_folder(checkpoint):
    from transformers import AutoConfig, AutoModel

    assert type(AutoConfig.from_pretrained(checkpoint)) is LiLiCorrConfig
    for options in ({}, {"trust_remote_code": True}):
        drafter = AutoModel.from_pretrained(checkpoint, **options)
        assert type(drafter).__module__.startswith("lilicorr.")
        assert_same_weights(drafter, tiny_drafter())
