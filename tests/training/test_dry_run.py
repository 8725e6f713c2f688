import io
import re
import runpy
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lilicorr import LiLiCorrModel
from lilicorr.evaluation.loading import load_pair
from lilicorr.training.data import collate, load_examples
from lilicorr.training.dry_run import describe, render
from lilicorr.training.endpoint import Endpoint
from lilicorr.training.memory import step_memory
from lilicorr.training.prompts import Source
from lilicorr.training.regenerate import regenerate
from lilicorr.training.settings import TrainSettings, find_recipe
from lilicorr.training.target import load_target
from lilicorr.training.train import drafter_config
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, Qwen3Config


@pytest.fixture
def bare_target(target_folder, tmp_path):
    """The target's configuration and tokenizer, without weights."""
    folder = tmp_path / "bare"
    folder.mkdir()
    for file in Path(target_folder).iterdir():
        if not file.name.endswith(".safetensors"):
            shutil.copy(file, folder)
    return str(folder)


def test_a_dry_run_needs_no_weights_and_writes_nothing(tmp_path, make_settings, bare_target, answers):
    settings = make_settings(tmp_path / "output", target=bare_target, steps=0, epochs=3.0, micro_batch_size=2)
    text = describe(settings)
    assert not (tmp_path / "output").exists()
    examples = load_examples([answers], AutoTokenizer.from_pretrained(bare_target), 64)
    tokens = sum(map(len, examples))
    supervised = sum(int(collate([example]).loss_mask.sum()) for example in examples)
    assert f"16 examples, {tokens:,} tokens, {supervised:,} of them supervised" in text
    assert f"12 steps of 4 sequences (1 process, 2 micro-batches of 2), 3.00 epochs, {3 * tokens:,} tokens" in text
    assert "4 sequences (1 process, 1 micro-batch of 4)" in describe(replace(settings, micro_batch_size=0))
    assert f"The first example ({examples[0].id})" in text and "⟦" in text


TORN_FILES = {
    "tokenizer.json": ("", "[]", "{}", '{"model": 5}'),
    "tokenizer_config.json": ("[]", '{"tokenizer_class": 5}'),
    "config.json": ("[]", '{"model_type": "llama", "hidden_size": "x"}'),
}


@pytest.mark.parametrize("name, text", [(name, text) for name, texts in TORN_FILES.items() for text in texts])
def test_files_that_are_not_a_targets_are_one_sentence_wherever_they_are_read(
    tmp_path, make_settings, bare_target, prompt_file, name, text
):
    (Path(bare_target) / name).write_text(text)
    readers = [
        lambda: describe(make_settings(tmp_path / "output", target=bare_target)),
        lambda: load_target(bare_target, "fp32"),
        lambda: load_pair(bare_target, {}, dtype="fp32", device="cpu"),
        lambda: regenerate(
            bare_target, Source([str(prompt_file)]), str(tmp_path / "o"), endpoint=Endpoint("http://localhost:1", "m")
        ),
    ]
    for reader in readers if name != "config.json" else readers[:3]:
        with pytest.raises(ValueError, match=r"could not be (read|loaded)") as caught:
            reader()
        assert "\n" not in str(caught.value)


def test_a_console_of_any_encoding_shows_what_accelerate_starts(
    tmp_path, make_settings, write_recipe, bare_target, answers, monkeypatch
):
    recipe = write_recipe(tmp_path / "recipe.yaml", make_settings(tmp_path / "output"))
    arguments = ["--data", answers, "--output", tmp_path / "output", "--target", bare_target, "--dry-run"]
    monkeypatch.setattr(sys, "argv", ["lilicorr.training", str(recipe), *map(str, arguments)])
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("lilicorr.training", run_name="__main__")
    sys.stdout.flush()
    said = sys.stdout.buffer.getvalue().decode("ascii")
    assert not ended.value.code and "Parameters: target" in said and "[" in said


def test_a_dry_run_counts_parameters(make_settings, bare_target, target_folder, tmp_path):
    target = AutoModelForCausalLM.from_pretrained(target_folder)
    settings = make_settings(tmp_path)
    drafter = LiLiCorrModel(drafter_config(settings, target.config, 64))
    head = sum(p.numel() for p in drafter.head.parameters())
    backbone = sum(p.numel() for p in drafter.parameters()) - head
    whole = sum(p.numel() for p in target.parameters())
    text = describe(make_settings(tmp_path, target=bare_target))
    assert f"target {whole:,}, drafter backbone {backbone:,}, head {head:,}, of which {head + backbone:,} are" in text
    assert f"of which {head:,} are trained" in describe(make_settings(tmp_path, freeze_backbone=True))


