import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants, hf_api
from huggingface_hub.utils import _http
from lilicorr import LiLiCorrConfig, LiLiCorrModel
from transformers.utils import hub as transformers_hub

from .. import tiny
from .fake_hub import TOKEN, FakeHub

# A process that has torch and Transformers, but neither this package nor triton nor a network (HF_ENDPOINT on loopback
# is the one thing in reach).
CLEAN = """
import json, os, socket, sys
sys.modules["lilicorr"] = sys.modules["triton"] = None
connect = socket.socket.connect
def no_network(self, address):
    assert "http://%s:%s" % address[:2] == os.environ.get("HF_ENDPOINT"), "a connection was tried"
    return connect(self, address)
socket.socket.connect = no_network
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


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A Hub on loopback that the Hub's library asks in this process, and no other."""
    server = FakeHub()
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(hf_api.api, "endpoint", server.url)
    if hasattr(transformers_hub, "hf_api"):  # releases of Transformers that keep one of their own
        monkeypatch.setattr(transformers_hub.hf_api(), "endpoint", server.url)
    monkeypatch.setattr(_http.time, "sleep", lambda seconds: None)  # between tries
    for name, value in {"HF_ENDPOINT": server.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"}.items():
        monkeypatch.setenv(name, value)
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    yield server
    server.close()
