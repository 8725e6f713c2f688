"""Drafts as captured graphs: the whole of one where drafter and LM head allow it, else what follows the logits.

A graph works on memory that never moves, but contexts grow and come and go. So graphs have contexts of their own, of a
few capacities, into which the rows of the drafted sequence's `DraftCache` move for as long as its drafts are replayed.
"""

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.utils import logging

from ..kernels.choice import kernel_choice
from .dflash import DraftCache
from .graphs import Captured, CaptureError, CudaGraph, Graph, graphs_asked_for, module_refusal, tensors_of
from .lattice import Block, Draft

if TYPE_CHECKING:
    from .modeling_lilicorr import LiLiCorrModel

logger = logging.get_logger(__name__)

MAX_GRAPHS = 8  # of one drafter with one target; the least recently used one goes first
SMALLEST = 256  # rows of the smallest context; each larger one has twice as many

Embed = Callable[[Tensor], Tensor]


class StaticContext(DraftCache):
    """Keys and values of one sequence in buffers that never move: `capacity` context columns, then the block's.

    A pass places `block_size` new context rows behind those that are there, of which only the first few are real; the
    next pass overwrites the others, and nothing sees them meanwhile.

    Args:
        like: a cache that holds rows, of whose kind these are.
        capacity: columns for context rows.
        block_size: the longest block, and the most rows that one can commit.
        lock: guards the rows while they move.
    """

    def __init__(self, like: DraftCache, capacity: int, block_size: int, lock: Any) -> None:
        super().__init__(0)
        keys, values, positions = like.rows()
        self.capacity, self.fresh_rows = capacity, block_size
        with torch.inference_mode(False):
            # Zeros, since an unseen value still meets the weight 0, and 0 times NaN is NaN.
            def room(rows: Tensor) -> Tensor:
                return rows.new_zeros(*rows.shape[:2], capacity + block_size, rows.shape[3])

            self._room = [room(rows) for rows in keys], [room(rows) for rows in values]
            self._held = positions.new_zeros(1, capacity)
            self._columns = torch.arange(capacity, device=positions.device)
            self._fresh = self._columns[:block_size].clone()
            self._end, self._newest = (self._columns[:1].clone() for _ in range(2))
        self._lock = lock
        self._owner: Callable[[], DraftCache | None] = lambda: None

    def welcome(self, cache: DraftCache) -> None:
        """Move the rows of `cache` in, and those of another one back to it."""
        with self._lock:
            if cache.moved_to is self:
                return
            self.send_home()
            keys, values, positions = cache.rows()
            for room, rows in zip((*self._room[0], *self._room[1]), (*keys, *values), strict=True):
                room[:, :, : cache.length].copy_(rows)
                room[:, :, cache.length :].zero_()
            self._held[:, : cache.length].copy_(positions)
            cache.move_rows_to(self)
            self._owner = weakref.ref(cache)

    def send_home(self) -> None:
        """Give the rows back to the cache that they are of, if it still lives."""
        with self._lock:
            owner = self._owner()
            self._owner = lambda: None
            if owner is not None and owner.moved_to is self:
                end = owner.length
                with torch.inference_mode(False):
                    keys, values = ([room[:, :, :end].clone() for room in part] for part in self._room)
                    owner.take_back(keys, values, self._held[:, :end].clone())

    def expect(self, start: int, count: int) -> None:
        """Before a pass: `count` real rows are new, behind `start` that are there; no copy from the host."""
        torch.add(self._columns[: self.fresh_rows], start, out=self._fresh)
        self._end.fill_(start + count)
        self._newest.fill_(count - 1)

    def place(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """As in `DraftCache`, but the keys and values returned are those of all columns, real or not."""
        end = self.capacity + keys.shape[2] - self.fresh_rows
        for part, rows in zip(self._room, (keys, values), strict=True):
            part[layer].index_copy_(2, self._fresh, rows[:, :, : self.fresh_rows])
            part[layer][:, :, self.capacity : end] = rows[:, :, self.fresh_rows :]
        return self._room[0][layer][:, :, :end], self._room[1][layer][:, :, :end]

    def mask(self, size: int) -> Tensor:
        """Real columns and the block's, `[1, 1, 1, capacity + size]` (bool)."""
        real = self._columns < self._end
        return torch.cat([real, real.new_ones(size)])[None, None, None]

    def past(self, positions: Tensor) -> Tensor:
        """As in `DraftCache`, of all columns: `[1, capacity]`."""
        return self._held.index_copy(1, self._fresh, positions)

    def newest(self, rows: Tensor) -> Tensor:
        """As in `DraftCache`: the last real one."""
        return rows.index_select(1, self._newest).squeeze(1)

    def commit(self, positions: Tensor) -> None:
        """Keep the positions; how many rows are real, the owner knows."""
        self._held.index_copy_(1, self._fresh, positions)


class DraftGraphs:
    """Captured drafts of one drafter with one target; made by `KnownGraphs.of`.

    Args:
        graph: the kind of graph.
        weights: all tensors that are read, which a graph does by their addresses.
        whole: whether whole drafts may be captured, or only what follows the logits.
        learns: whether any weight wants a gradient where gradients are on.
        say: takes the reason why a draft is not captured.
    """

    def __init__(
        self, graph: type[Graph], weights: list[Tensor], whole: bool, learns: bool, say: Callable[[str], None]
    ) -> None:
        self._graph, self._weights, self._whole, self._learns, self._say = graph, weights, whole, learns, say
        self._captured: OrderedDict[Any, Captured] = OrderedDict()  # by a key that keeps their contexts alive
        self._contexts: weakref.WeakValueDictionary[Any, StaticContext] = weakref.WeakValueDictionary()
        self._lock = threading.RLock()
        self._failed = False
        self.serves = addresses(weights), whole, learns

    def __len__(self) -> int:
        return len(self._captured)

    def draft(
        self,
        drafter: "LiLiCorrModel",
        anchor_ids: Tensor,
        context_hidden_states: Tensor,
        context_positions: Tensor,
        cache: DraftCache,
        embed: Embed,
        lm_head: Embed,
        num_slots: int | None = None,
        warp: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> Draft:
        """As `LiLiCorrModel.draft` of `drafter`, replayed where that is possible."""
        given = (anchor_ids, context_hidden_states, context_positions, cache, embed, lm_head)
        refusal = self._refusal(context_hidden_states.device, warp)
        if refusal is not None:
            self._say(refusal)
        elif not self._failed and not self._whole:
            block = drafter.block(*given, num_slots)
            return self._attempt(lambda: self._head_draft(drafter, block)) or drafter.head.draft(block)
        elif not self._failed and cache.length and context_hidden_states.shape[1] <= drafter.config.block_size:
            draft = self._attempt(lambda: self._whole_draft(drafter, *given, num_slots))
            if draft is not None:
                return draft
        return drafter.head.draft(drafter.block(*given, num_slots, warp))

    def _attempt(self, replay: Callable[[], Draft]) -> Draft | None:
        """The draft of `replay`, or `None` if its graph cannot be captured, and then no other is tried."""
        try:
            with self._lock:
                return replay()
        except CaptureError as error:
            self._failed = True
            self._captured.clear()
            self._say(f"a capture failed ({error})")
            return None

    def _refusal(self, device: torch.device, warp: Any) -> str | None:
        if warp is not None:
            return "its tokens are drawn"
        if torch.is_grad_enabled() and self._learns:
            return "gradients are on"
        if torch.is_autocast_enabled(device.type):
            return "autocast is on"
        return "another capture is under way" if self._graph.capturing() else None

    def _whole_draft(
        self,
        drafter: "LiLiCorrModel",
        anchor_ids: Tensor,
        states: Tensor,
        positions: Tensor,
        cache: DraftCache,
        embed: Embed,
        lm_head: Embed,
        num_slots: int | None,
    ) -> Draft:
        size, count = drafter.config.block_size, states.shape[1]
        context = self._context(cache, size, states.device)
        context.welcome(cache)
        context.expect(cache.length, count)
        missing = size - count
        inputs = (anchor_ids, pad(states, (0, 0, 0, missing)), pad(positions, (0, missing)))

        def work(anchor_ids: Tensor, states: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
            block = drafter.block(anchor_ids, states, positions, context, embed, lm_head, num_slots)
            return _tensors(drafter.head.draft(block))

        draft = self._replay(drafter, work, inputs, context, num_slots)
        cache.length += count
        return draft

    def _head_draft(self, drafter: "LiLiCorrModel", block: Block) -> Draft:
        embed, own_row = block.embed, block.anchor_hidden
        assert own_row is not None  # `LiLiCorrModel.block` gives it

        def work(hidden: Tensor, logits: Tensor, ids: Tensor, state: Tensor, own_row: Tensor) -> tuple[Tensor, ...]:
            return _tensors(drafter.head.draft(Block(hidden, logits, ids, state, None, embed, None, own_row)))

        return self._replay(drafter, work, (block.hidden, block.logits, block.anchor_ids, block.anchor_state, own_row))

    def _replay(
        self,
        drafter: "LiLiCorrModel",
        work: Callable[..., tuple[Tensor, ...]],
        inputs: tuple[Tensor, ...],
        context: StaticContext | None = None,
        num_slots: int | None = None,
    ) -> Draft:
        """The draft that `work` makes of `inputs`, from the graph of their kind, captured if it is new."""
        device = inputs[0].device
        shapes = tuple((tuple(given.shape), given.dtype) for given in inputs)
        head = drafter.head
        settings = (kernel_choice(), head.num_candidates, getattr(head, "rule", None), num_slots)
        key = (self._graph.stream(device), context, shapes, settings, drafter.config._attn_implementation)
        if key not in self._captured:
            self._captured[key] = Captured(self._graph(device), work, inputs)
            if len(self._captured) > MAX_GRAPHS:
                self._captured.popitem(last=False)
        self._captured.move_to_end(key)
        tokens, finite, probabilities = self._captured[key](*inputs)
        return Draft(tokens, finite, lambda: probabilities)

    def _context(self, cache: DraftCache, block_size: int, device: torch.device) -> StaticContext:
        """A context with room for `block_size` more rows than `cache` holds."""
        capacity = SMALLEST
        while capacity < cache.length + block_size:
            capacity *= 2
        key = (self._graph.stream(device), capacity)
        context = self._contexts.get(key)
        if context is None:
            context = self._contexts[key] = StaticContext(cache, capacity, block_size, self._lock)
        return context


class KnownGraphs:
    """The `DraftGraphs` of one drafter with each LM head that it has served; copies and pickles start anew."""

    def __init__(self, graph: type[Graph] = CudaGraph) -> None:
        self._graph = graph
        self._by_head: weakref.WeakKeyDictionary[Any, DraftGraphs] = weakref.WeakKeyDictionary()
        self._said: set[str] = set()

    def of(self, drafter: "LiLiCorrModel", embedding: nn.Module, lm_head: nn.Module) -> DraftGraphs | None:
        """Those for the weights as they lie now, or `None` where nobody asked for graphs or none are possible.

        Raises:
            ValueError: `LILICORR_GRAPHS` is unknown.
        """
        if not graphs_asked_for():
            return None
        device, head = drafter.device, drafter.get_submodule(drafter.config.head_type)
        refusal = self._graph.refusal(device) or module_refusal((head, embedding), device)
        if refusal is not None:
            self._say(refusal)
            return None
        limits = backbone_refusal(drafter) or module_refusal((drafter, lm_head), device)
        if limits is not None:
            self._say(f"{limits}; only the head is captured")
        weights = tensors_of((drafter, embedding, lm_head))
        learns = any(weight.requires_grad for each in (drafter, embedding, lm_head) for weight in each.parameters())
        known = self._by_head.get(lm_head)
        if known is None or known.serves != (addresses(weights), limits is None, learns):
            known = self._by_head[lm_head] = DraftGraphs(self._graph, weights, limits is None, learns, self._say)
        return known

    def _say(self, refusal: str) -> None:
        """Once for each reason."""
        if refusal not in self._said:
            self._said.add(refusal)
            logger.debug("A draft is not replayed as a captured graph: %s.", refusal)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()


def backbone_refusal(drafter: "LiLiCorrModel") -> str | None:
    """Why a pass of the backbone cannot be captured, whatever its weights, or `None`."""
    attention, rope = drafter.config._attn_implementation, drafter.rotary_emb.rope_type
    if attention not in ("eager", "sdpa"):
        return f"{attention} attention takes no mask over unused columns"
    return f"{rope} rotary embeddings follow the length on the host" if rope in ("dynamic", "longrope") else None


def addresses(tensors: list[Tensor]) -> list[tuple[int, torch.dtype, torch.Size]]:
    """Where and how each of `tensors` lies in memory."""
    return [(tensor.data_ptr(), tensor.dtype, tensor.shape) for tensor in tensors]


def _tensors(draft: Draft) -> tuple[Tensor, ...]:
    return draft.tokens, draft.finite, draft.probabilities()
