"""What a drafter borrows of its target for one call: embedding, LM head, and the hidden states that it reads."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from .transformers_api import SELECTS_STATES

if TYPE_CHECKING:
    from ..modeling_lilicorr.modeling_lilicorr import LiLiCorrModel

# Rows from which MKL's fp32 product with a vocabulary-sized matrix is fast again: 15 take it over twice as long as 16.
_FULL_TILE = 16


class TargetParts:
    """Embedding and LM head of `target` as `drafter` calls them, on the drafter's device.

    Args:
        all_states: whether the caller wants every hidden state, so that the target must record all of them.
    """

    def __init__(self, drafter: "LiLiCorrModel", target: PreTrainedModel, all_states: bool = False) -> None:
        self._embedding: Any = target.get_input_embeddings()
        self.lm_head: Any = target.get_output_embeddings()
        self._device, self._dtype, self._target_dtype = drafter.device, drafter.dtype, target.dtype
        on_cpu = drafter.device.type == target.device.type == "cpu"
        self._fast_logits = drafter.fast_logits.of(self.lm_head) if on_cpu else None
        self.graphs = drafter.graphs.of(drafter, self._embedding, self.lm_head)
        self._layers = [layer + 1 for layer in drafter.config.target_layer_ids]  # entry 0 is the embedding's output
        # Transformers cannot give a person all states of a pass that recorded only some of them.
        self.output_hidden_states: Any = self._layers if SELECTS_STATES and not all_states else True

    def embed(self, ids: Tensor) -> Tensor:
        """`ids [...]` (int64) to `[..., d]`."""
        return self._embedding(_beside(ids, self._embedding.weight)).to(self._device)

    def project(self, hidden: Tensor) -> Tensor:
        """`hidden [N, S, d]` to logits `[N, S, vocab]`."""
        if self._fast_logits is not None:
            return self._fast_logits(hidden)
        weight = self.lm_head.weight
        dtype = weight.dtype if weight.is_floating_point() else self._target_dtype  # quantised tables
        hidden, shape = _beside(hidden, weight).to(dtype), hidden.shape
        rows = hidden.flatten(0, -2)
        count = rows.shape[0]
        if rows.device.type == "cpu" and dtype == torch.float32 and 3 < count < _FULL_TILE:
            rows = functional.pad(rows, (0, 0, 0, _FULL_TILE - count))
        return self.lm_head(rows)[:count].unflatten(0, shape[:-1]).to(self._device)

    def rows_of(self, hidden_states: tuple[Tensor, ...]) -> int:
        """How many rows a pass with these states had."""
        return hidden_states[self._layers[0]].shape[1]

    def target_hidden_states(self, hidden_states: tuple[Tensor, ...], pick: Callable[[Tensor], Tensor]) -> Tensor:
        """The states that the drafter reads, `[..., layers * d]`, of what `pick` takes of each `[batch, rows, d]`."""
        picked = [pick(hidden_states[layer]).to(self._device, self._dtype) for layer in self._layers]
        return torch.cat(picked, dim=-1)


def _beside(tensor: Tensor, weight: Tensor) -> Tensor:
    """`tensor` on the device of `weight`; the hooks of an offloaded (meta) weight move their input themselves."""
    return tensor if weight.is_meta else tensor.to(weight.device)
