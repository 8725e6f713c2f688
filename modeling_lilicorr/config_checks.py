"""Types and ranges of a drafter's settings, looked at before anything is built from them.

A `config.json` comes from anywhere. What it says is checked here setting by setting, in bounds far beyond any drafter
that exists, so that whatever is built afterwards is small until its weights are known to be there. What must fit
together is checked in `configuration_lilicorr.py`, a head's own settings in `head_settings.py`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from transformers.activations import ACT2FN

DTYPES = ("float32", "bfloat16", "float16", "float64")
LAYER_TYPES = ("full_attention", "sliding_attention")
WIDEST = 1 << 20  # of any width

# What a file must say, since nothing else tells a drafter that means something else: a default would load, and draft
# nothing that its target accepts.
REQUIRED = (
    "lilicorr_format",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "rope_parameters",
    "attention_bias",
    "layer_types",
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "num_target_layers",
    "head_type",
    "head_config",
)


@dataclass(frozen=True)
class Whole:
    """A whole number; a bound that another check explains better is left out."""

    low: int | None = None
    high: int | None = None
    optional: bool = False

    def __str__(self) -> str:
        low = "" if self.low is None else f" from {self.low:,}"
        high = "" if self.high is None else f" up to {self.high:,}"
        return f"a whole number{low}{high}"

    def fits(self, value: Any) -> bool:
        """Whether `value` is one."""
        if type(value) is not int:
            return False
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high)


@dataclass(frozen=True)
class Real:
    """A finite number above `low`, or from it on where that is `included`, and up to `high`."""

    low: float = 0.0
    high: float = 1e12
    included: bool = False
    optional: bool = False

    def __str__(self) -> str:
        return f"a number {'from' if self.included else 'above'} {self.low:g} up to {self.high:g}"

    def fits(self, value: Any) -> bool:
        """Whether `value` is one."""
        if type(value) not in (int, float) or not -1e300 < value < 1e300:  # also false for NaN
            return False
        return (value >= self.low if self.included else value > self.low) and value <= self.high


@dataclass(frozen=True)
class Type:
    """A value of the Python type that JSON gives for it."""

    kind: type
    said: str
    optional: bool = False

    def __str__(self) -> str:
        return self.said

    def fits(self, value: Any) -> bool:
        """Whether `value` is one."""
        return type(value) is self.kind


@dataclass(frozen=True)
class Each:
    """A list whose entries are all of one kind; at most so many that a mistake cannot be costly."""

    entry: Whole | Real | Type
    most: int = 1 << 16
    optional: bool = False

    def __str__(self) -> str:
        return f"a list, each entry {self.entry}"

    def fits(self, value: Any) -> bool:
        """Whether `value` is one."""
        return isinstance(value, list | tuple) and len(value) <= self.most and all(map(self.entry.fits, value))


@dataclass(frozen=True)
class TokenIds:
    """One token id, a list of them, or none."""

    optional: bool = True

    def __str__(self) -> str:
        return "a token id, a list of token ids, or null"

    def fits(self, value: Any) -> bool:
        """Whether `value` is one."""
        return type(value) is int or Each(Whole()).fits(value)


Kind = Whole | Real | Type | Each | TokenIds
TEXT, FLAG, MAPPING = Type(str, "a text"), Type(bool, "true or false"), Type(dict, "a mapping")

KINDS: dict[str, Kind] = {
    "lilicorr_format": Whole(1),
    "vocab_size": Whole(1, 1 << 28),
    "hidden_size": Whole(1, WIDEST),
    "intermediate_size": Whole(1, WIDEST),
    "num_hidden_layers": Whole(1, 1 << 10),
    "num_attention_heads": Whole(None, 1 << 14),
    "num_key_value_heads": Whole(None, 1 << 14),
    "head_dim": Whole(2, 1 << 14),
    "hidden_act": TEXT,
    "rms_norm_eps": Real(0, 1),
    "max_position_embeddings": Whole(1, 1 << 40),
    "rope_parameters": MAPPING,
    "attention_bias": FLAG,
    "attention_dropout": Real(0, 1, included=True),
    "initializer_range": Real(0, 1e3, included=True),
    "layer_types": Each(TEXT),
    "sliding_window": Whole(1, 1 << 40, optional=True),
    "block_size": Whole(None, 1 << 12),
    "mask_token_id": Whole(),
    "target_layer_ids": Each(Whole(), 1 << 10),
    "num_target_layers": Whole(1, 1 << 16),
    "conv_kernel_size": Whole(),
    "conv_group_size": Whole(),
    "head_type": TEXT,
    "head_config": MAPPING,
    "draft_lengths": TEXT,
    "decoding": TEXT,
    "lookup": FLAG,
    "max_nodes": Whole(0, 1 << 16, optional=True),
    "proposal": TEXT,
    "target_model": Type(str, "a text or null", optional=True),
    "training_data": Type(dict, "a mapping or null", optional=True),
    "architectures": Each(TEXT, optional=True),
    "auto_map": Type(dict, "a mapping or null", optional=True),
    "transformers_version": Type(str, "a text or null", optional=True),
    "tie_word_embeddings": FLAG,
    "bos_token_id": TokenIds(),
    "eos_token_id": TokenIds(),
    "pad_token_id": TokenIds(),
}

_FACTOR: dict[str, Kind] = {"factor": Real(0, 1e6)}
_LENGTH: dict[str, Kind] = {"original_max_position_embeddings": Whole(2, 1 << 40)}
_OPTIONAL_REAL = Real(0, 1e6, optional=True)
ROPE_KINDS: dict[str, dict[str, Kind]] = {
    "default": {},
    "linear": _FACTOR,
    "dynamic": _FACTOR,
    "proportional": {},
    "yarn": {
        **_FACTOR,
        **_LENGTH,
        **dict.fromkeys(("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"), _OPTIONAL_REAL),
        "truncate": Type(bool, "true or false", optional=True),
    },
    "llama3": {**_FACTOR, **_LENGTH, "low_freq_factor": Real(0, 1e6), "high_freq_factor": Real(0, 1e6)},
    "longrope": {
        **_LENGTH,
        "short_factor": Each(Real(0, 1e6), 1 << 14),
        "long_factor": Each(Real(0, 1e6), 1 << 14),
        "factor": _OPTIONAL_REAL,
        "attention_factor": _OPTIONAL_REAL,
    },
}


def kind_problem(name: str, value: Any, kind: Kind) -> str | None:
    """What is wrong with the `value` of the setting `name`, in one sentence, or `None`."""
    if kind.fits(value) or (value is None and kind.optional):
        return None
    return f"{name} is {shown(value)}, expected {kind}."


def shown(value: Any) -> str:
    """`value` as an error may quote it: short, in one line."""
    text = ascii(value) if not isinstance(value, int) or abs(value) < 1e300 else "a number of hundreds of digits"
    return text if len(text) <= 80 else f"{text[:77]}..."


def setting_problems(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong with the type or range of each of a drafter's settings, of those that `settings` holds.

    It must hold `head_dim` and `num_hidden_layers`.
    """
    for name, kind in KINDS.items():
        if name in settings and (problem := kind_problem(name, settings[name], kind)):
            yield problem
    if settings.get("hidden_act", "silu") not in ACT2FN:
        yield f"hidden_act is {shown(settings['hidden_act'])}, which names no activation of Transformers."
    layer_types = settings.get("layer_types")
    for kind in layer_types or ():
        if kind not in LAYER_TYPES:
            yield f"layer type {shown(kind)} is not supported; use {' or '.join(LAYER_TYPES)}."
    if layer_types is not None and len(layer_types) != settings["num_hidden_layers"]:
        yield f"layer_types names {len(layer_types)} layers, num_hidden_layers is {settings['num_hidden_layers']}."
    if settings["head_dim"] % 2:
        yield f"head_dim is {settings['head_dim']}, expected an even number, since its dimensions rotate in pairs."
    if "rope_parameters" in settings:
        yield from _rope_problems(settings["rope_parameters"], settings["head_dim"])


