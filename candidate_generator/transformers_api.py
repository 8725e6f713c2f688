"""What this room needs of Transformers beyond its documented face, in one place: releases differ in all of it.

| what | where it differs |
|---|---|
| keyword of a model's cache | `past_key_values` in 5.17, `cache` in 5.24 |
| `output_hidden_states` | a list selects entries of the full tuple in 5.24, not in 5.17 |
| `activate_past_recording` | sliding layers keep what a crop needs; 5.25 also asks how many recurrent states to keep |
| `GenerateDecoderOnlyOutput` | its cache has the keyword's name |
| `crop` | takes the number of rows to remove as a negative count everywhere from 5.17 on |
"""

import inspect
from dataclasses import fields
from typing import Any

import transformers
from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.utils import output_capturing

OLDEST, UNKNOWN = (5, 17), (6, 0)  # versions in [oldest, unknown) are supported

# Whether a list in `output_hidden_states` selects entries of the full tuple. The first releases that took a list
# counted differently (layer ids, no entry for the embedding), so there every state is asked for instead.
SELECTS_STATES = hasattr(output_capturing, "selected_hidden_states")

_CACHE_NAMES = ("cache", "past_key_values")


def check_version() -> None:
    """Raise a `RuntimeError` of one sentence if this release of Transformers is outside the supported range."""
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if not OLDEST <= version < UNKNOWN:
        raise RuntimeError(
            f"Drafting inside generate() needs transformers >= {OLDEST[0]}.{OLDEST[1]} and < {UNKNOWN[0]}, found "
            f"{transformers.__version__}; install a version in that range."
        )


def cache_in(model_kwargs: dict[str, Any]) -> tuple[str, Any]:
    """The keyword of the target's cache in a call's `model_kwargs`, and the cache, `None` if there is none."""
    for name in _CACHE_NAMES:
        if name in model_kwargs:
            return name, model_kwargs[name]
    return _CACHE_NAMES[0], None


def record_past(cache: Any, count: int) -> None:
    """Have every layer keep what cropping up to `count` rows needs."""
    activate = getattr(cache, "activate_past_recording", None)
    if activate is None:
        return
    # Since 5.25 a cache passes what it is told on to its layers: how many recurrent states to keep.
    takes_count = any(each.kind is each.VAR_KEYWORD for each in inspect.signature(activate).parameters.values())
    activate(**({"recurrent_states_to_keep": count} if takes_count else {}))


def decoder_output(sequences: Tensor, cache: Any, **parts: Any) -> GenerateDecoderOnlyOutput:
    """What `generate` returns with `return_dict_in_generate`: `scores`, `logits`, `attentions`, `hidden_states`."""
    names = {field.name for field in fields(GenerateDecoderOnlyOutput)}
    held = next(name for name in _CACHE_NAMES if name in names)
    return GenerateDecoderOnlyOutput(**{"sequences": sequences, held: cache}, **parts)
