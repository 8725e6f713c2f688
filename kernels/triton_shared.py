"""What the Triton kernels share. It imports where triton is absent, and so do they: then nothing can be launched."""

# Annotations stay text, so that `tl.constexpr` is not looked up where triton is absent; Triton reads them as text.
from __future__ import annotations

from typing import Any

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None  # type: ignore[assignment]


def jit(function: Any) -> Any:
    """`triton.jit` where there is triton, else `function` itself."""
    return function if triton is None else triton.jit(function)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is at least `number >= 1`."""
    return 1 << (number - 1).bit_length()


@jit
def silu(values):
    """`values * sigmoid(values)`."""
    return values / (1.0 + tl.exp(-values))


@jit
def ordered_key(values):
    """fp32 values to int32 keys in the order of `torch.sort`: NaN of any sign first, -0.0 equal to 0.0.

    The lowest int32 is no value's key and marks padding.
    """
    values = tl.where(values == 0.0, 0.0, values)
    bits = values.to(tl.int32, bitcast=True)
    bits = tl.where(values != values, 0x7FFFFFFF, bits)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@jit
def value_of_key(keys):
    """The fp32 values of int32 keys; NaN comes back as some NaN, -0.0 as 0.0."""
    bits = keys ^ ((keys >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)
