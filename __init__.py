"""LiLiCorr for Transformers: `target.generate(..., assistant_model=drafter)`, the same output, drafted in blocks.

Importing it registers `LiLiCorrConfig` and `LiLiCorrModel` with the Auto classes.
"""

import os
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .candidate_generator.generation import generate
    from .candidate_generator.lilicorr_generator import LiLiCorrCandidateGenerator
    from .modeling_lilicorr.configuration_lilicorr import LiLiCorrConfig
    from .modeling_lilicorr.dflash import DraftCache
    from .modeling_lilicorr.lattice import Draft, Lattice
    from .modeling_lilicorr.modeling_lilicorr import LiLiCorrModel

__all__ = [
    "Draft",
    "DraftCache",
    "Lattice",
    "LiLiCorrCandidateGenerator",
    "LiLiCorrConfig",
    "LiLiCorrModel",
    "generate",
]

try:
    __version__ = version("lilicorr")
except PackageNotFoundError:  # a folder on the path that was not installed
    __version__ = "unknown"


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    _open()
    return globals()[name]


def _open() -> None:
    """Import what `__all__` names, and torch and transformers with it; register it with the Auto classes."""
    from transformers import AutoConfig, AutoModel, AutoTokenizer

    from .candidate_generator.generation import generate
    from .candidate_generator.lilicorr_generator import LiLiCorrCandidateGenerator
    from .hub.no_tokenizer import NoTokenizer
    from .modeling_lilicorr.configuration_lilicorr import LiLiCorrConfig
    from .modeling_lilicorr.dflash import DraftCache
    from .modeling_lilicorr.lattice import Draft, Lattice
    from .modeling_lilicorr.modeling_lilicorr import LiLiCorrModel

    face = (Draft, DraftCache, Lattice, LiLiCorrCandidateGenerator, LiLiCorrConfig, LiLiCorrModel, generate)
    globals().update({each.__name__: each for each in face})
    AutoConfig.register(LiLiCorrConfig.model_type, LiLiCorrConfig, exist_ok=True)
    AutoModel.register(LiLiCorrConfig, LiLiCorrModel, exist_ok=True)
    AutoTokenizer.register(LiLiCorrConfig, NoTokenizer, exist_ok=True)


def _is_command_line() -> bool:
    """Whether `lilicorr …` or `python -m lilicorr …` is starting: it answers before torch is imported."""
    started = sys.argv[0] if sys.argv else ""
    if started == "-m":
        return "lilicorr" in sys.orig_argv or "-mlilicorr" in sys.orig_argv
    return os.path.basename(started) in ("lilicorr", "lilicorr.exe")


if __name__ == "lilicorr" and not _is_command_line():  # pytest imports this file under the folder's name too
    _open()
