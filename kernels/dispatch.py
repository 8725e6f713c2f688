"""One door to the kernels: callers import from here and get the fastest implementation for their tensors."""

from .reference import greedy_walk, lattice_scores, score_and_decode_exact, score_and_walk
from .tiled import topk_logsumexp

__all__ = ["greedy_walk", "lattice_scores", "score_and_decode_exact", "score_and_walk", "topk_logsumexp"]
