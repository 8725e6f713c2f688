"""Tiny seeded targets and drafters, and a way to make a drafter as good or as bad as a test needs."""

import types
from dataclasses import replace

import pytest
import torch
from lilicorr import LiLiCorrConfig, LiLiCorrModel
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

VOCAB = 97
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.35,  # wide enough for varied texts and clear winners
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def build_target(kind, **overrides):
    torch.manual_seed(7)
    settings = SHAPE | overrides
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**settings)).eval()
    return Qwen3ForCausalLM(Qwen3Config(**settings)).eval()


def build_drafter(target, head_type, **overrides):
    torch.manual_seed(11)
    settings = {
        "num_hidden_layers": 2,
        "block_size": 8,
        "mask_token_id": 0,
        "target_layer_ids": [0, 1, 2],
        "head_type": head_type,
    } | overrides
    return LiLiCorrModel(LiLiCorrConfig.for_target(target.config, **settings)).eval()


def teach_drafter(drafter, text, wrong_slots=(), broken_slots=(), sure=0.9):
    """Make `drafter` propose what follows in `text` (ids without padding) after the position it believes to be at.

    Full acceptance therefore also shows that its positions are right. `wrong_slots` get another token, `broken_slots`
    are reported as not finite. It gives all of them the probability `sure`. The real draft still runs, caches and all.
    """
    text = [int(token) for token in text]

    def draft(self, anchor_ids, context_hidden_states, context_positions, *rest, **kwargs):
        real = LiLiCorrModel.draft(self, anchor_ids, context_hidden_states, context_positions, *rest, **kwargs)
        start = int(context_positions[0, -1]) + 2
        tokens, finite = real.tokens.clone(), real.finite.clone()
        for slot in range(tokens.shape[1]):
            if start + slot < len(text):
                tokens[0, slot] = text[start + slot]
            if slot in wrong_slots:
                tokens[0, slot] = (tokens[0, slot] + 1) % self.config.vocab_size
            if slot in broken_slots:
                finite[0, slot] = False
        return replace(real, tokens=tokens, finite=finite, probabilities=lambda: torch.full(tokens.shape, sure))

    drafter.draft = types.MethodType(draft, drafter)
    return drafter


@pytest.fixture(scope="session")
def _targets():
    return {kind: build_target(kind) for kind in ("llama", "qwen3")}


@pytest.fixture(params=["llama", "qwen3"])
def target(request, _targets):
    return _targets[request.param]


@pytest.fixture
def llama(_targets):
    return _targets["llama"]


@pytest.fixture(params=["none", "lilicorr"])
def drafter(request, target):
    return build_drafter(target, request.param)


@pytest.fixture
def llama_drafter(llama):
    return build_drafter(llama, "lilicorr")


@pytest.fixture
def new_target():
    return build_target


@pytest.fixture
def new_drafter():
    return build_drafter


@pytest.fixture
def teach():
    return teach_drafter


@pytest.fixture
def prompt():
    """Seeded prompts `[1, length]`."""

    def make(length, seed=0):
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(1, VOCAB, (1, length), generator=generator)

    return make


@pytest.fixture
def tokenizer():
    """A token for every printable character: id n is `chr(30 + n)`, after padding 0 and start 1."""
    vocab = {"<pad>": 0, "<s>": 1} | {chr(30 + index): index for index in range(2, VOCAB)}
    backend = Tokenizer(BPE(vocab, []))
    backend.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<s>")
