"""Work captured once as a CUDA graph and replayed: what may be captured, and how, whatever the work is.

`LILICORR_GRAPHS=1` asks for it; without, nothing is captured. Nobody has timed it on a GPU yet.
"""

import os
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks

from ..kernels.choice import interpreted

Made = TypeVar("Made")

WARM_UPS = 3  # runs before a capture: they compile kernels, and libraries set up what they keep


class CaptureError(RuntimeError):
    """Work could not be captured."""


def graphs_asked_for() -> bool:
    """Whether `LILICORR_GRAPHS` is 1; unset or empty means 0.

    Raises:
        ValueError: for any other value than 1 and 0.
    """
    value = os.environ.get("LILICORR_GRAPHS") or "0"
    if value not in ("0", "1"):
        raise ValueError(f"LILICORR_GRAPHS is {value!r}; set it to 1 or 0, or unset it.")
    return value == "1"


class Graph(Protocol):
    """Records what one call of a function does to memory and does it again, without any Python of it."""

    def __init__(self, device: torch.device) -> None: ...

    @staticmethod
    def refusal(device: torch.device) -> str | None:
        """Why nothing can be captured on `device`, or `None`."""
        ...

    @staticmethod
    def capturing() -> bool:
        """Whether a capture is under way already."""
        ...

    @staticmethod
    def stream(device: torch.device) -> int:
        """The queue that work on `device` goes to now."""
        ...

    def capture(self, function: Callable[[], Made]) -> Made:
        """Record `function`, which may run several times; its results hold nothing yet and stay in place."""
        ...

    def replay(self) -> None:
        """Do again what was recorded: the results of `capture` are filled from what its inputs hold now."""
        ...


class CudaGraph:
    """`Graph` on a CUDA device, with memory of its own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graph = torch.cuda.CUDAGraph()

    @staticmethod
    def refusal(device: torch.device) -> str | None:
        """As in `Graph`. ROCm calls its devices cuda as well; nobody has tried it there."""
        if device.type != "cuda" or torch.version.cuda is None:
            return f"graphs need a CUDA device, and the drafter is on {device}"
        return "Triton's interpreter works on the host" if interpreted() else None

    @staticmethod
    def capturing() -> bool:
        """As in `Graph`."""
        return torch.cuda.is_current_stream_capturing()

    @staticmethod
    def stream(device: torch.device) -> int:
        """As in `Graph`."""
        return torch.cuda.current_stream(device).cuda_stream

    def capture(self, function: Callable[[], Made]) -> Made:
        """As in `Graph`; other threads may use the device meanwhile."""
        with torch.cuda.device(self._device):
            own = torch.cuda.current_stream()
            with torch.cuda.stream(own):  # a capture that fails would leave its stream the current one
                aside = torch.cuda.Stream()
                aside.wait_stream(own)
                with torch.cuda.stream(aside):
                    for _ in range(WARM_UPS):
                        function()
                own.wait_stream(aside)
                with torch.cuda.graph(self._graph, stream=torch.cuda.Stream(), capture_error_mode="thread_local"):
                    return function()

    def replay(self) -> None:
        """As in `Graph`, on the current stream."""
        self._graph.replay()


class Captured:
    """A function of tensors as one graph: inputs are copied into buffers of its own, and results out of them.

    Args:
        graph: a fresh one.
        function: neither synchronises with the host nor lets Python decide by what tensors hold.
        inputs: examples; every call brings tensors of their shapes, dtypes and device.

    Raises:
        CaptureError: it failed, for whatever reason.
    """

    def __init__(self, graph: Graph, function: Callable[..., tuple[Tensor, ...]], inputs: tuple[Tensor, ...]) -> None:
        self._graph = graph
        with torch.inference_mode(False), torch.no_grad():  # buffers made in that mode could not be written outside
            self._inputs = tuple(given.clone(memory_format=torch.contiguous_format) for given in inputs)
            try:
                self._results = graph.capture(lambda: function(*self._inputs))
            except Exception as error:
                raise CaptureError(f"{type(error).__name__}: {error}") from error

    @torch.no_grad()
    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Results that later calls leave alone."""
        for own, given in zip(self._inputs, inputs, strict=True):
            own.copy_(given)
        self._graph.replay()
        return tuple(result.clone() for result in self._results)


def tensors_of(modules: Iterable[nn.Module]) -> list[Tensor]:
    """All parameters and buffers of `modules`, without gradient, in memory that stays theirs while the list lives."""
    return [tensor.detach() for each in modules for tensor in (*each.parameters(), *each.buffers())]


def module_refusal(modules: Iterable[nn.Module], device: torch.device) -> str | None:
    """Why work of `modules` must not be captured, or `None`: a replay runs none of their Python.

    Args:
        modules: with all modules inside them.
        device: where all of their weights must be.
    """
    if module_hooks._global_forward_hooks or module_hooks._global_forward_pre_hooks:
        return "there are hooks on all modules"
    for part in (part for each in modules for part in each.modules()):
        name = type(part).__name__
        if part._forward_hooks or part._forward_pre_hooks or hasattr(part, "_hf_hook"):
            return f"a {name} has a hook"
        if part.training:
            return f"a {name} is in training mode"
        if getattr(part, "_compiled_call_impl", None) is not None:
            return f"a {name} is compiled"
        for weight in part.parameters(recurse=False):
            if type(weight) not in (nn.Parameter, Tensor):
                return f"a {name} has weights of the kind {type(weight).__name__}"
        for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
            if tensor.device != device:
                return f"a {name} has weights on {tensor.device}, others are on {device}"
    return None
