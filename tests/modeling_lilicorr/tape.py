"""A captured graph on the CPU: what a CUDA graph does to memory, proved where there is no GPU."""

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

READS = ("_local_scalar_dense", "nonzero", "lift_fresh", "masked_select", "unique", "equal")  # wait for the device


class Tape(TorchDispatchMode):
    """Operations with the very tensors that they read and wrote."""

    def __init__(self):
        super().__init__()
        self.steps = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name.startswith(READS):
            raise RuntimeError(f"{name} is not permitted when a stream is capturing")
        results = func(*args, **(kwargs or {}))
        if any(argument.alias_info is not None and argument.alias_info.is_write for argument in func._schema.arguments):
            self.steps.append((func, args, kwargs, None))
        elif results is not None:
            given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
            made = [t for t in tree_leaves(results) if isinstance(t, Tensor)]
            if not all(t.untyped_storage().data_ptr() in given for t in made if t.numel()):  # a view is there already
                self.steps.append((func, args, kwargs, results))
        return results


class TapeGraph:
    """Replays operations, not Python: numbers that Python computed are baked in, memory never moves."""

    def __init__(self, device):
        self._steps = []

    @staticmethod
    def refusal(device):
        return None

    @staticmethod
    def capturing():
        return False

    @staticmethod
    def stream(device):
        return 0

    def capture(self, function):
        function()
        with Tape() as tape:
            results = function()
        self._steps = tape.steps
        for _, _, _, made in self._steps:
            for tensor in tree_leaves(made):
                if isinstance(tensor, Tensor):
                    tensor.zero_()  # a capture runs nothing
        return results

    def replay(self):
        for func, args, kwargs, made in self._steps:
            results = func(*args, **(kwargs or {}))
            if made is not None:
                for kept, fresh in zip(tree_leaves(made), tree_leaves(results), strict=True):
                    if isinstance(kept, Tensor):
                        kept.copy_(fresh)
