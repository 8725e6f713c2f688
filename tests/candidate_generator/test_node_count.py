import pytest
import torch
from lilicorr.candidate_generator import node_count as module
from lilicorr.candidate_generator.node_count import NodeCount, node_count
from transformers import GenerationConfig


@pytest.fixture
def counted(monkeypatch):
    """Calls `node_count` for a CPU target of some dtype, with or without matrix units and MKL."""

    def count(dtype, amx=False, mkl=True, max_nodes=None, device="cpu", **asked):
        monkeypatch.setattr(module, "_has_amx", lambda: amx)
        monkeypatch.setattr(module, "multiplies_few_rows", lambda: mkl)
        target = type("Target", (), {"device": torch.device(device), "dtype": dtype})
        config = type("Config", (), {"max_nodes": max_nodes, "num_slots": 7})
        return node_count(config, target, GenerationConfig(**asked))

    return count


def test_the_machine_chooses_what_a_pass_verifies(counted):
    assert counted(torch.float32).most == 3
    assert counted(torch.float32, mkl=False).most == 7
    assert counted(torch.bfloat16).most == 7
    assert counted(torch.bfloat16, amx=True).most == 15
    assert counted(torch.float32, device="cuda") == NodeCount(7, chain=True)


def test_rows_of_a_batch_share_a_budget(counted):
    count = counted(torch.float32)
    assert [count.choose(rows) for rows in (1, 2, 3, 4, 8, 16)] == [3, 3, 1, 1, 0, 0]


@pytest.mark.parametrize("rows", [1, 16])
def test_what_a_person_asked_for_is_not_shared_out(counted, rows):
    assert counted(torch.float32, max_nodes=31).choose(rows) == 31
    assert counted(torch.float32, num_assistant_tokens=5).choose(rows) == 5
    assert counted(torch.float32, max_nodes=31, num_assistant_tokens=5).choose(rows) == 5
    assert counted(torch.float32, max_nodes=0).choose(rows) == 0


def test_a_negative_number_is_refused(counted):
    with pytest.raises(ValueError, match="num_assistant_tokens is -1"):
        counted(torch.float32, num_assistant_tokens=-1)
