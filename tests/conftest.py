import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it as it is imported

from lilicorr import LiLiCorrConfig, LiLiCorrModel
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())


@pytest.fixture(scope="session")
def tiny_folders(tmp_path_factory):
    """A tiny random Llama over bytes with its tokenizer, and random drafters for it."""
    root = tmp_path_factory.mktemp("pair")
    bytes_only = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(LETTERS)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_only, pad_token="<pad>", eos_token="<eos>")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=264,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(root / "target")
    tokenizer.save_pretrained(root / "target")
    for head in ("lilicorr", "none", "xpress"):
        drafter = LiLiCorrConfig.for_target(
            config, head_type=head, block_size=5, num_hidden_layers=2, tokenizer_size=258,
            initializer_range=0.5 if head == "xpress" else 0.02,  # at 0.02 it would choose what the drafter does
        )  # fmt: skip
        LiLiCorrModel(drafter).save_pretrained(root / head)
    return root
