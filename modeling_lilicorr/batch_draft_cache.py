"""A drafter's context of several sequences, which take in rows at their own pace."""

import torch
from torch import Tensor

from .dflash import DraftCache


class BatchDraftCache(DraftCache):
    """Keys and values of several contexts in one buffer a layer, each from column 0 on, the block's rows behind all.

    Before each pass `expect` tells how many of the new rows are real. Rows of padding are written too, where the next
    pass overwrites them, and are never seen.
    """

    def __init__(self, num_layers: int, device: torch.device) -> None:
        super().__init__(num_layers)
        self._lengths: list[int] = []  # of the contexts, by row
        self._counts: list[int] = []  # real new rows of the next pass
        self._device = device
        self._longest = 0  # context once the next pass's new rows are in
        self._block = 0  # rows of the block of the next pass
        self._buffers: list[list[Tensor] | None] = [
            None
        ] * num_layers  # keys and values, [rows, kv_heads, room, head_dim]
        self._held = torch.zeros(0, 0, dtype=torch.long, device=device)  # positions, [rows, columns]

    def add_row(self) -> None:
        """One more sequence, the last, without context."""
        self._lengths.append(0)
        self._held = _with_row(self._held)
        self._buffers = [pair and [_with_row(part) for part in pair] for pair in self._buffers]

    def keep(self, rows: list[int]) -> None:
        """Drop all sequences but these."""
        index = torch.tensor(rows, dtype=torch.long, device=self._device)
        self._lengths = [self._lengths[row] for row in rows]
        self._held = self._held[index]
        self._buffers = [pair and [part[index] for part in pair] for pair in self._buffers]

    def expect(self, counts: list[int]) -> None:
        """Before a pass: how many of its new rows, the first ones of each sequence, are real (1 or more)."""
        self._counts = counts
        self._longest = max(length + count for length, count in zip(self._lengths, counts, strict=True))

    def place(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """As in `DraftCache`, for `keys` and `values [rows, kv_heads, new, head_dim]`; returns all columns of use."""
        fresh, end = keys.shape[2] - self._block, self._longest + self._block
        room = max(end, max(self._lengths) + fresh)
        pair, given = self._buffers[layer], (keys, values)
        stored = [_grown(pair[index] if pair else None, part, room) for index, part in enumerate(given)]
        self._buffers[layer] = stored
        columns = self._columns(fresh)[:, None, :, None]
        for buffer, part in zip(stored, given, strict=True):
            buffer.scatter_(2, columns.expand(-1, part.shape[1], -1, part.shape[3]), part[:, :, :fresh])
            buffer[:, :, self._longest : end] = part[:, :, fresh:]
        return stored[0][:, :, :end], stored[1][:, :, :end]

    def mask(self, size: int) -> Tensor:
        """Columns that hold context and the block's, `[rows, 1, 1, longest + size]` (bool)."""
        self._block = size
        ends = [length + count for length, count in zip(self._lengths, self._counts, strict=True)]
        real = torch.arange(self._longest, device=self._device) < torch.tensor(ends, device=self._device)[:, None]
        return torch.cat([real, real.new_ones(real.shape[0], size)], dim=1)[:, None, None]

    def past(self, positions: Tensor) -> Tensor:
        """Positions of the context columns of a pass with new rows at `positions [rows, new]`, `[rows, longest]`."""
        room = max(self._longest, max(self._lengths) + positions.shape[1])
        grown = torch.nn.functional.pad(self._held, (0, max(0, room - self._held.shape[1])))
        return grown.scatter(1, self._columns(positions.shape[1]), positions)[:, : self._longest]

    def newest(self, rows: Tensor) -> Tensor:
        """Of new rows `[rows, new, ...]` the last real one of each sequence, `[rows, ...]`."""
        last = torch.tensor(self._counts, device=rows.device) - 1
        return rows[torch.arange(rows.shape[0], device=rows.device), last]

    def commit(self, positions: Tensor) -> None:
        """Keep the real ones of the new rows as context."""
        self._held = self.past(positions)
        self._lengths = [length + count for length, count in zip(self._lengths, self._counts, strict=True)]
        self.length = self._longest

    def _columns(self, new: int) -> Tensor:
        """The columns of `new` rows of every sequence, `[rows, new]`."""
        starts = torch.tensor(self._lengths, device=self._device)
        return starts[:, None] + torch.arange(new, device=self._device)


def _with_row(part: Tensor) -> Tensor:
    """`part [rows, ...]` with one more row, of zeros."""
    return torch.cat([part, part.new_zeros(1, *part.shape[1:])])


def _grown(buffer: Tensor | None, like: Tensor, room: int) -> Tensor:
    """`buffer` if it has `room` columns, else a copy with room to double.

    Columns that nothing has been written to hold zeros: unseen, they still meet the weight 0, and 0 times NaN is NaN.
    """
    if buffer is not None and buffer.shape[2] >= room:
        return buffer
    grown = like.new_zeros(like.shape[0], like.shape[1], max(64, 2 * room), like.shape[3])
    if buffer is not None:
        grown[:, :, : buffer.shape[2]] = buffer
    return grown
