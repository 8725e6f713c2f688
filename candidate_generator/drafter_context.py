"""The drafter's context: projected target hidden states of committed rows, encoded with the next draft."""

import copy
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..modeling_lilicorr.dflash import DraftCache
    from ..modeling_lilicorr.modeling_lilicorr import LiLiCorrModel

_ATTRIBUTE = "_lilicorr_context"  # of a target cache: the drafter's context of the same rows


class AttachedContext:
    """A drafter's context cache that stays with the target's cache, so that the next turn of a chat goes on with it.

    It affects what is drafted, never what is right: a stale one only costs acceptance. Copies of the target's cache
    take a copy along; a pickled one leaves it behind.
    """

    def __init__(self, drafter: "LiLiCorrModel") -> None:
        self.drafter = weakref.ref(drafter)
        self.placement = (drafter.device, drafter.dtype)
        self.cache: DraftCache = drafter.new_cache()
        self.rows = 0  # rows of the target's cache, from the start, that `cache` knows (a few may be missing)
        self._waiting: list[tuple[Tensor, Tensor]] = []  # committed rows that the drafter has not encoded yet

    @classmethod
    def of(cls, target_cache: Any, drafter: "LiLiCorrModel", rows: int) -> "AttachedContext":
        """The context attached to `target_cache` if it is `drafter`'s and knows at most its `rows`, else a new one."""
        attached: Any = getattr(target_cache, _ATTRIBUTE, None)
        ours = isinstance(attached, cls) and attached.drafter() is drafter and attached.rows <= rows
        if not ours or attached.placement != (drafter.device, drafter.dtype):
            attached = cls(drafter)
            setattr(target_cache, _ATTRIBUTE, attached)
        return attached

    def wait(self, states: Tensor, positions: Tensor) -> None:
        """Keep committed rows, states `[1, C, layers * d]` and positions `[1, C]`, for the next draft."""
        self._waiting.append((states, positions))

    def waiting(self) -> tuple[Tensor, Tensor]:
        """All rows kept since the last draft, as given to `wait`; they wait no longer."""
        states, positions = (torch.cat(parts, dim=1) for parts in zip(*self._waiting, strict=True))
        self._waiting = []
        return states, positions

    def __deepcopy__(self, memo: dict[int, Any]) -> "AttachedContext":
        copied = object.__new__(type(self))
        copied.__dict__ = self.__dict__ | {"cache": copy.deepcopy(self.cache, memo), "_waiting": [*self._waiting]}
        return copied

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return dict, ()


class BatchContext:
    """Drafter contexts of several rows, which grow at their own pace in one cache."""

    def __init__(self, drafter: "LiLiCorrModel") -> None:
        self._drafter = drafter
        self.cache = drafter.new_batch_cache()
        self._waiting: list[list[tuple[Tensor, Tensor]]] = []

    def add_row(self) -> None:
        """One more row, the last, with nothing in its context."""
        self.cache.add_row()
        self._waiting.append([])

    def wait(self, row: int, states: Tensor, positions: Tensor) -> None:
        """As `AttachedContext.wait`, for one row."""
        self._waiting[row].append((states, positions))

    def waiting(self) -> tuple[Tensor, Tensor, list[int]]:
        """States `[rows, C, layers * d]` and positions `[rows, C]` since the last draft, padded, and their counts."""
        parts = [tuple(torch.cat(part, dim=1)[0] for part in zip(*kept, strict=True)) for kept in self._waiting]
        counts = [positions.shape[0] for _, positions in parts]
        states = torch.nn.utils.rnn.pad_sequence([states for states, _ in parts], batch_first=True)
        positions = torch.nn.utils.rnn.pad_sequence([positions for _, positions in parts], batch_first=True)
        self._waiting = [[] for _ in self._waiting]
        return states, positions, counts

    def add(self, other: "BatchContext") -> None:
        """Take over the rows of another one from which nothing has been drafted yet."""
        for waiting in other._waiting:
            self.add_row()
            self._waiting[-1] = waiting

    def keep(self, rows: list[int]) -> None:
        """Drop all rows but these."""
        self.cache.keep(rows)
        self._waiting = [self._waiting[row] for row in rows]
