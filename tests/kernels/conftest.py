import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on the CPU the kernels run interpreted
POISON = dict.fromkeys((torch.float32, torch.bfloat16, torch.float16), torch.nan) | {
    torch.int64: -(2**62),
    torch.int32: -(2**30),
}


@pytest.fixture
def poisoned(monkeypatch):
    """Memory that a kernel gets to write into holds NaN and absurd ids, so that what it leaves out shows."""
    empty, empty_like = torch.empty, torch.empty_like

    def poison(tensor):
        return tensor.fill_(POISON[tensor.dtype]) if tensor.dtype in POISON else tensor

    monkeypatch.setattr(torch, "empty", lambda *sizes, **options: poison(empty(*sizes, **options)))
    monkeypatch.setattr(torch, "empty_like", lambda *tensors, **options: poison(empty_like(*tensors, **options)))
