"""Linear layers of a few rows in fp32 on a CPU, as verifying a tree needs them: the same products, the other way round.

MKL multiplies `x @ W.T` for 2 to about 40 rows by copying the weights into another order first, which takes longer than
the product. `W @ x.T` reads them once as they lie (`benchmarks/few_rows.py`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

MOST_ROWS = 40


def multiplies_few_rows() -> bool:
    """Whether this installation of torch gains by it: whether its fp32 products are MKL's."""
    return torch.backends.mkl.is_available()


def few_rows_linear(layer: nn.Linear, x: Tensor) -> Tensor:
    """What `layer` computes of `x [..., in]`: `[..., out]`, contiguous, as `W @ x.T` for few rows.

    Equal to the layer's own product but for the order of summation.
    """
    count = x.numel() // x.shape[-1] if x.shape[-1] else 0
    if not 1 < count <= MOST_ROWS or x.dtype != torch.float32 or torch.is_grad_enabled():
        return nn.Linear.forward(layer, x)
    product = torch.mm(layer.weight, x.reshape(count, -1).t())
    if layer.bias is not None:
        product += layer.bias[:, None]
    return product.t().contiguous().view(*x.shape[:-1], -1)


def _has_own_forward(module: nn.Module) -> bool:
    """Whether nobody but another thread of ours has replaced the module's `forward`."""
    replaced = vars(module).get("forward")
    return replaced is None or getattr(replaced, "func", None) is few_rows_linear


class FewRows:
    """The linear layers of some models that multiply faster the other way round here; none on other devices.

    Layers whose `forward` somebody has replaced (as offloading does) or whose class is another are left alone.

    Args:
        models: whose layers they are; compiled ones, and those whose `forward` somebody has replaced, are left alone.
    """

    def __init__(self, *models: nn.Module) -> None:
        self._layers = [
            layer
            for model in models
            if multiplies_few_rows() and _has_own_forward(model) and getattr(model, "_compiled_call_impl", None) is None
            for layer in model.modules()
            if type(layer) is nn.Linear
            and layer.weight.device.type == "cpu"
            and layer.weight.dtype == torch.float32
            and _has_own_forward(layer)
        ]

    @contextmanager
    def multiplied(self) -> Iterator[None]:
        """Within it, the layers compute `few_rows_linear`.

        Threads may share the models: whichever product a layer takes, the result is the same.
        """
        for layer in self._layers:
            vars(layer)["forward"] = partial(few_rows_linear, layer)
        try:
            yield
        finally:
            for layer in self._layers:
                vars(layer).pop("forward", None)
