"""The LM head's logits in int8 on a CPU, with each row's likeliest entries computed again as defined.

A draft needs a vocabulary's worth of logits only to find its few candidates. Eight-bit products read a quarter of the
weights and multiply four numbers at a time, and an error there can only cost a draft's acceptance: what is said, the
target decides in its own precision.
"""

import functools
import warnings
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .choice import kernel_choice

EXACT = 64  # entries of a row that are computed again: more than any head has candidates
WORTHWHILE = 1 << 22  # weights from which it pays


class Int8Logits:
    """`hidden @ weight.T + bias` for one LM head.

    Args:
        weight: `[vocab, d]` (fp32 or bf16, on the CPU); bias: `[vocab]` or `None`.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight, self._bias = weight, None if bias is None else bias.float()
        weight = weight.float()
        scales = weight.abs().amax(dim=1).clamp(min=torch.finfo(torch.float32).tiny * 256).double() / 127
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch announces that quantised tensors will move elsewhere
            zeros = torch.zeros_like(scales, dtype=torch.long)
            rows = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
            self._packed = torch.ops.quantized.linear_prepack(rows, self._bias)
        self._seven_bits = not _has_vnni()  # AVX2 adds byte products in 16 bits, which eight-bit ones overflow

    def __call__(self, hidden: Tensor) -> Tensor:
        """`hidden [..., d]` to logits `[..., vocab]` in fp32; the `EXACT` greatest of each row are exact.

        All are where a state is not finite: one such row would leave the others without a scale.
        """
        rows = hidden.reshape(-1, hidden.shape[-1]).float()
        if not rows.isfinite().all():
            return functional.linear(hidden.float(), self._weight.float(), self._bias)
        logits = torch.ops.quantized.linear_dynamic(rows, self._packed, self._seven_bits)
        best = logits.topk(min(EXACT, logits.shape[-1]), dim=-1).indices
        exact = torch.bmm(self._weight[best].float(), rows[..., None]).squeeze(-1)
        if self._bias is not None:
            exact = exact + self._bias[best]
        return logits.scatter_(-1, best, exact).view(*hidden.shape[:-1], -1)


class KnownLogits:
    """The `Int8Logits` of every LM head that asked for one; copies and pickles start anew."""

    def __init__(self) -> None:
        self._by_head: weakref.WeakKeyDictionary[Any, tuple[Any, Int8Logits]] = weakref.WeakKeyDictionary()

    def of(self, lm_head: Any) -> Int8Logits | None:
        """That of `lm_head` as its weights are now, or `None` where it would not pay or not be the same.

        `LILICORR_KERNELS=reference` leaves it out.
        """
        if not _serves(lm_head) or kernel_choice() == "reference":
            return None
        weight = lm_head.weight
        state = (weight.data_ptr(), None if weight.is_inference() else weight._version)
        known = self._by_head.get(lm_head)
        if known is None or known[0] != state:
            with torch.inference_mode():
                bias = lm_head.bias
                known = (state, Int8Logits(weight.detach(), None if bias is None else bias.detach()))
            self._by_head[lm_head] = known
        return known[1]

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()


def _serves(lm_head: Any) -> bool:
    """A plain fp32 or bf16 layer without hooks on a CPU that multiplies bytes, big enough to be worth a copy."""
    if type(lm_head) is not nn.Linear or lm_head._forward_hooks or lm_head._forward_pre_hooks:
        return False
    weight = lm_head.weight
    plain = type(weight) in (nn.Parameter, Tensor) and weight.dtype in (torch.float32, torch.bfloat16)
    plain = plain and weight.device.type == "cpu"
    return plain and not hasattr(lm_head, "_hf_hook") and weight.numel() >= WORTHWHILE and multiplies_bytes()


@functools.cache
def multiplies_bytes() -> bool:
    """Whether this CPU has AVX2 or better and torch the eight-bit products for it."""
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        return False
    try:
        probed = Int8Logits(torch.eye(4), None)(torch.ones(1, 4))
    except (RuntimeError, AttributeError, NotImplementedError):
        return False
    return bool(torch.allclose(probed, torch.ones(1, 4), atol=0.05))


def _has_vnni() -> bool:
    probe = getattr(torch.cpu, "_is_vnni_supported", None)  # private: absent means unknown, and unknown means no
    return bool(probe and probe())
