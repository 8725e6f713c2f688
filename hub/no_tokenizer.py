"""What `AutoTokenizer` says of a drafter."""

from typing import Any, NoReturn


class NoTokenizer:
    """Stands where Transformers looks for a drafter's tokenizer: it has none, and its target's is meant."""

    @classmethod
    def from_pretrained(cls, source: Any, *_: Any, **__: Any) -> NoReturn:
        """Raise a `ValueError` that says what to load instead of `source`."""
        raise ValueError(f"{source} holds a drafter, which has no tokenizer; load its target's instead.")
