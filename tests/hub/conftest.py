import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lilicorr import LiLiCorrConfig, LiLiCorrModel

from .. import tiny

# A process that has torch and Transformers, but neither this package nor triton nor a network.
CLEAN = """
import json, socket, sys
sys.modules["lilicorr"] = sys.modules["triton"] = None
def no_network(*arguments):
    raise AssertionError("a connection was tried")
socket.socket.connect = socket.create_connection = no_network
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
"""


def tiny_config(**overrides) -> LiLiCorrConfig:
    return tiny.tiny_config(**{"block_size": 4, "max_position_embeddings": 128} | overrides)


def tiny_drafter(seed: int = 0, **overrides) -> LiLiCorrModel:
    """A drafter none of whose parameters has its initial value, so that a lost tensor shows."""
    torch.manual_seed(seed)
    model = LiLiCorrModel(tiny_config(**overrides)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model


def assert_same_weights(first: torch.nn.Module, second: torch.nn.Module) -> None:
    ours, theirs = first.state_dict(), second.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]), name


def run_clean(script: str, home: Path, *arguments: object, **environment: str) -> dict:
    """Run `script` in a clean process; returns the JSON object that it prints last."""
    finished = subprocess.run(
        [sys.executable, "-I", "-c", CLEAN + script, *map(str, arguments)],
        env={
            **os.environ,
            "HF_HOME": str(home),
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_MODULES_CACHE": str(home / "modules"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            **environment,
        },
        capture_output=True,
        text=True,
        cwd=home,
        timeout=300,
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    return json.loads(finished.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory) -> Path:
    ends = {"max_position_embeddings": 128, "eos_token_id": 2, "pad_token_id": None}
    folder = tmp_path_factory.mktemp("target")
    tiny.tiny_target(seed=1, initializer_range=0.2, **ends).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """A saved drafter; tests must not write into it."""
    folder = tmp_path_factory.mktemp("drafter")
    tiny_drafter().save_pretrained(folder)
    return folder
