"""Configuration of a LiLiCorr drafter: a DFlash backbone plus the head that picks a path through its candidates."""

import os
import re
from collections.abc import Collection
from typing import Any

from transformers import PreTrainedConfig

from .head_settings import HEAD_TYPES, default_head_config, head_problems

FORMAT_VERSION = 1
DRAFT_LENGTHS = ("whole", "adaptive")
PROPOSALS = {"point": HEAD_TYPES, "sampled": ("dspark",)}  # with the heads that can make them


def default_target_layer_ids(num_target_layers: int, num_taps: int) -> list[int]:
    """The decoder layers whose outputs a drafter reads: evenly spread over layers 1 … L-3, `[L // 2]` for one tap."""
    if num_taps == 1:
        return [num_target_layers // 2]
    span = num_target_layers - 4
    return [round(1 + i * span / (num_taps - 1)) for i in range(num_taps)]


class LiLiCorrConfig(PreTrainedConfig):
    r"""Shape of a drafter and of the target it belongs to.

    Args:
        vocab_size, hidden_size: the target's; the drafter borrows its embedding and LM head at run time.
        intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim, hidden_act,
        rms_norm_eps, max_position_embeddings, rope_parameters, attention_bias, attention_dropout,
        initializer_range, layer_types, sliding_window: the Qwen3-style backbone, named as Transformers names them.
        block_size: input rows of one block: the anchor and `block_size - 1` drafted slots.
        mask_token_id: an existing row of the target's embedding that fills the slots to be drafted.
        target_layer_ids: zero-based decoder layers of the target whose outputs are read, ascending.
        num_target_layers: how many decoder layers the target has.
        conv_kernel_size, conv_group_size: rows that DFlash 2's convolution within a block spans, and channels that
            share what it makes of a row; both 0 for a backbone without.
        head_type: `"lilicorr"`, a rival's head (`"dcoco"`, `"domino"`, `"dspark"`, `"selector"`, `"xpress"`), or
            `"none"` (each slot's most likely token: vanilla DFlash).
        head_config: the head's own settings, all required: for `lilicorr` `num_candidates` (K), `hidden_size`,
            `num_layers`, `num_heads`, `intermediate_size`, `factor_dim` (d_e), `logit_scale` (sigma), `vector_eps`,
            and optionally `residual` and `walk` (`greedy` or `longest`);
            for the others the keys of `default_head_config`, which the head's class explains.
        draft_lengths: `"whole"` drafts whole blocks; `"adaptive"` lets greedy decoding on a CPU draft fewer tokens
            where that is faster. `num_assistant_tokens` and its schedule, given to `generate`, win over it.
        proposal: what is drafted under sampling: `"point"`, the tokens of greedy decoding, which verification treats as
            certain; or, for `dspark`, `"sampled"`: tokens drawn from its own distribution, which verification weighs
            against the target's. Either leaves the output's distribution as it is.
        target_model: the target's name on the Hub, if it has one; for the model card only.
        training_data: what the drafter learned from: counts, and where known the chat template's options (such as
            `enable_thinking`), the target's revision and how its answers were decoded; for the model card only.
        lilicorr_format: version of this layout.
    """

    model_type = "lilicorr"

    def __init__(
        self,
        vocab_size: int = 151936,
        hidden_size: int = 4096,
        intermediate_size: int = 12288,
        num_hidden_layers: int = 5,
        num_attention_heads: int = 32,
        num_key_value_heads: int = 8,
        head_dim: int = 128,
        hidden_act: str = "silu",
        rms_norm_eps: float = 1e-6,
        max_position_embeddings: int = 40960,
        rope_parameters: dict[str, Any] | None = None,
        attention_bias: bool = False,
        attention_dropout: float = 0.0,
        initializer_range: float = 0.02,
        layer_types: list[str] | None = None,
        sliding_window: int | None = None,
        block_size: int = 16,
        mask_token_id: int = 151669,
        target_layer_ids: list[int] | None = None,
        num_target_layers: int = 36,
        conv_kernel_size: int = 0,
        conv_group_size: int = 0,
        head_type: str = "lilicorr",
        head_config: dict[str, Any] | None = None,
        draft_lengths: str = "whole",
        proposal: str = "point",
        target_model: str | None = None,
        training_data: dict[str, Any] | None = None,
        lilicorr_format: int = FORMAT_VERSION,
        **kwargs: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim
        self.hidden_act = hidden_act
        self.rms_norm_eps = rms_norm_eps
        self.max_position_embeddings = max_position_embeddings
        self.rope_parameters = rope_parameters or {"rope_type": "default", "rope_theta": 1_000_000.0}
        self.attention_bias = attention_bias
        self.attention_dropout = attention_dropout
        self.initializer_range = initializer_range
        self.layer_types = layer_types or ["full_attention"] * num_hidden_layers
        self.sliding_window = sliding_window
        self.block_size = block_size
        self.mask_token_id = mask_token_id
        if target_layer_ids is None:
            target_layer_ids = default_target_layer_ids(num_target_layers, num_hidden_layers)
        self.target_layer_ids = target_layer_ids
        self.num_target_layers = num_target_layers
        self.conv_kernel_size = conv_kernel_size
        self.conv_group_size = conv_group_size
        self.head_type = head_type
        self.head_config = default_head_config(head_type, hidden_size) if head_config is None else head_config
        self.draft_lengths = draft_lengths
        self.proposal = proposal
        self.target_model = target_model
        self.training_data = training_data
        self.lilicorr_format = lilicorr_format
        kwargs.setdefault("tie_word_embeddings", False)
        super().__init__(**kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in Transformers, but a file cannot choose an attention implementation, for that may name code to fetch."""
        kept = {key: value for key, value in config_dict.items() if not key.endswith("attn_implementation")}
        return super().from_dict(kept, **kwargs)

    @classmethod
    def for_target(cls, target_config: PreTrainedConfig, **overrides: Any) -> "LiLiCorrConfig":
        """A drafter for any decoder-only target: its widths, vocabulary and rope, taps spread over its layers.

        Args:
            target_config: the target's configuration (its text part is used if it has several).
            **overrides: any argument of this class, or `tokenizer_size`, one more than the tokenizer's largest id: rows
                of the embedding beyond it are unused, and the first becomes the mask token.

        Raises:
            ValueError: for an encoder-decoder target, a `num_target_layers` that is not its, or if no mask token can
                be chosen safely.
        """
        if getattr(target_config, "is_encoder_decoder", False):
            raise ValueError(
                f"A drafter needs a decoder-only target, got the encoder-decoder {target_config.model_type!r}."
            )
        text = target_config.get_text_config()
        tokenizer_size = overrides.pop("tokenizer_size", None)
        heads = text.num_attention_heads
        settings: dict[str, Any] = {
            "vocab_size": text.vocab_size,
            "hidden_size": text.hidden_size,
            "intermediate_size": _first_layer(text, "intermediate_size") or 4 * text.hidden_size,
            "num_attention_heads": heads,
            "num_key_value_heads": _first_layer(text, "num_key_value_heads") or heads,
            "head_dim": _first_layer(text, "head_dim") or text.hidden_size // heads,
            "rms_norm_eps": getattr(text, "rms_norm_eps", 1e-6),
            "max_position_embeddings": text.max_position_embeddings,
            "rope_parameters": _plain_rope(getattr(text, "rope_parameters", None)),
            "num_hidden_layers": 5 if text.hidden_size >= 1024 else 3,
            "num_target_layers": text.num_hidden_layers,
            "bos_token_id": text.bos_token_id,
            "eos_token_id": text.eos_token_id,
            "pad_token_id": text.pad_token_id,
            "target_model": _hub_name(target_config.name_or_path or ""),
        }
        settings.update(overrides)
        if settings["num_target_layers"] != text.num_hidden_layers:
            raise ValueError(
                f"num_target_layers is {settings['num_target_layers']}, but the target has {text.num_hidden_layers} "
                "layers; leave it out."
            )
        if "target_layer_ids" not in overrides:
            taps = max(1, min(5, text.num_hidden_layers - 3))
            settings["target_layer_ids"] = default_target_layer_ids(text.num_hidden_layers, taps)
        if "mask_token_id" not in overrides:
            settings["mask_token_id"] = choose_mask_token(text, range(tokenizer_size or 0))
        config = cls(**settings)
        config.validate()
        return config

    @property
    def num_slots(self) -> int:
        """Drafted slots of a block, `block_size - 1`."""
        return self.block_size - 1

    def validate(self) -> None:
        """Raise a `ValueError` that says in one sentence what in this configuration cannot work."""
        for problem in _problems(self):
            raise ValueError(problem)


def _first_layer(text: PreTrainedConfig, name: str) -> Any:
    """`text.name`, the first layer's where layers differ, or `None`."""
    try:
        return getattr(text, name, None)
    except RuntimeError:  # Transformers refuses to name one value for all layers
        return getattr(text.per_layer_config[0], name, None)


def _hub_name(name: str) -> str | None:
    """`name` if it reads as `owner/name` on the Hub and is no local folder."""
    return name if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) and not os.path.exists(name) else None


def _plain_rope(rope: dict[str, Any] | None) -> dict[str, Any] | None:
    """The target's rope settings; the full-attention set where a target keeps one for each layer type."""
    if rope and "rope_theta" not in rope and "rope_type" not in rope:
        rope = rope.get("full_attention")
    return dict(rope) if rope else None


def choose_mask_token(text: PreTrainedConfig, used: Collection[int] = ()) -> int:
    """The embedding row that stands for a slot yet to be drafted, for a target of configuration `text`.

    With `used`, the ids of all tokens that the tokenizer or the data hold, it is the first row behind them, else the
    first one in a gap between them; without, or if there is none, the pad token.

    Raises:
        ValueError: if there is no such row, and the pad token is missing or ends texts.
    """
    taken = set(used)
    unused = [row for row in range(text.vocab_size) if row not in taken] if taken else []
    if unused:
        return next((row for row in unused if row > max(taken)), unused[0])
    eos = text.eos_token_id if isinstance(text.eos_token_id, list) else [text.eos_token_id]
    if text.pad_token_id is not None and text.pad_token_id >= 0 and text.pad_token_id not in eos:
        return text.pad_token_id
    raise ValueError(
        f"No unused embedding row is known among {text.vocab_size} and the pad token is missing or ends texts; "
        "pass mask_token_id=<a reserved token's id> or tokenizer_size=max(tokenizer.get_vocab().values()) + 1."
    )


def _problems(config: LiLiCorrConfig) -> Any:
    """Yield what is wrong with `config`, most basic first."""
    if config.lilicorr_format > FORMAT_VERSION:
        yield (
            f"This checkpoint has format {config.lilicorr_format}, this code reads up to {FORMAT_VERSION}; "
            "upgrade lilicorr or load the checkpoint's own code with trust_remote_code=True."
        )
    if config.head_type not in HEAD_TYPES:
        yield f"head_type is {config.head_type!r}, expected one of {', '.join(HEAD_TYPES)}."
    if config.draft_lengths not in DRAFT_LENGTHS:
        yield f"draft_lengths is {config.draft_lengths!r}, expected one of {', '.join(DRAFT_LENGTHS)}."
    if config.proposal not in PROPOSALS:
        yield f"proposal is {config.proposal!r}, expected one of {', '.join(PROPOSALS)}."
    elif config.head_type in HEAD_TYPES and config.head_type not in PROPOSALS[config.proposal]:
        able = ", ".join(PROPOSALS[config.proposal])
        yield f"proposal is {config.proposal!r}, which only {able} can make, not {config.head_type}; use 'point'."
    if config.block_size < 2:
        yield f"block_size is {config.block_size}, but a block needs the anchor and at least one slot: use 2 or more."
    if not 0 <= config.mask_token_id < config.vocab_size:
        last = config.vocab_size - 1
        yield f"mask_token_id {config.mask_token_id} is not a row of the target's embedding (0 … {last})."
    taps = config.target_layer_ids
    if not taps or sorted(set(taps)) != list(taps):
        yield f"target_layer_ids must be ascending and distinct, got {taps}."
    elif taps[0] < 0 or taps[-1] > config.num_target_layers - 2:
        yield (
            f"target_layer_ids {taps} must lie in 0 … {config.num_target_layers - 2}: the target has "
            f"{config.num_target_layers} layers and its last one is only visible after the final norm."
        )
    if config.num_attention_heads < 1 or config.num_key_value_heads < 1:
        yield (
            f"num_attention_heads is {config.num_attention_heads} and num_key_value_heads "
            f"{config.num_key_value_heads}, expected 1 or more of each."
        )
    elif config.num_attention_heads % config.num_key_value_heads:
        yield (
            f"num_attention_heads {config.num_attention_heads} is not a multiple of "
            f"num_key_value_heads {config.num_key_value_heads}."
        )
    if len(config.layer_types) != config.num_hidden_layers:
        yield f"layer_types names {len(config.layer_types)} layers, num_hidden_layers is {config.num_hidden_layers}."
    for kind in set(config.layer_types) - {"full_attention", "sliding_attention"}:
        yield f"layer type {kind!r} is not supported; use full_attention or sliding_attention."
    if "sliding_attention" in config.layer_types and not config.sliding_window:
        yield "layer_types has sliding_attention, so sliding_window must be a positive number of tokens."
    if getattr(config, "is_causal", False):
        yield "is_causal is true, but blocks here are bidirectional; this drafter was trained for another runtime."
    span, group = config.conv_kernel_size, config.conv_group_size
    if (
        not 0 <= span <= config.block_size
        or group < 0
        or bool(span) != bool(group)
        or (span and config.hidden_size % group)
    ):
        yield (
            f"conv_kernel_size is {span} and conv_group_size {group}, expected 0 and 0, or 1 to the block's "
            f"{config.block_size} rows and a divisor of hidden_size {config.hidden_size}."
        )
    if config.head_type in HEAD_TYPES:
        yield from head_problems(config.head_type, config.head_config, config.vocab_size)
