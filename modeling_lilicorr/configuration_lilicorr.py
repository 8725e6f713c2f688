"""Configuration of a LiLiCorr drafter: a DFlash backbone plus the head that picks a path through its candidates."""

import inspect
import os
import re
from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import PreTrainedConfig

from .checkpoint_files import CONFIG, local_folder, read_json
from .config_checks import REQUIRED, dtype_problem, setting_problems, shown
from .head_settings import HEAD_TYPES, default_head_config, head_problems

FORMAT_VERSION = 1
DRAFT_LENGTHS = ("whole", "adaptive")
DECODING = ("auto", "stock")
PROPOSALS = {
    "point": HEAD_TYPES,
    "sampled": ("dspark", "lilicorr", "dcoco", "selector"),
}  # with the heads that can make them


def default_target_layer_ids(num_target_layers: int, count: int) -> list[int]:
    """The decoder layers whose outputs a drafter reads: evenly spread over layers 1 … L-3, `[L // 2]` for one tap."""
    if count == 1:
        return [num_target_layers // 2]
    span = num_target_layers - 4
    return [round(1 + i * span / (count - 1)) for i in range(count)]


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
        decoding: `"auto"` decodes with this package's loop: trees, batches, exact stops; `"stock"` with Transformers'
            own assisted loop and chains.
        lookup: whether the text's own continuation joins the trees of that loop.
        max_nodes: nodes of a tree besides the anchor; `None` for what suits the device. `num_assistant_tokens`, given
            to `generate`, wins over it.
        proposal: what is drafted under sampling: `"point"`, the tokens of greedy decoding, which verification treats as
            certain; or, for heads with scores and `dspark`, `"sampled"`: a chain of tokens drawn from the head's own
            distribution, which Transformers' loop weighs against the target's. Either leaves the output's distribution
            as it is.
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
        decoding: str = "auto",
        lookup: bool = True,
        max_nodes: int | None = None,
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
        self.decoding = decoding
        self.lookup = lookup
        self.max_nodes = max_nodes
        self.proposal = proposal
        self.target_model = target_model
        self.training_data = training_data
        self.lilicorr_format = lilicorr_format
        kwargs.setdefault("tie_word_embeddings", False)
        super().__init__(**kwargs)

    @classmethod
    def get_config_dict(
        cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """As in Transformers, but what a folder holds gives one sentence, without asking the Hub.

        Raises:
            FileNotFoundError: `config.json` is missing.
            ValueError: it is damaged.
        """
        path: Path | None = Path(pretrained_model_name_or_path)
        if path is not None and not path.is_file():
            folder = local_folder(pretrained_model_name_or_path, kwargs.get("subfolder") or "")
            path = None if folder is None else folder / CONFIG
        if path is not None:
            content = read_json(path)
            for problem in _type_problems(content.get("model_type")):
                raise ValueError(problem)
            if "configuration_files" in content:
                raise ValueError(f"{path} names other files in configuration_files, which is not supported; remove it.")
            kwargs["local_files_only"] = True
        return super().get_config_dict(pretrained_model_name_or_path, **kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in Transformers, but what a file says is checked before anything is made of it, and nothing is guessed.

        A file cannot choose an attention implementation, for that may name code to fetch, nor anything else that
        Transformers acts on but a drafter has no use for. Keys that nobody knows are kept.

        Raises:
            ValueError: a key that gives the drafter its meaning is missing, or a setting cannot work.
        """
        settings = _own_settings(cls, config_dict)
        for problem in file_problems(settings):
            raise ValueError(problem)
        return super().from_dict(settings, **kwargs)

    @classmethod
    def for_target(cls, target_config: PreTrainedConfig, **overrides: Any) -> "LiLiCorrConfig":
        """A drafter for any decoder-only target: its widths, vocabulary and rope, its target layers spread evenly.

        Args:
            target_config: the target's configuration (its text part is used if it has several).
            **overrides: any argument of this class, or `tokenizer_size`, one more than the tokenizer's largest id: rows
                of the embedding beyond it are unused, and the first becomes the mask token.

        Raises:
            ValueError: for an encoder-decoder target, one without attention, a `num_target_layers` that is not its,
                or if no mask token can be chosen safely.
        """
        if getattr(target_config, "is_encoder_decoder", False):
            raise ValueError(
                f"A drafter needs a decoder-only target, got the encoder-decoder {target_config.model_type!r}."
            )
        text = target_config.get_text_config()
        tokenizer_size = overrides.pop("tokenizer_size", None)
        shape = {name: _first_layer(text, name) for name in ("vocab_size", "hidden_size", "num_attention_heads")}
        shape["num_hidden_layers"] = _first_layer(text, "num_hidden_layers")
        if absent := [name for name, value in shape.items() if type(value) is not int or value < 1]:
            raise ValueError(
                f"A drafter needs a target that attends to its whole text, but the configuration of "
                f"{text.model_type!r} names no {absent[0]}; choose a target with attention in its layers."
            )
        if getattr(text, "altup_num_inputs", 1) != 1:
            raise ValueError(
                f"A target of the family {text.model_type!r} carries several hidden states for each token, of which a "
                "drafter could read only one; choose another target."
            )
        heads, width = shape["num_attention_heads"], shape["hidden_size"]
        settings: dict[str, Any] = {
            "vocab_size": shape["vocab_size"],
            "hidden_size": width,
            "intermediate_size": _first_layer(text, "intermediate_size") or 4 * width,
            "num_attention_heads": heads,
            "num_key_value_heads": _first_layer(text, "num_key_value_heads") or heads,
            "head_dim": _first_layer(text, "head_dim") or width // heads,
            "rms_norm_eps": getattr(text, "rms_norm_eps", None) or 1e-6,
            "max_position_embeddings": _context_length(text),
            "rope_parameters": _plain_rope(getattr(text, "rope_parameters", None)),
            "num_hidden_layers": 5 if width >= 1024 else 3,
            "num_target_layers": shape["num_hidden_layers"],
            **{name: getattr(text, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")},
            "target_model": _hub_name(target_config.name_or_path or ""),
        }
        settings.update(overrides)
        if settings["num_target_layers"] != text.num_hidden_layers:
            raise ValueError(
                f"num_target_layers is {settings['num_target_layers']}, but the target has {text.num_hidden_layers} "
                "layers; leave it out."
            )
        if "target_layer_ids" not in overrides:
            layers = max(1, min(5, text.num_hidden_layers - 3))
            settings["target_layer_ids"] = default_target_layer_ids(text.num_hidden_layers, layers)
        if "mask_token_id" not in overrides:
            settings["mask_token_id"] = choose_mask_token(text, range(tokenizer_size or 0))
        return checked_config(settings)

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
        value = getattr(text, name, None)
    except RuntimeError:  # Transformers refuses to name one value for all layers
        value = getattr(text.per_layer_config[0], name, None)
    return value[0] if isinstance(value, list | tuple) and value else value


def _context_length(text: PreTrainedConfig) -> int:
    """How many positions the target knows; targets without a table of positions may not say."""
    for name in ("max_position_embeddings", "max_seq_len", "seq_length"):
        length = getattr(text, name, None)
        if type(length) is int and length > 0:
            return length
    return 2048


def _hub_name(name: str) -> str | None:
    """`name` if it reads as `owner/name` on the Hub and is no local folder."""
    return name if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) and not os.path.exists(name) else None


def _plain_rope(rope: dict[str, Any] | None) -> dict[str, Any] | None:
    """The target's rope settings; the full-attention set where a target keeps one for each layer type.

    With `rope_type` `default` a drafter rotates whole heads, as other DFlash runtimes do, whatever its target does.
    """
    if rope and "rope_theta" not in rope and "rope_type" not in rope:
        rope = rope.get("full_attention")
    if not rope:
        return None
    kept = {key: value for key, value in rope.items() if value is not None}
    if kept.get("rope_type", "default") == "default":
        kept.pop("partial_rotary_factor", None)
    return kept


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
    eos, pad = getattr(text, "eos_token_id", None), getattr(text, "pad_token_id", None)
    if pad is not None and pad >= 0 and pad not in (eos if isinstance(eos, list) else [eos]):
        return pad
    raise ValueError(
        f"No unused embedding row is known among {text.vocab_size} and the pad token is missing or ends texts; "
        "pass mask_token_id=<a reserved token's id> or tokenizer_size=max(tokenizer.get_vocab().values()) + 1."
    )


LEGACY_ROPE = ("rope_scaling", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
KEPT = (
    "model_type",
    "architectures",
    "auto_map",
    "dtype",
    "torch_dtype",
    "transformers_version",
    "tie_word_embeddings",
)
FILLED = ("rope_parameters", "layer_types", "target_layer_ids", "head_config")  # `None` takes a value from the others
ACTED_ON = {"transformers_weights", "fusion_config", "distributed_config", "configuration_files"} | {
    *("mlp_layer_types", "embed_dim", "num_heads", "text_config", "text_encoder", "encoder", "decoder", "generator")
}


def _own_settings(cls: type[LiLiCorrConfig], config_dict: dict[str, Any]) -> dict[str, Any]:
    """What of a file a drafter takes: its settings and unknown keys, not what Transformers alone would act on."""
    own = _defaults()
    return {
        key: value
        for key, value in config_dict.items()
        if key in own
        or key in KEPT
        or (key in LEGACY_ROPE and value is not None)
        or not (
            key.startswith("_")
            or key.endswith(("attn_implementation", "experts_implementation"))
            or key in ACTED_ON
            or key in LEGACY_ROPE
            or hasattr(cls, key)
        )
    }


def file_problems(settings: dict[str, Any]) -> Any:
    """Yield what is wrong with the settings of a `config.json` in our layout, most basic first."""
    yield from _type_problems(settings.get("model_type"))
    yield from _format_problems(settings.get("lilicorr_format"))
    for name in ("quantization_config", "compression_config", *LEGACY_ROPE):
        if settings.get(name) is not None:
            hint = "positions are set in rope_parameters" if name in LEGACY_ROPE else "drafters are not quantised"
            yield f"config.json sets {name}, which would be ignored ({hint}); remove it."
    missing = [name for name in REQUIRED if settings.get(name) is None]
    if missing:
        yield (
            f"config.json lacks {', '.join(missing)}; a guess would load as another drafter, so restore the file that "
            "was saved with the weights."
        )
    for name in ("dtype", "torch_dtype"):
        if problem := dtype_problem(settings.get(name)):
            yield problem
    yield from _problems(SimpleNamespace(**{**_defaults(), **settings}))


def _defaults() -> dict[str, Any]:
    """The constructor's."""
    parameters = inspect.signature(LiLiCorrConfig.__init__).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}


def checked_config(arguments: dict[str, Any]) -> LiLiCorrConfig:
    """The configuration of these arguments, which may come from a file.

    Raises:
        ValueError: one has a wrong type or range, or they do not fit together.
    """
    given = {**_defaults(), **arguments}
    for problem in setting_problems({k: v for k, v in given.items() if v is not None or k not in FILLED}):
        raise ValueError(problem)
    config = LiLiCorrConfig(**arguments)
    config.validate()
    return config


def _type_problems(model_type: Any) -> Any:
    if model_type != LiLiCorrConfig.model_type:
        yield (
            f"model_type is {shown(model_type)}, expected {LiLiCorrConfig.model_type!r}; a DFlash checkpoint loads "
            "with LiLiCorrModel.from_dflash."
        )


def _format_problems(version: Any) -> Any:
    if type(version) is int and version > FORMAT_VERSION:
        yield (
            f"This checkpoint has format {shown(version)}, this code reads up to {FORMAT_VERSION}; "
            "upgrade lilicorr or load the checkpoint's own code with trust_remote_code=True."
        )


def _problems(config: LiLiCorrConfig | SimpleNamespace) -> Any:
    """Yield what is wrong with `config`, most basic first."""
    yield from _format_problems(config.lilicorr_format)
    yield from setting_problems(vars(config))
    if config.head_type not in HEAD_TYPES:
        yield f"head_type is {shown(config.head_type)}, expected one of {', '.join(HEAD_TYPES)}."
    if config.draft_lengths not in DRAFT_LENGTHS:
        yield f"draft_lengths is {shown(config.draft_lengths)}, expected one of {', '.join(DRAFT_LENGTHS)}."
    if config.decoding not in DECODING:
        yield f"decoding is {shown(config.decoding)}, expected one of {', '.join(DECODING)}."
    if config.proposal not in PROPOSALS:
        yield f"proposal is {shown(config.proposal)}, expected one of {', '.join(PROPOSALS)}."
    elif config.head_type in HEAD_TYPES and config.head_type not in PROPOSALS[config.proposal]:
        able = ", ".join(PROPOSALS[config.proposal])
        yield f"proposal is {shown(config.proposal)}, which only {able} can make, not {config.head_type}; use 'point'."
    if config.block_size < 2:
        yield f"block_size is {config.block_size}, but a block needs the anchor and at least one slot: use 2 or more."
    if not 0 <= config.mask_token_id < config.vocab_size:
        last = config.vocab_size - 1
        yield f"mask_token_id {config.mask_token_id} is not a row of the target's embedding (0 … {last})."
    layers = config.target_layer_ids
    if not layers or sorted(set(layers)) != list(layers):
        yield f"target_layer_ids must be ascending and distinct, got {shown(list(layers))}."
    elif layers[0] < 0 or layers[-1] > config.num_target_layers - 2:
        yield (
            f"target_layer_ids {shown(list(layers))} must lie in 0 … {config.num_target_layers - 2}: the target has "
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
