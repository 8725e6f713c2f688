"""The one hook into `generate`: an `assistant_model` that offers to draft or to decode is asked to.

Transformers keeps no registry of assistants. Three methods of `GenerationMixin` and a function of pipelines are wrapped
once, whichever copy of this module comes first (every checkpoint's remote code brings its own); calls with other
assistants go on untouched.

| wrapped | asks the assistant for |
|---|---|
| `_validate_generation_mode` | `check_generation`: whether it serves the call, in place of Transformers' refusals |
| `_assisted_decoding` | `decode`: the whole decoding, or `NotImplemented` for Transformers' own loop |
| `_get_candidate_generator` | `get_candidate_generator`: drafts for that loop |
| `load_assistant_model` | `check_generation`, in place of a look at the tokens that both configurations name |
"""

import functools
from collections.abc import Callable
from typing import Any

import transformers
from transformers.generation.utils import GenerationMixin
from transformers.pipelines import base as pipelines

from .transformers_api import check_version

_MARK = "_candidate_generator_seam"  # on a wrapper: (wrapper, what it wraps); all copies of this module read it
_PREFILL = "_prefill"  # not wrapped, but the loop calls it


def _validate(original: Any) -> Any:
    def validate(self: Any, generation_mode: Any, generation_config: Any, generation_mode_kwargs: Any) -> Any:
        assistant = generation_mode_kwargs.get("assistant_model")
        if isinstance(assistant, str):
            raise TypeError(
                f"assistant_model is the text {assistant!r}, expected a model; load it first: "
                f"AutoModel.from_pretrained({assistant!r}, trust_remote_code=True)."
            )
        offered = getattr(assistant, "check_generation", None)
        if offered is not None and generation_mode == "assisted_generation":
            return offered(self, generation_config, generation_mode_kwargs)
        return original(self, generation_mode, generation_config, generation_mode_kwargs)

    return validate


def _decode(original: Any) -> Any:
    def decode(self: Any, *args: Any, **kwargs: Any) -> Any:
        offered = getattr(kwargs.get("assistant_model"), "decode", None)
        if offered is not None:
            result = offered(self, *args, **kwargs)
            if result is not NotImplemented:
                return result
        return original(self, *args, **kwargs)

    return decode


def _choose(original: Any) -> Any:
    def choose(self: Any, *args: Any, **kwargs: Any) -> Any:
        offered = getattr(kwargs.get("assistant_model"), "get_candidate_generator", None)
        if offered is None:
            return original(self, *args, **kwargs)
        return offered(
            self,
            generation_config=kwargs["generation_config"],
            logits_processor=kwargs["logits_processor"],
            model_kwargs=kwargs["model_kwargs"],
            input_ids=kwargs["input_ids"],
        )

    return choose


def _load(original: Any) -> Any:
    def load(model: Any, assistant_model: Any, assistant_tokenizer: Any) -> Any:
        offered = getattr(assistant_model, "check_generation", None)
        if offered is None:
            return original(model, assistant_model, assistant_tokenizer)
        # A target whose pad token was changed is still the drafter's.
        offered(model, model.generation_config, {"assistant_tokenizer": assistant_tokenizer})
        return assistant_model, None

    return load


_WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "_validate_generation_mode": _validate,
    "_assisted_decoding": _decode,
    "_get_candidate_generator": _choose,
    "load_assistant_model": _load,
}


def _owner(name: str) -> Any:
    """Where Transformers looks the wrapped `name` up."""
    return pipelines if name == "load_assistant_model" else GenerationMixin


def _described(name: str) -> str:
    return f"{_owner(name).__name__}.{name}"


def install() -> None:
    """Wrap what the table names; leaves alone what any copy of this module has wrapped.

    Raises:
        RuntimeError: if this version of Transformers is outside the supported range or lacks one of them.
    """
    missing = [name for name in _WRAPPERS if not hasattr(getattr(_owner(name), name, None), _MARK)]
    if not missing:
        return
    check_version()
    for name in (*missing, _PREFILL):
        if not hasattr(_owner(name), name):
            raise RuntimeError(
                f"Transformers {transformers.__version__} has no {_described(name)}, which drafting inside "
                "generate() needs; install another version or a newer lilicorr."
            )
    for name in missing:
        original = getattr(_owner(name), name)
        wrapper = functools.wraps(original)(_WRAPPERS[name](original))
        setattr(wrapper, _MARK, (wrapper, original))
        setattr(_owner(name), name, wrapper)


def uninstall() -> None:
    """Undo `install`, whichever copy of this module did it; does nothing if none has.

    Raises:
        RuntimeError: if another library has wrapped a method since, because undoing would remove its wrapper too.
    """
    marks = {name: getattr(getattr(_owner(name), name, None), _MARK, None) for name in _WRAPPERS}
    for name, mark in marks.items():
        if mark is not None and getattr(_owner(name), name) is not mark[0]:
            raise RuntimeError(f"Something else has wrapped {_described(name)} since; undo that first.")
    for name, mark in marks.items():
        if mark is not None:
            setattr(_owner(name), name, mark[1])
