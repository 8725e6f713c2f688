"""LiLiCorr for Transformers: `target.generate(..., assistant_model=drafter)`, the same output, drafted in blocks.

Importing it registers `LiLiCorrConfig` and `LiLiCorrModel` with the Auto classes.
"""

from transformers import AutoConfig, AutoModel

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

if __name__ == "lilicorr":  # tools that collect files, such as pytest, import this one under the folder's name too
    AutoConfig.register(LiLiCorrConfig.model_type, LiLiCorrConfig, exist_ok=True)
    AutoModel.register(LiLiCorrConfig, LiLiCorrModel, exist_ok=True)
