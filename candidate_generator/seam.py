"""The one seam to `generate`: which candidate generator serves an `assistant_model`.

Transformers chooses it in `GenerationMixin._get_candidate_generator` and keeps no registry. That method is wrapped
once, whichever copy of this module comes first (every checkpoint's remote code brings its own): an assistant that
offers `get_candidate_generator` is asked for its generator, every other call goes on untouched.
"""

import functools
from typing import Any

import transformers
from transformers.generation.utils import GenerationMixin

_METHOD = "_get_candidate_generator"
_MARK = "_candidate_generator_seam"  # on the wrapper: (wrapper, what it wraps); all copies of this module read it
_OLDEST, _UNKNOWN = (5, 17), (6, 0)  # versions in [oldest, unknown) call the method with keywords and model outputs


def install() -> None:
    """Wrap `GenerationMixin._get_candidate_generator`; does nothing if any copy of this module has done so.

    Raises:
        RuntimeError: if this version of Transformers is outside the supported range.
    """
    original = getattr(GenerationMixin, _METHOD, None)
    if hasattr(original, _MARK):
        return
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if original is None or not _OLDEST <= version < _UNKNOWN:
        raise RuntimeError(
            f"Drafting inside generate() needs transformers >= {_OLDEST[0]}.{_OLDEST[1]} and < {_UNKNOWN[0]}, found "
            f"{transformers.__version__}; install a version in that range."
        )

    @functools.wraps(original)
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

    setattr(choose, _MARK, (choose, original))
    setattr(GenerationMixin, _METHOD, choose)


def uninstall() -> None:
    """Undo `install`, whichever copy of this module did it; does nothing if none has.

    Raises:
        RuntimeError: if another library has wrapped the method since, because undoing would remove its wrapper too.
    """
    current = getattr(GenerationMixin, _METHOD, None)
    mark = getattr(current, _MARK, None)
    if mark is None:
        return
    wrapper, original = mark
    if current is not wrapper:
        raise RuntimeError(f"Something else has wrapped GenerationMixin.{_METHOD} since; undo that first.")
    setattr(GenerationMixin, _METHOD, original)
