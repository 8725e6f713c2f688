import re

import lilicorr.cli
import pytest
import torch
from lilicorr import LiLiCorrConfig, LiLiCorrModel
from lilicorr.cli import app
from lilicorr.evaluation.blocks import draw_block
from lilicorr.evaluation.compare import answer, decoding_options, encode, find_difference
from lilicorr.evaluation.drawing import comparison_table
from lilicorr.evaluation.loading import LoadingError, load_pair, resolve_dtype
from lilicorr.hub.targets import TargetUnavailableError
from transformers import LlamaConfig
from typer.testing import CliRunner

runner = CliRunner()


@pytest.fixture
def folders(tiny_folders):
    return tiny_folders


def generate(*arguments, target, drafter):
    return runner.invoke(app, ["generate", "--target", str(target), "--drafter", str(drafter), *map(str, arguments)])


def assert_one_sentence(result, *words):
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output
    said = " ".join(result.output.split())
    for word in words:
        assert word in said


@pytest.mark.parametrize("head", ["lilicorr", "none"])
def test_generate_shows_table_and_block(folders, head, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(lilicorr.cli.console, "width", 200)
    options = ["--prompt", "abc", "--prompt", "hello", "--max-new-tokens", 24, "--dtype", "fp32", "--device", "cpu"]
    result = generate(*options, target=folders / "target", drafter=folders / head)
    assert result.exit_code == 0, result.output
    assert "assisted" in result.output and "acceptance" in result.output
    assert "2 of 2 equal" in result.output
    assert "one block: the walk" in result.output
    assert re.search(r"\d of 4 drafts accepted", result.output)


def test_generate_samples_without_claiming_equality(folders):
    options = ["--prompt", "abc", "--max-new-tokens", 6, "--temperature", 1.0, "--dtype", "fp32", "--device", "cpu"]
    result = generate(*options, target=folders / "target", drafter=folders / "lilicorr")
    assert result.exit_code == 0, result.output
    assert "sampled" in result.output and "equal" not in result.output


def test_generate_with_one_token_draws_no_block(folders):
    options = ["--prompt", "abc", "--max-new-tokens", 1, "--device", "cpu"]
    result = generate(*options, target=folders / "target", drafter=folders / "lilicorr")
    assert result.exit_code == 0, result.output
    assert "one block: the walk" not in result.output


def test_missing_folders_are_named(folders, tmp_path):
    absent = tmp_path / "absent"
    assert_one_sentence(generate(target=absent, drafter=folders / "none"), "absent does not exist")
    assert_one_sentence(generate(target=folders / "target", drafter=absent), "The drafter folder", "does not exist")
    (tmp_path / "empty").mkdir()
    assert_one_sentence(generate(target=folders / "target", drafter=tmp_path / "empty"), "holds no config.json")


def test_swapped_target_and_drafter_is_said(folders):
    result = generate(target=folders / "target", drafter=folders / "target")
    assert_one_sentence(result, "not a drafter")


def test_wrong_dtype_is_one_sentence(folders):
    result = generate("--dtype", "int3", target=folders / "target", drafter=folders / "none")
    assert_one_sentence(result, "int3", "fp32, bf16")


def test_a_target_of_another_kind_of_json_is_one_sentence(folders, tmp_path):
    (tmp_path / "config.json").write_text("[]")
    for file in (folders / "target").glob("token*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    result = generate("--device", "cpu", target=tmp_path, drafter=folders / "none")
    assert_one_sentence(result, "could not be loaded")


def test_a_temperature_too_low_to_divide_by_is_one_sentence(folders):
    result = generate("--temperature", 1e-320, "--device", "cpu", target=folders / "target", drafter=folders / "none")
    assert_one_sentence(result, "temperature is 1e-320, expected 0, which is greedy")


def test_another_targets_drafter_is_one_sentence(folders, tmp_path):
    narrow = {"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "pad_token_id": 3}
    target = LlamaConfig(num_hidden_layers=5, num_attention_heads=4, **narrow)
    other = LiLiCorrConfig.for_target(target, num_hidden_layers=1, block_size=4)
    LiLiCorrModel(other).save_pretrained(tmp_path / "other")
    result = generate("--prompt", "a", target=folders / "target", drafter=tmp_path / "other")
    assert_one_sentence(result, "100")


def test_torn_drafter_is_one_sentence(folders, tmp_path):
    torn = tmp_path / "torn"
    torn.mkdir()
    for file in (folders / "lilicorr").iterdir():
        if file.is_file():
            data = file.read_bytes()
            (torn / file.name).write_bytes(data[: len(data) // 2] if file.suffix == ".safetensors" else data)
    assert_one_sentence(generate(target=folders / "target", drafter=torn), "could not be loaded")


def test_demo_without_checkpoint(tmp_path):
    assert_one_sentence(runner.invoke(app, ["demo", "--drafter", str(tmp_path / "none")]), "does not exist")


def test_demo_offline(folders, monkeypatch):
    def offline():
        raise TargetUnavailableError("pip could not download it: set LILICORR_SMOLLM2.")

    monkeypatch.setattr(lilicorr.cli, "smollm2", offline)
    result = runner.invoke(app, ["demo", "--drafter", str(folders / "lilicorr")])
    assert_one_sentence(result, "LILICORR_SMOLLM2")


def test_demo_runs_on_any_prepared_target(folders, monkeypatch):
    monkeypatch.setattr(lilicorr.cli, "smollm2", lambda: folders / "target")
    arguments = ["demo", "--drafter", str(folders / "lilicorr"), "--prompt", "xyz", "--max-new-tokens", "8"]
    result = runner.invoke(app, [*arguments, "--dtype", "fp32", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert "1 of 1 equal" in " ".join(result.output.split())


def test_drawn_block_agrees_with_the_answer(folders):
    pair = load_pair(folders / "target", {"d": folders / "lilicorr"}, dtype="fp32", device="cpu")
    inputs = encode(pair.tokenizer, "abcdef", pair.target.device)
    said = answer(pair.target, inputs, **decoding_options(32)).token_ids
    block = draw_block(pair.target, pair.drafters["d"], inputs, said)
    assert block is not None and len(block.token_ids) == 4
    assert block.token_ids[: block.accepted] == block.answer_ids[: block.accepted]
    picked = block.lattice.candidates[0].gather(-1, block.lattice.picks[0, :, None]).squeeze(-1)
    assert tuple(picked.tolist()) == block.token_ids


def test_stage_clock_leaves_nothing_behind(folders):
    pair = load_pair(folders / "target", {"d": folders / "none"}, dtype="fp32", device="cpu")
    drafter, target = pair.drafters["d"], pair.target
    run = answer(target, encode(pair.tokenizer, "abc", target.device), drafter, stages=True, **decoding_options(12))
    assert 0 < run.stages["draft"] < run.seconds and 0 < run.stages["target"] < run.seconds
    assert "draft" not in vars(drafter) and not target._forward_hooks and not target._forward_pre_hooks
    assert run.trace is not None and run.trace.accepted + run.trace.blocks < len(run.token_ids) == run.trace.new_tokens


def test_difference_reports_the_logit_gap(folders):
    pair = load_pair(folders / "target", {}, dtype="fp32", device="cpu")
    inputs = encode(pair.tokenizer, "abc", pair.target.device)
    said = answer(pair.target, inputs, **decoding_options(5)).token_ids
    other = (*said[:3], (said[3] + 1) % 256, *said[4:])
    found = find_difference(pair.target, inputs, said, other)
    assert found is not None and found.index == 3 and found.logit_gap is not None and found.logit_gap > 0
    shorter = find_difference(pair.target, inputs, said, said[:2])
    assert shorter is not None and (shorter.index, shorter.logit_gap) == (2, None)
    assert find_difference(pair.target, inputs, said, said) is None


def test_auto_dtype_follows_the_hardware(monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setattr("lilicorr.hub.precision._cpu_has", lambda check: False)
    assert resolve_dtype("auto", cpu) is torch.float32 and resolve_dtype("bf16", cpu) is torch.bfloat16
    monkeypatch.setattr("lilicorr.hub.precision._cpu_has", lambda check: "amx" in check)
    assert resolve_dtype("auto", cpu) is torch.bfloat16 and resolve_dtype("fp32", cpu) is torch.float32
    with pytest.raises(LoadingError, match="fp64"):
        resolve_dtype("fp64", cpu)


def test_empty_comparison_table_needs_no_answers():
    assert comparison_table([]).row_count == 0


@pytest.mark.parametrize("device", ["toaster", "meta", "cuda:77"])
def test_a_device_that_is_not_here_is_one_sentence(folders, device):
    result = generate("--device", device, target=folders / "target", drafter=folders / "none")
    assert_one_sentence(result, device, "give cpu or auto")


def test_missing_relative_folder_and_file_instead_of_folder_are_said(folders, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert_one_sentence(generate(target=folders / "target", drafter="a b"), "there is no such folder")
    assert_one_sentence(runner.invoke(app, ["demo", "--drafter", __file__]), "is not a folder")


def test_regenerate_names_a_missing_file(tmp_path):
    arguments = ["regenerate", str(tmp_path / "absent.jsonl"), "--output", str(tmp_path / "o"), "--target", "t"]
    assert_one_sentence(runner.invoke(app, arguments), "absent.jsonl: No such file or directory")


def test_an_empty_prompt_without_a_template_is_one_sentence(folders):
    result = generate("--prompt", "", "--device", "cpu", target=folders / "target", drafter=folders / "none")
    assert_one_sentence(result, "has no tokens")


def test_regenerate_needs_a_chat_template(folders, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"id": "a", "prompt": "x"}')
    arguments = ["regenerate", str(tmp_path / "p.jsonl"), "--output", str(tmp_path / "o"), "--target"]
    assert_one_sentence(runner.invoke(app, [*arguments, str(folders / "target")]), "has no chat template")
    assert not (tmp_path / "o").exists()
    wrong = [str(folders / "target"), "--top-k", "5"]
    assert_one_sentence(runner.invoke(app, [*arguments, *wrong]), "need a temperature above 0")
