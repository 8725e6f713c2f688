"""Rotary positions of the drafter: frequencies in fp32 whatever the drafter is cast to, and of one pass alike.

Some settings (`dynamic`, `longrope`) let the frequencies follow the length of the text. Here they follow the last
position of a pass and nothing else: no earlier text leaves a trace, context and block turn alike, and kept context keys
are turned anew in every pass, so that a kept context means what a fresh one does.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, rotate_half

Rotation = tuple[Tensor, Tensor]  # cos and sin, each [rows, length, rotated dimensions]
LENGTH_BOUND = ("dynamic", "longrope")


class DraftRotaryEmbedding(Qwen3RotaryEmbedding):
    """Qwen3's, but for the dtype of its frequencies and how they follow the length."""

    @property
    def follows_length(self) -> bool:
        """Whether the frequencies depend on the last position, so that keys cannot be kept turned."""
        return self.rope_type in LENGTH_BOUND

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "DraftRotaryEmbedding":
        """Move the frequencies, but never cast them: at bf16 their angles are off by a radian at position 1,000."""
        kept = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)
        for name, buffer in kept.items():
            applied = self._buffers[name]
            if applied is not None and applied.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(applied.device)
        return self

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> Rotation:
        """Cosine and sine for positions `[rows, length]` (int64), in the dtype of `x`: `[rows, length, rotated]`."""
        frequencies, scaling = self._buffers["inv_freq"], self.attention_scaling
        if self.follows_length:
            length = int(position_ids.max()) + 1
            frequencies, scaling = ROPE_INIT_FUNCTIONS[str(self.rope_type)](self.config, x.device, seq_len=length)
        assert frequencies is not None
        angles = position_ids[..., None].float() * frequencies.to(x.device, torch.float32)
        angles = torch.cat([angles, angles], dim=-1)
        return (angles.cos() * scaling).to(x.dtype), (angles.sin() * scaling).to(x.dtype)

    def of_pass(self, like: Tensor, *positions: Tensor) -> list[Rotation]:
        """Rotations for several tensors of positions `[rows, length]` in one pass, with the frequencies they share."""
        flat = torch.cat([each.reshape(1, -1) for each in positions], dim=1)
        cos, sin = self(like, flat)
        sizes, shapes = [each.numel() for each in positions], [each.shape for each in positions]
        parts: Any = zip(cos.split(sizes, dim=1), sin.split(sizes, dim=1), shapes, strict=True)
        return [(c.reshape(*shape, -1), s.reshape(*shape, -1)) for c, s, shape in parts]


def rotate(states: Tensor, rotation: Rotation) -> Tensor:
    """Turn `states [rows, heads, length, head_dim]`; dimensions behind the rotated ones stay as they are."""
    cos, sin = rotation[0][:, None], rotation[1][:, None]
    turned = cos.shape[-1]
    if turned == states.shape[-1]:
        return states * cos + rotate_half(states) * sin
    turning, still = states[..., :turned], states[..., turned:]
    return torch.cat([turning * cos + rotate_half(turning) * sin, still], dim=-1)
