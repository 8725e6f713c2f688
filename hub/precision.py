"""The dtypes that every verb and recipe names alike: `auto`, `fp32`, `bf16`, `fp16`. It imports torch when it must."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

TORCH_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def check_dtype(name: str) -> None:
    """Raise a `ValueError` of one sentence unless `name` is `auto`, one of `TORCH_NAMES`, or torch's name of one."""
    if name != "auto" and name not in TORCH_NAMES and name not in TORCH_NAMES.values():
        raise ValueError(f"dtype is {name!r}, expected one of auto, {', '.join(TORCH_NAMES)}.")


def torch_dtype(name: str, device: "torch.device | None" = None) -> "torch.dtype":
    """The dtype of that name; `auto` is bf16 where the hardware of `device` multiplies it natively, else fp32.

    A CPU without AMX or AVX512-BF16 emulates bf16 and gets slower, above all on the many rows of a verification.

    Args:
        device: where `auto` computes; CUDA where there is one unless given.

    Raises:
        ValueError: for any other name.
    """
    import torch

    check_dtype(name)
    if name != "auto":
        dtype: torch.dtype = getattr(torch, TORCH_NAMES.get(name, name))
        return dtype
    place = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if place.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    native = any(_cpu_has(check) for check in ("_is_amx_tile_supported", "_is_avx512_bf16_supported"))
    return torch.bfloat16 if native and place.type == "cpu" else torch.float32


def torch_name(name: str) -> str:
    """`name` as torch spells it (`float32`), which recipes and saved states hold; raises what `torch_dtype` does."""
    check_dtype(name)
    if name == "auto":
        return str(torch_dtype(name)).removeprefix("torch.")
    return TORCH_NAMES.get(name, name)


def _cpu_has(check: str) -> bool:
    import torch

    probe = getattr(torch.cpu, check, None)  # private and young names: absent means unknown, and unknown means no
    return bool(probe and probe())
