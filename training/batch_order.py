"""Which sequences each optimiser step sees, and what is drawn for them: functions of seed and step alone.

So nothing of it has to be saved, a resumed run repeats what it would have done, and the number of processes and the
size of micro-batches change neither the data nor the blocks drawn from them.
"""

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from .data import Example, batches


@dataclass
class Share:
    """One micro-batch: indices of its examples and their places in the step's whole batch."""

    indices: list[int]
    places: list[int]


@dataclass
class BatchOrder:
    """The order of a run.

    Attributes:
        examples: all of them; seed: of the order and of what is drawn.
        batch_size: sequences a step, over all processes; micro_batch_size: those of one forward pass, 0: as many as
            fall to a process.
        processes, rank: how many processes share a batch, and which of them this is.

    Raises:
        ValueError: if the batch cannot be shared out evenly, or there is not one whole batch.
    """

    examples: Sequence[Example]
    batch_size: int
    micro_batch_size: int
    seed: int
    processes: int = 1
    rank: int = 0
    _epoch: tuple[int, list[list[int]]] = field(init=False)

    def __post_init__(self) -> None:
        self.micro_batch_size = self.micro_batch_size or max(1, self.batch_size // self.processes)
        if self.batch_size % (self.processes * self.micro_batch_size):
            raise ValueError(
                f"batch_size is {self.batch_size}, expected a multiple of {self.processes} (processes) times "
                f"{self.micro_batch_size} (micro_batch_size); change one of them."
            )
        self._epoch = (0, batches(self.examples, self.batch_size, self.seed, 0))

    @property
    def steps_an_epoch(self) -> int:
        """Optimiser steps an epoch."""
        return len(self._epoch[1])

    @property
    def accumulation(self) -> int:
        """Micro-batches a step and process."""
        return self.batch_size // (self.processes * self.micro_batch_size)

    def batch(self, step: int) -> list[int]:
        """Indices of all examples of `step`, the same in every process."""
        epoch, place = divmod(step, self.steps_an_epoch)
        if epoch != self._epoch[0]:
            self._epoch = (epoch, batches(self.examples, self.batch_size, self.seed, epoch))
        return self._epoch[1][place]

    def shares(self, step: int) -> list[Share]:
        """This process's micro-batches of `step`; processes get neighbours, which are of similar length."""
        indices, size = self.batch(step), self.micro_batch_size
        starts = range(self.rank * size, len(indices), self.processes * size)
        return [Share(indices[i : i + size], list(range(i, i + size))) for i in starts]

    def seed_of(self, step: int, place: int) -> int:
        """The seed of everything random about the sequence at `place` in the batch of `step`."""
        return ((self.seed * 1_000_003 + step) * 1_000_003 + place) % 2**63

    def generators(self, step: int, share: Share) -> list[torch.Generator]:
        """A generator for each sequence of `share`."""
        return [torch.Generator().manual_seed(self.seed_of(step, place)) for place in share.places]


def fingerprint(examples: Sequence[Example]) -> str:
    """A short name of the data, in order: of their ids and lengths, then of their tokens and what is supervised.

    Older states hold its first part only.
    """
    lengths, tokens = hashlib.sha256(), hashlib.sha256()
    for example in examples:
        lengths.update(f"{example.id}\0{len(example)}\n".encode())
        tokens.update(array("q", example.input_ids))
        tokens.update(bytes(example.loss_mask))
    return f"{lengths.hexdigest()[:16]}-{tokens.hexdigest()[:16]}"
