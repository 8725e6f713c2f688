"""DFlash 2's grouped dynamic convolution , which a backbone may put around its sublayers.

Parameter names and shapes are those of its serving code: `base_kernel [2, taps, d]` and `kernel_projection`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad


class BlockConvolution(nn.Module):
    """Mixes every row of a block with the `taps - 1` rows before it, on the way into a sublayer and on the way out.

    A channel's kernel is its fixed one plus what `kernel_projection` makes of the row that enters, one number for each
    group of channels. Fresh, it changes nothing.
    """

    def __init__(self, width: int, taps: int, group_size: int) -> None:
        super().__init__()
        self.taps, self.groups = taps, width // group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, width))
        self.kernel_projection = nn.Linear(width, 2 * taps * self.groups, bias=False)

    def init_weights_with(self, init: Any) -> None:
        """The identity: tap 0 is the row itself."""
        identity = torch.zeros_like(self.base_kernel)
        identity[:, 0] = 1.0
        init.copy_(self.base_kernel, identity)
        init.zeros_(self.kernel_projection.weight)

    def forward(self, states: Tensor, sublayer: Callable[[Tensor], Tensor], size: int) -> Tensor:
        """`states [rows, n * size, d]`, `n` blocks side by side, through `sublayer`; returns the same shape."""
        kernels = self.kernel_projection(states).view(-1, size, 2, self.taps, self.groups, 1)
        entering = self._mixed(states, kernels[:, :, 0], 0)
        return self._mixed(sublayer(entering), kernels[:, :, 1], 1)

    def _mixed(self, states: Tensor, dynamic: Tensor, side: int) -> Tensor:
        """`states [rows, n * size, d]` by the kernels of one side; `dynamic [rows * n, size, taps, groups, 1]`."""
        blocks, size = dynamic.shape[:2]
        rows = states.reshape(blocks, size, self.groups, -1)
        kernel = self.base_kernel[side].view(self.taps, self.groups, -1) + dynamic
        mixed = kernel[:, :, 0] * rows
        for tap in range(1, min(self.taps, size)):
            before = kernel[:, tap:, tap] * rows[:, :-tap]
            mixed = mixed + pad(before, (0, 0, 0, 0, tap, 0))
        return mixed.view(states.shape)
