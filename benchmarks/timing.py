"""What the benchmarks of kernels and heads share: random inputs, captured calls, and how long they take."""

import platform
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lilicorr.kernels.choice import triton_installed
from lilicorr.modeling_lilicorr.graphs import WARM_UPS, CudaGraph
from torch import Tensor


def random(seed: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Normal numbers that depend on `seed` and `shape` only."""
    return torch.randn(shape, generator=torch.Generator(device).manual_seed(seed), device=device).to(dtype)


def prepare(
    arm: Callable[..., Any], inputs: Sequence[tuple[Any, ...]], device: torch.device, captured: bool
) -> Callable[[], None]:
    """One call of `arm` on each of `inputs`, as a CUDA graph where `captured` on a GPU; warm already."""

    def once() -> None:
        for given in inputs:
            arm(*given)

    if device.type != "cuda" or not captured:
        for _ in range(WARM_UPS if device.type == "cuda" else 1):
            once()
        return once
    graph = CudaGraph(device)
    graph.capture(once)
    graph.replay()
    return graph.replay


def seconds(call: Callable[[], Any], device: torch.device) -> float:
    """How long `call` takes, on the device where it is a GPU."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    first.record()
    call()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 1000


def about(device: torch.device) -> dict[str, Any]:
    """What figures were measured on."""
    found: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version(), "triton": None}
    if triton_installed():
        import triton

        found["triton"] = triton.__version__
    if device.type == "cuda":
        return found | {"device": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    return found | {"device": platform.machine(), "threads": torch.get_num_threads()}
