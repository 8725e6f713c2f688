"""LiLiCorr for Transformers: `target.generate(..., assistant_model=drafter)`, same output, several times faster.

Importing it registers `LiLiCorrConfig` and `LiLiCorrModel` with the Auto classes.
"""

from transformers import AutoConfig, AutoModel

from .modeling_lilicorr.configuration_lilicorr import LiLiCorrConfig
from .modeling_lilicorr.dflash import DraftCache
from .modeling_lilicorr.lattice import Draft, Lattice
from .modeling_lilicorr.modeling_lilicorr import LiLiCorrModel

__all__ = ["Draft", "DraftCache", "Lattice", "LiLiCorrConfig", "LiLiCorrModel"]

AutoConfig.register(LiLiCorrConfig.model_type, LiLiCorrConfig, exist_ok=True)
AutoModel.register(LiLiCorrConfig, LiLiCorrModel, exist_ok=True)
