"""The DFlash backbone: a block of masked rows reads target hidden states and proposes every slot in one pass.

Parameter names and shapes are z-lab's, so their checkpoints load unchanged: `fc`, `hidden_norm`, `layers.*`, `norm`.
"""

import copy
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    eager_attention_forward,
)

from .block_convolution import BlockConvolution
from .configuration_lilicorr import LiLiCorrConfig
from .draft_rotary import DraftRotaryEmbedding, Rotation, rotate


class RowStorage(Protocol):
    """Where the rows of a `DraftCache` may be instead."""

    def send_home(self) -> None:
        """Give them back."""
        ...


class DraftCache:
    """Keys and values of the committed context, one growing buffer a layer; each context row is projected once.

    The block's own rows are written behind the context for the time of one pass and overwritten by the next, so there
    is nothing to crop. The rows may be away in a captured graph's buffers (`draft_graphs.py`); they come home as soon
    as anything here needs them.
    """

    def __init__(self, num_layers: int) -> None:
        self.length = 0
        self.moved_to: RowStorage | None = None
        self._keys: list[Tensor | None] = [None] * num_layers
        self._values: list[Tensor | None] = [None] * num_layers
        self._positions: Tensor | None = None

    def place(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write rows `[1, kv_heads, new, head_dim]` behind the context; return keys and values of context and rows."""
        self._come_home()
        end = self.length + keys.shape[2]
        self._keys[layer] = _room_for(self._keys[layer], keys, self.length, end)
        self._values[layer] = _room_for(self._values[layer], values, self.length, end)
        stored_keys, stored_values = self._keys[layer], self._values[layer]
        assert stored_keys is not None and stored_values is not None
        stored_keys[:, :, self.length : end] = keys
        stored_values[:, :, self.length : end] = values
        return stored_keys[:, :, :end], stored_values[:, :, :end]

    def commit(self, positions: Tensor) -> None:
        """Keep the first `len(positions)` rows placed since the last commit as context; `positions [1, new]`."""
        self._positions = self.past(positions)
        self.length = self._positions.shape[1]

    @property
    def positions(self) -> Tensor | None:
        """Positions of the committed rows, `[1, length]`, or `None` while empty."""
        self._come_home()
        return self._positions

    def past(self, positions: Tensor) -> Tensor:
        """Positions of the context columns of a pass with new rows at `positions [1, new]`."""
        return positions if self.positions is None else torch.cat([self.positions, positions], dim=1)

    def newest(self, rows: Tensor) -> Tensor:
        """Of new rows `[1, new, ...]` the last, `[1, ...]`."""
        return rows[:, -1]

    def mask(self, size: int) -> Tensor | None:
        """Which columns a block of `size` rows may see, as `attention_mask` of `decode_block`; `None` for all."""
        return None

    def rows(self) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """Keys and values `[1, kv_heads, length, head_dim]` of every layer, and positions, of at least one row."""
        positions = self.positions
        assert positions is not None
        keys, values = (
            [rows[:, :, : self.length] for rows in part if rows is not None] for part in (self._keys, self._values)
        )
        return keys, values, positions

    def move_rows_to(self, storage: RowStorage) -> None:
        """Keep no rows here: they are in `storage`."""
        self.moved_to, self._positions = storage, None
        self._keys, self._values = [None] * len(self._keys), [None] * len(self._values)

    def take_back(self, keys: list[Tensor], values: list[Tensor], positions: Tensor) -> None:
        """Keep these as the rows, as `rows` gives them."""
        self.moved_to, self._positions = None, positions
        self._keys, self._values = [*keys], [*values]

    def _come_home(self) -> None:
        if self.moved_to is not None:
            self.moved_to.send_home()

    def __deepcopy__(self, memo: dict[int, Any]) -> "DraftCache":
        self._come_home()
        copied = object.__new__(type(self))
        copied.__dict__ = copy.deepcopy(self.__dict__, memo)
        return copied


def _room_for(buffer: Tensor | None, like: Tensor, length: int, end: int) -> Tensor:
    """`buffer` if it holds `end` rows, else a copy of its first `length` rows with room to double."""
    if buffer is not None and buffer.shape[2] >= end:
        return buffer
    grown = like.new_empty(like.shape[0], like.shape[1], max(64, 2 * end), like.shape[3])
    if buffer is not None:
        grown[:, :, :length] = buffer[:, :, :length]
    return grown


class DFlashAttention(nn.Module):
    """Queries from the block only; keys and values from the context and the block, through the same projections."""

    is_causal = False

    def __init__(self, config: LiLiCorrConfig, layer_idx: int) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        width, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(width, config.num_attention_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, width, bias=bias)
        self.q_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def _keys_values(self, states: Tensor, rotation: Rotation | None) -> tuple[Tensor, Tensor]:
        shape = (*states.shape[:2], -1, self.head_dim)
        keys = self.k_norm(self.k_proj(states).view(shape)).transpose(1, 2)
        keys = keys if rotation is None else rotate(keys, rotation)
        return keys, self.v_proj(states).view(shape).transpose(1, 2)

    def forward(
        self,
        block: Tensor,
        context: Tensor,
        block_rotation: Rotation,
        context_rotation: Rotation,
        attention_mask: Tensor | None,
        cache: DraftCache | None,
        late_rotation: Rotation | None = None,
    ) -> Tensor:
        """`block [rows, B, d]`, `context [batch, C, d]` with `rows` a multiple of `batch` (`batch` 1 with a cache).

        With `late_rotation`, that of all context in `cache` and of the block, keys are kept as they were before they
        turn. Returns `[rows, B, d]`.
        """
        rows, size = block.shape[:2]
        queries = self.q_norm(self.q_proj(block).view(rows, size, -1, self.head_dim)).transpose(1, 2)
        queries = rotate(queries, block_rotation)
        early = late_rotation is None
        keys, values = self._keys_values(block, block_rotation if early else None)
        context_keys, context_values = self._keys_values(context, context_rotation if early else None)
        if cache is None:
            keys = torch.cat([_repeat_rows(context_keys, rows), keys], dim=2)
            values = torch.cat([_repeat_rows(context_values, rows), values], dim=2)
        else:
            keys, values = cache.place(
                self.layer_idx, torch.cat([context_keys, keys], dim=2), torch.cat([context_values, values], dim=2)
            )
            keys = keys if late_rotation is None else rotate(keys, late_rotation)
        implementation = self.config._attn_implementation
        attention: Callable = eager_attention_forward
        if implementation != "eager":
            attention = ALL_ATTENTION_FUNCTIONS[implementation]
        elif attention_mask is not None:
            floor = torch.finfo(queries.dtype).min
            attention_mask = torch.zeros_like(attention_mask, dtype=queries.dtype).masked_fill(~attention_mask, floor)
        attended, _ = attention(
            self,
            queries,
            keys,
            values,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            is_causal=False,
        )
        return self.o_proj(attended.reshape(rows, size, -1))


def _repeat_rows(states: Tensor, rows: int) -> Tensor:
    """`[batch, ...]` to `[rows, ...]`, each entry repeated for the `rows // batch` blocks that share it."""
    batch = states.shape[0]
    return states[:, None].expand(batch, rows // batch, *states.shape[1:]).reshape(rows, *states.shape[1:])


class DFlashDecoderLayer(nn.Module):
    """Pre-norm attention and SwiGLU; the context enters attention as it is, shared by all layers.

    With `conv_kernel_size`, a convolution within each block stands around both.
    """

    def __init__(self, config: LiLiCorrConfig, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = DFlashAttention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        kernel_size, group = config.conv_kernel_size, config.conv_group_size
        self.attention_conv = BlockConvolution(config.hidden_size, kernel_size, group) if kernel_size else None
        self.mlp_conv = BlockConvolution(config.hidden_size, kernel_size, group) if kernel_size else None

    def forward(self, block: Tensor, size: int, *attention_arguments: object) -> Tensor:
        """`block [rows, n * size, d]` to the same shape: `n` blocks side by side where the mask parts them.

        The other arguments are those of `DFlashAttention.forward`.
        """
        entering = self.input_layernorm(block)
        if self.attention_conv is None or self.mlp_conv is None:
            block = block + self.self_attn(entering, *attention_arguments)
            return block + self.mlp(self.post_attention_layernorm(block))
        block = block + self.attention_conv(entering, lambda rows: self.self_attn(rows, *attention_arguments), size)
        return block + self.mlp_conv(self.post_attention_layernorm(block), self.mlp, size)


class DFlashPreTrainedModel(PreTrainedModel):
    """Ties the drafter to Transformers' loading, saving and attention machinery."""

    config: LiLiCorrConfig
    config_class = LiLiCorrConfig
    base_model_prefix = ""
    main_input_name = "noise_embeds"
    supports_gradient_checkpointing = False
    _supports_sdpa = True
    _supports_flash_attn = True
    _no_split_modules = ["DFlashDecoderLayer"]  # noqa: RUF012 (as Transformers declares it)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Initialise `module` where a checkpoint left it unset; heads bring `init_weights` for their own tables."""
        super()._init_weights(module)
        own = getattr(module, "init_weights_with", None)
        if own is not None:
            own(init)


class DFlashModel(DFlashPreTrainedModel):
    """The backbone. It owns neither embedding nor LM head: rows come embedded, states leave after the final norm."""

    def __init__(self, config: LiLiCorrConfig) -> None:
        super().__init__(config)
        layers = len(config.target_layer_ids)
        self.fc = nn.Linear(layers * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DFlashDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.rotary_emb = DraftRotaryEmbedding(config)  # type: ignore[arg-type]  # reads the same field names

    def project_context(self, target_hidden: Tensor) -> Tensor:
        """Target hidden states `[batch, C, layers * d]` to context rows `[batch, C, d]`."""
        return self.hidden_norm(self.fc(target_hidden))

    def decode_block(
        self,
        noise_embeds: Tensor,
        context: Tensor,
        block_positions: Tensor,
        context_positions: Tensor,
        attention_mask: Tensor | None = None,
        cache: DraftCache | None = None,
        size: int | None = None,
    ) -> Tensor:
        """Hidden states of blocks given projected context rows.

        Args:
            noise_embeds: `[rows, B, d]`, the target's embeddings of the anchor and of `B - 1` mask tokens.
            context: `[batch, C, d]` from `project_context`: the whole context, or with a `cache` its new rows only.
            block_positions: `[rows, B]`; context_positions: `[batch, C]` (absolute, int64).
            attention_mask: bool `[rows, 1, 1 or B, C + B]`, true where a key may be seen; `None` sees everything.
            cache: inference only, one row; committed rows of `context` are added to it.
            size: rows of one block where `B` rows hold several, which the mask parts.

        Returns:
            `[rows, B, d]` after the final norm.
        """
        late_rotation = None
        if cache is not None and self.rotary_emb.follows_length:
            everything = torch.cat([cache.past(context_positions), block_positions], dim=1)
            block_rotation, context_rotation, late_rotation = self.rotary_emb.of_pass(
                noise_embeds, block_positions, context_positions, everything
            )
        else:
            block_rotation, context_rotation = self.rotary_emb.of_pass(noise_embeds, block_positions, context_positions)
        rotations = (block_rotation, context_rotation)
        masks = {"full_attention": attention_mask}
        if "sliding_attention" in self.config.layer_types:
            past = context_positions if cache is None else cache.past(context_positions)
            window = self.config.sliding_window
            assert window is not None  # `validate` saw to it
            masks["sliding_attention"] = _window(attention_mask, past, block_positions, window)
        states = noise_embeds
        for kind, layer in zip(self.config.layer_types, self.layers, strict=True):
            states = layer(states, size or states.shape[1], context, *rotations, masks[kind], cache, late_rotation)
        if cache is not None:
            cache.commit(context_positions)
        return self.norm(states)

    def forward(
        self,
        noise_embeds: Tensor,
        context_hidden_states: Tensor,
        block_positions: Tensor,
        context_positions: Tensor,
        attention_mask: Tensor | None = None,
        cache: DraftCache | None = None,
    ) -> Tensor:
        """`project_context` on `context_hidden_states [batch, C, layers * d]`, then `decode_block`."""
        context = self.project_context(context_hidden_states)
        return self.decode_block(noise_embeds, context, block_positions, context_positions, attention_mask, cache)


def _window(mask: Tensor | None, context_positions: Tensor, block_positions: Tensor, window: int) -> Tensor:
    """Restrict context keys to the last `window` positions before each block row; the block itself stays visible."""
    rows, size = block_positions.shape
    past = _repeat_rows(context_positions, rows)
    near = past[:, None, :] > block_positions[:, :, None] - window  # [rows, B, C]
    near = torch.cat([near, near.new_ones(rows, size, size)], dim=-1)[:, None]
    return near if mask is None else near & mask