def test_rendering_marks_what_is_supervised(target_folder, answers):
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    example = load_examples([answers], tokenizer, 64)[3]
    batch = collate([example])
    text = render(example, tokenizer)
    marked = "".join(re.findall("⟦(.*?)⟧", text))
    assert marked == tokenizer.decode(batch.input_ids[0][batch.loss_mask[0]])
    assert text.startswith("user : w3 w6 w9 </s> assistant :")
    assert re.sub(r"[⟦⟧\s]", "", text) == re.sub(r"\s", "", tokenizer.decode(batch.input_ids[0]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": "absent/folder/x"}, "could not be read"),
        ({"dtype": "int3"}, "dtype is 'int3'"),
        ({"config": {"mask_token_id": 99}, "head_type": "none"}, "mask_token_id 99 is not a row"),
        ({"batch_size": 64}, "do not fill one batch"),
    ],
)
def test_a_dry_run_refuses_what_training_would(tmp_path, make_settings, changes, message, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match=message):
        describe(make_settings(tmp_path, **changes))


QWEN3 = {
    "vocab_size": 151936, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "max_position_embeddings": 40960, "bos_token_id": 151643, "eos_token_id": 151645,
}  # fmt: skip
TARGETS = {
    "qwen3-8b": Qwen3Config(hidden_size=4096, intermediate_size=12288, tie_word_embeddings=False, **QWEN3),
    "qwen3-4b": Qwen3Config(hidden_size=2560, intermediate_size=9728, tie_word_embeddings=True, **QWEN3),
    "smollm2-135m-gpu": LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True, max_position_embeddings=8192,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TARGETS)
def test_a_recipes_comment_says_what_the_formula_gives(name):
    comment = find_recipe(name).read_text()
    settings, config = TrainSettings.from_recipe(name, target="t", data=["d"], output="o"), TARGETS[name]
    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(config)
        drafter = LiLiCorrModel(drafter_config(settings, config, 151669))
    counts = {
        "target": target.num_parameters(),
        "drafter": drafter.num_parameters(),
        "trained": drafter.num_parameters(),
    }
    said = re.search(r"on (\d+) process(?:es)?.*?: ([\d.]+) GiB", comment.replace("\n# ", " "))
    micro = settings.micro_batch_size
    share = settings.batch_size // int(said[1]) // micro
    memory = step_memory(settings, drafter.config, config, counts, micro, share)
    assert sum(memory.values()) / 2**30 == pytest.approx(float(said[2]), abs=0.06)
    assert f"at most {settings.batch_size * settings.max_length:,} a step" in comment.replace("\n# ", " ")


@pytest.mark.parametrize("name", ["qwen3-4b", "qwen3-8b"])
def test_the_qwen3_recipes_are_the_papers_table_4(name):
    settings = TrainSettings.from_recipe(name, data=["d"], output="o")
    head = {"num_candidates": 8, "hidden_size": 1024, "num_layers": 2, "num_heads": 8, "intermediate_size": 2048}
    head |= {"factor_dim": 1024, "logit_scale": 8.0}
    assert head.items() <= settings.config["head_config"].items() and settings.block_size == 16
    weigh = settings.objective
    assert (weigh.beta, weigh.gamma, weigh.penalty) == (7.0, 0.25, 1.0)
    assert (settings.learning_rate, settings.head_learning_rate, settings.head_weight_decay) == (6e-4, 1.5e-4, 0.01)
    assert (settings.warmup, settings.clip, settings.epochs) == (0.04, 1.0, 6.0)
    assert (settings.max_length, settings.batch_size) == (3072, 64)
    assert (settings.dtype, settings.mixed_precision) == ("bfloat16", "bf16")
    with torch.device("meta"):
        drafter = LiLiCorrModel(drafter_config(settings, TARGETS[name], 151669))
    expected = {"qwen3-8b": 36_758_794, "qwen3-4b": 32_040_202}[name]
    assert sum(p.numel() for p in drafter.head.parameters()) == expected


def test_recipes_are_found_by_name_and_others_listed(tmp_path):
    assert find_recipe("qwen3-8b").name == "qwen3-8b.yaml"
    assert find_recipe("smollm2-135m-cpu/4-lilicorr").name == "4-lilicorr.yaml"
    with pytest.raises(ValueError, match=r"There is no recipe gpt-9; give a YAML file or one of qwen3-4b, qwen3-8b, "):
        TrainSettings.from_recipe("gpt-9", target="t", data=["d"], output="o")
    with pytest.raises(ValueError, match=r"has several stages; give one of smollm2-135m-cpu/1-backbone"):
        find_recipe("smollm2-135m-cpu")
