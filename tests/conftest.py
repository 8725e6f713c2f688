import os
from pathlib import Path

if "PYTEST_XDIST_WORKER" in os.environ:  # one of several processes that share the tests
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch reads it as it is imported; for what tests start, too

import pytest
import torch
from filelock import FileLock

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # Triton reads it as it is imported

from lilicorr import LiLiCorrConfig, LiLiCorrModel
from lilicorr.hub.targets import smollm2
from tokenizers import Tokenizer, models, pre_tokenizers
from tokenizers.decoders import ByteLevel
from transformers import PreTrainedTokenizerFast

from .tiny import tiny_target

TESTS = Path(__file__).parent
LENGTHY = (  # files that take long together; a test of any other is marked `fast`, unless it is `slow`
    "benchmarks/test_compile_report.py",
    "benchmarks/test_end_to_end.py",
    "benchmarks/test_kernel_speed.py",
    "benchmarks/test_training_speed.py",
    "candidate_generator/test_distribution.py",
    "candidate_generator/test_families.py",
    "candidate_generator/test_generate_options.py",
    "candidate_generator/test_generation.py",
    "candidate_generator/test_loop.py",
    "candidate_generator/test_lossless.py",
    "candidate_generator/test_option_mixes.py",
    "evaluation/test_evaluate.py",
    "evaluation/test_replay.py",
    "evaluation/test_tree_replay.py",
    "hub/test_bad_checkpoints.py",
    "hub/test_publish.py",
    "hub/test_mutated_checkpoints.py",
    "hub/test_remote_code.py",
    "integration/test_embedded_checkpoint.py",
    "integration/test_smollm2_lossless.py",
    "kernels/test_choice.py",
    "kernels/test_lattice_attention_triton.py",
    "kernels/test_lattice_nodes_triton.py",
    "kernels/test_lattice_products_triton.py",
    "kernels/test_topk_triton.py",
    "kernels/test_walk_triton.py",
    "modeling_lilicorr/test_backbone.py",
    "modeling_lilicorr/test_graphs.py",
    "modeling_lilicorr/test_head_kernels.py",
    "modeling_lilicorr/test_overfit.py",
    "modeling_lilicorr/test_residual_head.py",
    "modeling_lilicorr/test_rivals.py",
    "test_command_line.py",
    "test_packaging.py",
    "training/test_command.py",
    "training/test_head_losses.py",
    "training/test_layers.py",
    "training/test_joint.py",
    "training/test_processes.py",
    "training/test_regenerate.py",
    "training/test_resume.py",
    "training/test_train.py",
)
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
WORKER = os.environ.get("PYTEST_XDIST_WORKER")
MOST_WORKERS = 4  # each holds torch, Transformers and models


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config):
    """Share the tests of folders among processes where pytest-xdist is installed; `-n 0` keeps them in one."""
    options = config.option
    if WORKER or not config.pluginmanager.hasplugin("xdist") or options.numprocesses is not None or options.usepdb:
        return
    if all(Path(config.invocation_params.dir, argument).is_dir() for argument in config.args):
        options.numprocesses = min(os.cpu_count() or 1, MOST_WORKERS)
        options.dist = "worksteal"  # it begins with halves, so that most files' fixtures are made once


def pytest_collection_modifyitems(items):
    for item in items:
        place = item.path.relative_to(TESTS).as_posix() if item.path.is_relative_to(TESTS) else ""
        if place and place not in LENGTHY and item.get_closest_marker("slow") is None:
            item.add_marker("fast")


@pytest.fixture(scope="session")
def smollm2_folder(tmp_path_factory):
    """The real target's folder, fetched by one process while the others wait."""
    lock = (
        tmp_path_factory.getbasetemp().parent / "smollm2.lock" if WORKER else tmp_path_factory.mktemp("lock") / "lock"
    )
    with FileLock(lock):
        return smollm2()


@pytest.fixture(scope="session")
def tiny_folders(tmp_path_factory):
    """A tiny random Llama over bytes with its tokenizer, and random drafters for it."""
    root = tmp_path_factory.mktemp("pair")
    bytes_only = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(LETTERS)}, merges=[]))
    bytes_only.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_only.decoder = ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_only, pad_token="<pad>", eos_token="<eos>")
    target = tiny_target(
        seed=0, vocab_size=264, intermediate_size=64, num_hidden_layers=5, max_position_embeddings=2048,
        pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id, bos_token_id=None,
        initializer_range=0.3,
    )  # fmt: skip
    target.save_pretrained(root / "target")
    tokenizer.save_pretrained(root / "target")
    for head in ("lilicorr", "none", "xpress"):
        drafter = LiLiCorrConfig.for_target(
            target.config, head_type=head, block_size=5, num_hidden_layers=2, tokenizer_size=258,
            initializer_range=0.5 if head == "xpress" else 0.02,  # at 0.02 it would choose what the drafter does
        )  # fmt: skip
        LiLiCorrModel(drafter).save_pretrained(root / head)
    return root
