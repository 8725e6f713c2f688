"""LiLiCorr for Transformers: `target.generate(..., assistant_model=drafter)`, same output, several times faster."""

from .modeling_lilicorr.configuration_lilicorr import LiLiCorrConfig
from .modeling_lilicorr.dflash import DraftCache
from .modeling_lilicorr.lattice import Draft, Lattice
from .modeling_lilicorr.modeling_lilicorr import LiLiCorrModel

__all__ = ["Draft", "DraftCache", "Lattice", "LiLiCorrConfig", "LiLiCorrModel"]