def _rope_problems(rope: dict[str, Any], head_dim: int) -> Iterator[str]:
    rope_type = rope.get("rope_type", "default")
    if not isinstance(rope_type, str) or rope_type not in ROPE_KINDS:
        yield f"rope_parameters has rope_type {shown(rope_type)}, expected one of {', '.join(ROPE_KINDS)}."
        return
    kinds: dict[str, Kind] = {"rope_theta": Real(1, 1e30), **ROPE_KINDS[rope_type]}
    if "partial_rotary_factor" in rope:
        kinds["partial_rotary_factor"] = Real(0, 1)
    for name, kind in kinds.items():
        if name not in rope and not kind.optional:
            yield f"rope_parameters lacks {name}, which rope_type {rope_type!r} needs; positions cannot do without."
            return
        if problem := kind_problem(f"{name} in rope_parameters", rope.get(name), kind):
            yield problem
            return
    share = rope.get("partial_rotary_factor", 1.0)
    size = int(head_dim * share)
    least = 3 if rope_type == "dynamic" else 1
    if size < least:
        yield f"partial_rotary_factor {share} lets {size} of head_dim {head_dim} rotate, expected {least} or more."
    elif rope_type == "llama3" and rope["high_freq_factor"] <= rope["low_freq_factor"]:
        yield f"high_freq_factor in rope_parameters is {rope['high_freq_factor']}, expected more than low_freq_factor."
    elif rope_type == "longrope":
        for name in ("short_factor", "long_factor"):
            if len(rope[name]) != (size + 1) // 2:
                yield f"{name} in rope_parameters holds {len(rope[name])} numbers, expected {(size + 1) // 2}."


def dtype_problem(value: Any) -> str | None:
    """What is wrong with the `dtype` of a file, or `None`."""
    if value is None or (isinstance(value, str) and value.removeprefix("torch.") in DTYPES):
        return None
    return f"dtype is {shown(value)}, expected one of {', '.join(DTYPES)}."
