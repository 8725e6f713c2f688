import json
from dataclasses import asdict

import pytest
import yaml
from lilicorr.training.decode import Decoding
from lilicorr.training.losses.terms import Objective
from lilicorr.training.prompts import Source
from lilicorr.training.regenerate import regenerate
from lilicorr.training.settings import TrainSettings
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from ..tiny import HEAD, tiny_target

WORDS = ["<pad>", "<s>", "</s>", "<mask>", "user", "assistant", ":"] + [f"w{i}" for i in range(57)]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ' : ' + m['content'] + ' </s> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant : ' }}{% endif %}"
)


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory):
    """A tiny random Llama with a word tokenizer and a chat template, saved as users save theirs."""
    folder = tmp_path_factory.mktemp("target")
    target = tiny_target(
        seed=0, vocab_size=len(WORDS), intermediate_size=64, num_hidden_layers=6, max_position_embeddings=256,
        eos_token_id=2, initializer_range=0.3,
    )  # fmt: skip
    target.lm_head.weight.data[3] = 0.0  # <mask> is never said
    target.save_pretrained(folder)
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>", pad_token="<pad>", unk_token="<pad>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def ending_target(target_folder, tmp_path_factory):
    """The same target, but half of its vocabulary ends an answer, so that most answers end by themselves."""
    folder = tmp_path_factory.mktemp("ending")
    model, tokenizer = AutoModelForCausalLM.from_pretrained(target_folder), AutoTokenizer.from_pretrained(target_folder)
    model.generation_config.eos_token_id = [2, *range(30, 60)]
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def word_tokenizer():
    """Makes a word tokenizer with the given chat template."""

    def make(template):
        words = [
            "<pad>",
            "</s>",
            "<think>",
            "</think>",
            "system",
            "user",
            "assistant",
            ":",
            *(f"w{i}" for i in range(20)),
        ]
        tokens = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
        tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=tokens, eos_token="</s>", pad_token="<pad>", unk_token="<pad>"
        )
        tokenizer.chat_template = template
        return tokenizer

    return make


@pytest.fixture
def prompt_file(tmp_path):
    """Twelve prompts of different lengths."""
    path = tmp_path / "prompts.jsonl"
    rows = [
        {
            "id": f"p{i}",
            "source": "test",
            "domain": "chat",
            "messages": [{"role": "user", "content": " ".join(f"w{(i * 7 + j) % 57}" for j in range(1 + i % 5))}],
        }
        for i in range(12)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="session")
def answers(tmp_path_factory, target_folder):
    """Answers of the tiny target to sixteen prompts."""
    folder = tmp_path_factory.mktemp("answers")
    rows = [{"id": f"p{i}", "messages": [{"role": "user", "content": f"w{i} w{2 * i} w{3 * i}"}]} for i in range(16)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prompts, output = Source([str(folder / "prompts.jsonl")]), str(folder / "answers.jsonl")
    regenerate(target_folder, prompts, output, Decoding(max_new_tokens=24), dtype="float32")
    return str(folder / "answers.jsonl")


@pytest.fixture
def make_settings(target_folder, answers):
    """Settings of a run of seconds: output folder and whatever differs."""

    def make(output, **changes):
        config = {"mask_token_id": 3, "num_hidden_layers": 2}
        if changes.get("head_type", "lilicorr") == "lilicorr":
            config["head_config"] = dict(HEAD)
        defaults = {
            "target": target_folder, "data": [answers], "block_size": 4, "max_length": 64, "batch_size": 4,
            "anchors": 8, "steps": 12, "learning_rate": 5e-3, "head_learning_rate": 5e-3, "log_every": 4,
            "objective": Objective(beta=4.0), "config": config,
        }  # fmt: skip
        return TrainSettings(output=str(output), **(defaults | changes))

    return make


@pytest.fixture
def write_recipe():
    """Writes settings as a recipe, without what the command line gives; returns its path."""

    def write(path, settings):
        given = asdict(settings)
        for name in ("target", "data", "output"):
            given.pop(name)
        path.write_text(yaml.safe_dump(given))
        return path

    return write
