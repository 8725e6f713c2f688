"""Which implementation of a kernel runs: `LILICORR_KERNELS=auto|reference|triton`, read at every call.

`auto` takes Triton for CUDA tensors that it can serve and the fastest plain torch elsewhere, `reference` the definition
everywhere, `triton` Triton or an error; with `TRITON_INTERPRET=1` the latter runs interpreted on the CPU.
"""

import functools
import os

import torch
from torch import Tensor

CHOICES = ("auto", "reference", "triton")


def kernel_choice() -> str:
    """The value of `LILICORR_KERNELS`, `auto` where it is unset or empty.

    Raises:
        ValueError: for any other value than auto, reference and triton.
    """
    choice = os.environ.get("LILICORR_KERNELS") or "auto"
    if choice not in CHOICES:
        raise ValueError(f"LILICORR_KERNELS is {choice!r}; set it to auto, reference or triton, or unset it.")
    return choice


def wants_triton(tensors: tuple[Tensor, ...], refusal: str | None) -> bool:
    """Whether Triton serves a call on `tensors`; `refusal` says what its kernel cannot honour of it, if anything.

    Raises:
        ValueError: `LILICORR_KERNELS` is unknown, or asks for Triton where it cannot serve.
    """
    choice = kernel_choice()
    if choice == "reference":
        return False
    if refusal is None and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        refusal = "its kernels have no gradient"
    device = tensors[0].device.type
    if choice == "auto":
        # ROCm calls its devices cuda as well; nobody has tried the kernels there.
        return device == "cuda" and torch.version.cuda is not None and refusal is None and triton_installed()
    if not triton_installed():
        refusal = "it is not installed"
    elif device != "cuda" and not interpreted():
        refusal = f"tensors on {device} need TRITON_INTERPRET=1 from the start of the process"
    if refusal is not None:
        raise ValueError(f"LILICORR_KERNELS=triton cannot serve this call: {refusal}; set it to auto or reference.")
    return True


@functools.cache
def triton_installed() -> bool:
    """Whether `import triton` works; one that fails in whatever way counts as absent."""
    try:
        import triton  # noqa: F401
    except Exception:
        return False
    return True


def interpreted() -> bool:
    """Whether the environment asks for Triton's interpreter."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")
