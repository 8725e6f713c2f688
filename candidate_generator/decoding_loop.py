"""The decoding loop: prefill, then draft, verify, accept, compact, until every sequence has ended.

The target's output is what it is without a drafter. A pass verifies one tree a sequence. From its root on, the token
chosen from a node's logits is committed and, if a child holds it, decoding goes on there. So every logits processor
sees each committed prefix once and in order, sampling is exact for any tree that was grown without chance, and criteria
are asked after every token.
"""

import inspect
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..kernels.few_rows import FewRows
from .decoding_pass import DecodingPass, Observer
from .decoding_row import DecodingRow, Request
from .drafter_context import AttachedContext, BatchContext
from .node_count import NodeCount
from .requests import check_croppable, warn_of_overflow
from .target_cache import join, keep_path, keep_paths, keep_rows, pack, tree_limit
from .target_parts import TargetParts
from .text_continuation import DEEPEST
from .token_tree import SOURCES, TokenTree
from .transformers_api import cache_in, record_past
from .tree_growth import Text, grow_trees

if TYPE_CHECKING:
    from ..modeling_lilicorr.lattice import Draft
    from ..modeling_lilicorr.modeling_lilicorr import LiLiCorrModel


class DecodingLoop:
    """Decodes sequences of one target together, each at its own pace.

    Args:
        drafter: made for `target`.
        nodes: how many nodes a pass verifies.
        lookup: whether the text's own continuation joins the trees.
        shared: whether more sequences may be added to those it starts with.
        all_states, attentions: whether hidden states and attentions of committed tokens are kept for the caller, which
            works for a single sequence.
        observer: called with every pass behind the prompt's, once it has committed; drafts then come with a lattice.
    """

    def __init__(
        self,
        drafter: "LiLiCorrModel",
        target: PreTrainedModel,
        nodes: NodeCount,
        *,
        lookup: bool = True,
        shared: bool = False,
        all_states: bool = False,
        attentions: bool = False,
        observer: Observer | None = None,
    ) -> None:
        self.drafter, self.target, self.nodes, self.lookup = drafter, target, nodes, lookup
        self._parts = TargetParts(drafter, target, all_states)
        self._beta: float = drafter.head.tree_beta
        self._shared = shared
        self._observer = observer
        self._keeps = {"hidden_states": all_states, "attentions": attentions}
        self.rows: list[DecodingRow] = []
        self.kept: dict[str, list[Any]] = {"hidden_states": [], "attentions": []}
        self.cache: Any = None
        self._cache_name = ""
        self._columns = 0  # of the cache
        self._used: Tensor | None = None  # which of them a row uses, [rows, columns] (bool); None: its only row all
        self._last_positions = torch.zeros(0)  # of each row's last column, as the target takes them: [..., rows, 1]
        self._real: list[int] = []  # each row's columns without padding: the drafter's position of the next one
        self._limit = 0  # columns up to which trees can be verified
        self._extras: dict[str, Any] = {}  # what a call hands to every pass of the target
        self._mask: Tensor | None = None  # of the prompt, [1, columns], where trees are not possible
        self._attached: AttachedContext | None = None
        self._contexts: BatchContext | None = None
        self._takes_positions = takes_positions(target)
        self._few_rows = FewRows(target, drafter)

    # ---- prefill

    def start(self, input_ids: Tensor, request: Request, model_kwargs: dict[str, Any]) -> None:
        """Run the prompts `input_ids [rows, L]`, and commit the first token of each.

        Args:
            request: of all rows.
            model_kwargs: of the call, as `generate` prepared them, with an empty or continued cache.
        """
        rows = input_ids.shape[0]
        self._cache_name, self.cache = cache_in(model_kwargs)
        cached = int(self.cache.get_seq_length())
        mask = model_kwargs.get("attention_mask")
        target: Any = self.target
        outputs = target._prefill(
            input_ids,
            request.config,
            model_kwargs | {"output_hidden_states": self._parts.output_hidden_states},
        )
        check_croppable(self.cache, request.config)
        record_past(self.cache, max(1, self.nodes.most))  # not before: sliding layers would keep the whole prompt
        read = self._parts.rows_of(outputs.hidden_states)
        self._columns = int(self.cache.get_seq_length())
        self._extras = {
            name: value
            for name, value in model_kwargs.items()
            if (value is None or isinstance(value, (bool, int, float, str)))
            and name not in ("logits_to_keep", "output_hidden_states", "attention_mask", "position_ids")
        }
        self._limit = tree_columns(self.target, self.cache)
        used = torch.ones(rows, self._columns, dtype=torch.bool) if mask is None else mask.cpu().bool()
        used = used[:, : self._columns]
        if used.shape[1] < self._columns:  # a mask of the new tokens only: what is cached is text
            used = torch.cat([used.new_ones(rows, self._columns - used.shape[1]), used], dim=1)
        padded = not bool(used.all())
        self._mask = used.to(self.target.device) if padded else None
        self._used = used.to(self.target.device) if padded or rows > 1 or self._shared else None
        positions = model_kwargs.get("position_ids")
        if positions is None:
            self._last_positions = used.sum(dim=1, keepdim=True).to(self.target.device) - 1
        else:
            last = positions[..., -1:].to(self.target.device)
            self._last_positions = last.expand(*last.shape[:-2], rows, 1)
        self._real = used.sum(dim=1).tolist()
        self._attach(rows, cached)
        for row in range(rows):
            ids = input_ids[row]
            real = used[row, self._columns - min(len(ids), self._columns) :].to(ids.device)
            self.rows.append(DecodingRow(ids, request.of_row(row, rows), ids[real] if len(ids) else ids, self.lookup))
            self._wait(row, outputs.hidden_states, used[row, -read:].nonzero()[:, 0], self._real[row])
        self._keep(outputs, None)
        if self._columns > self._limit:
            self.cache.crop(0)  # of a cache that recorded before: layers that slide keep everything until they are told
        logits = outputs.logits[:, -1:]
        del outputs
        anchors = torch.zeros(rows, dtype=torch.long, device=self.drafter.device)
        self._accept(TokenTree.of_anchors(anchors), logits)

    def _attach(self, rows: int, cached: int) -> None:
        """Contexts for the drafter: that of a continued cache where there is one."""
        if rows == 1 and not self._shared:
            self._attached = AttachedContext.of(self.cache, self.drafter, cached)
        else:
            self._contexts = BatchContext(self.drafter)
            for _ in range(rows):
                self._contexts.add_row()

    def _wait(self, row: int, hidden_states: tuple[Tensor, ...], index: Tensor, real: int) -> None:
        """Keep the states at `index [n]` of a pass for the row's next draft: the last of its `real` columns."""
        device = self.drafter.device
        states = self._parts.target_hidden_states(hidden_states, lambda part: part[row, index.to(part.device)][None])
        positions = torch.arange(real - len(index), real, device=device)[None]
        if self._attached is not None:
            self._attached.wait(states, positions)
            self._attached.rows = self._columns
        elif self._contexts is not None:
            self._contexts.wait(row, states, positions)

    # ---- draft

    def step(self) -> None:
        """Draft for every row, verify, and commit what was right and one token more."""
        anchors = torch.tensor([row.tokens[-1] for row in self.rows], device=self.drafter.device)
        texts = [row.continuation() for row in self.rows]
        with self._few_rows.multiplied():
            tree, draft = self._grow(anchors, texts)
            logits, outputs = self._verify(tree)
        try:
            paths, committed = self._accept(tree, logits, draft is not None)
        except BaseException:  # a streamer's, processor's or criterion's: a person may go on with the cache they gave
            self.cache.crop(-tree.size)
            raise
        if self._observer is not None:
            ended = [row.finished_at is not None for row in self.rows]
            self._observer(DecodingPass(anchors, texts, draft, tree, logits, paths, committed, ended))
        for row, text, tokens in zip(self.rows, texts, committed, strict=True):
            if row.text is not None and text is not None:
                row.text.learn(text[0], tokens)
        self._keep(outputs, paths)
        self._compact(tree, paths)
        for number, path in enumerate(paths):
            self._wait(number, outputs.hidden_states, torch.tensor(path), self._real[number])

    def _grow(self, anchors: Tensor, texts: Sequence[Text | None]) -> "tuple[TokenTree, Draft | None]":
        """Trees below `anchors [rows]`, and the draft if the drafter ran for them."""
        room = max(row.room for row in self.rows) - 1  # the target adds a token of its own
        count = min(self.nodes.choose(len(self.rows)), self._free_columns() - 1)
        if room < 1 or count < 1:
            return TokenTree.of_anchors(anchors), None
        sure = all(text and self.nodes.skips_draft(text[1]) for text in texts)
        chain = self.nodes.chain or not self._trees_fit(count + 1)
        branches = self.drafter.head.grows_trees and not chain
        draft = None if sure else self._draft(anchors, branches, count)
        deepest = min(room, DEEPEST if count >= self.nodes.deep else self.drafter.config.num_slots)
        ends = self.rows[0].ends
        tree = grow_trees(
            anchors,
            draft if branches or draft is None else replace(draft, lattice=None),
            texts,
            count,
            beta=self._beta,
            depth=deepest,
            ends=torch.tensor(sorted(ends), device=anchors.device) if ends else None,
            chain=chain,
        )
        return tree, draft

    def _draft(self, anchors: Tensor, branches: bool, deepest: int) -> "Draft":
        """A block for every row, no longer than a tree can be deep.

        A chain needs no lattice, and may be replayed from a graph.
        """
        drafter, parts = self.drafter, self._parts
        options: dict[str, Any] = {
            "num_slots": min(deepest, drafter.config.num_slots),
            "return_lattice": branches or self._observer is not None,
            "graphs": parts.graphs,
        }
        if self._attached is not None:
            states, positions = self._attached.waiting()
            cache: Any = self._attached.cache
        else:
            assert self._contexts is not None
            states, positions, counts = self._contexts.waiting()
            cache = self._contexts.cache
            cache.expect(counts)
        draft = drafter.draft(anchors, states, positions, cache, parts.embed, parts.project, **options)
        warn_of_overflow(drafter, draft.finite)
        return draft

    def _free_columns(self) -> int:
        """Rows that one more pass may have."""
        sizes = [getattr(layer, "max_cache_len", None) for layer in self.cache.layers]
        return min((size - self._columns for size in sizes if size is not None), default=1 << 30)

    def _trees_fit(self, size: int) -> bool:
        """Whether a pass of `size` rows may verify a tree that is no chain."""
        return self._columns + size <= self._limit

    # ---- verify

    def _verify(self, tree: TokenTree) -> tuple[Tensor, Any]:
        """The target's logits `[rows, N, vocab]` behind every node, and all that its pass returned."""
        device = self.target.device
        tokens, depths = tree.tokens.to(device), tree.depths.to(device)
        inputs: dict[str, Any] = self._extras | {
            "input_ids": tokens,
            self._cache_name: self.cache,
            "output_hidden_states": self._parts.output_hidden_states,
            "return_dict": True,
        }
        if self._takes_positions:
            inputs["position_ids"] = self._last_positions + 1 + depths
        if self._trees_fit(tree.size):
            mask = self._tree_mask(tree)
        else:
            mask = self._mask
            if mask is not None:
                grown = self._columns + tree.size - mask.shape[1]
                mask = torch.cat([mask, mask.new_ones(1, grown)], dim=1).long()
        if mask is not None:
            inputs["attention_mask"] = mask
        outputs = self.target(**inputs)
        return outputs.logits, outputs

    def _tree_mask(self, tree: TokenTree) -> Tensor | None:
        """What each node sees, `[rows, 1, N, columns + N]`, as the target's attention takes it; `None` for all."""
        device = self.target.device
        if self._used is None and tree.size == 1:
            return None
        visible = tree.visible().to(device)
        rows, size = visible.shape[:2]
        past = visible.new_ones(1, 1, self._columns) if self._used is None else self._used[:, None]
        seen = torch.cat([past.expand(rows, size, -1), visible], dim=-1)[:, None]
        if self.target.config._attn_implementation == "sdpa":
            return seen
        dtype = self.target.dtype
        return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill(~seen, torch.finfo(dtype).min)

    # ---- accept

    def _accept(self, tree: TokenTree, logits: Tensor, ran: bool = False) -> tuple[list[list[int]], list[list[int]]]:
        """Commit tokens from the roots down; each row's accepted nodes (the anchor first) and committed tokens."""
        greedy = all(row.plainly_greedy for row in self.rows)
        parts = [tree.tokens, tree.parents, tree.sources]
        if greedy:
            parts.append(logits.float().argmax(dim=-1).to(tree.tokens.device))
        tokens, parents, sources, *best = torch.stack(parts).tolist()  # the block's one wait for the device
        paths, committed = [], []
        for number, row in enumerate(self.rows):
            held = zip(parents[number], tokens[number], strict=True)
            children = {(parent, token): node for node, (parent, token) in enumerate(held) if parent >= 0}
            path, made = [0], []
            came_from: Counter[str] = Counter()
            while True:
                at = path[-1]
                token = best[0][number][at] if greedy else row.choose(logits[number, at : at + 1])
                made.append(token)
                done = row.commit(token)
                child = children.get((at, token))
                if child is not None:
                    came_from[SOURCES[sources[number][child]]] += 1
                if done or child is None:
                    break
                path.append(child)
            proposed = len(children)
            if ran or proposed:
                row.figures.add_block(proposed, len(made), sum(came_from.values()))
                row.figures.count_sources(came_from)
            else:
                row.figures.plain_steps += len(made)
            paths.append(path)
            committed.append(made)
        return paths, committed

    # ---- compact

    def _compact(self, tree: TokenTree, paths: list[list[int]]) -> None:
        """Keep the accepted rows of the pass in the cache, and account for them."""
        device, size = self.target.device, tree.size
        lengths = [len(path) for path in paths]
        self._last_positions = self._last_positions + torch.tensor(lengths, device=device)[:, None]
        self._real = [real + length for real, length in zip(self._real, lengths, strict=True)]
        if self._used is None or len(self.rows) == 1:
            (path,) = paths
            if self._trees_fit(size):
                keep_path(self.cache, self._columns, size, path)
            else:
                self.cache.crop(len(path) - size)
            if self._used is not None:
                self._used = torch.cat([self._used, self._used.new_ones(1, len(path))], dim=1)
            self._columns += len(path)
        else:
            kept = keep_paths(self.cache, self._columns, size, paths)
            used = torch.cat([self._used, kept.to(device)], dim=1)
            self._used = pack(self.cache, used, max(self._real))
            self._columns = self._used.shape[1]

    def add(self, other: "DecodingLoop") -> None:
        """Take over the rows of another shared loop that has just started, with the same drafter and target."""
        if not self.rows:
            self.__dict__.update(other.__dict__)
            return
        assert self._used is not None and other._used is not None
        assert self._contexts is not None and other._contexts is not None
        self._used = join(self.cache, self._used, other.cache, other._used)
        self._columns = self._used.shape[1]
        self._last_positions = torch.cat([self._last_positions, other._last_positions], dim=-2)
        self._real += other._real
        self._contexts.add(other._contexts)
        self.rows += other.rows

    def drop(self, numbers: Sequence[int]) -> None:
        """Take the rows with these numbers out of the batch."""
        left = [number for number in range(len(self.rows)) if number not in set(numbers)]
        self.rows = [self.rows[number] for number in left]
        if not left:
            return
        keep_rows(self.cache, left)
        index = torch.tensor(left, device=self.target.device)
        if self._used is not None:
            self._used = self._used[index]
        self._last_positions = self._last_positions[..., index, :]
        self._real = [self._real[number] for number in left]
        if self._contexts is not None:
            self._contexts.keep(left)

    # ---- what a caller asked for besides tokens

    def _keep(self, outputs: Any, paths: list[list[int]] | None) -> None:
        """Hidden states and attentions of the only row's committed tokens, a step each; no `paths` for the prompt's."""
        if not any(self._keeps.values()):
            return
        if paths is None:
            for name, wanted in self._keeps.items():
                if wanted:
                    self.kept[name].append(getattr(outputs, name))
            return
        (path,) = paths
        for steps, node in enumerate(path):
            if self._keeps["hidden_states"]:
                self.kept["hidden_states"].append(tuple(part[:, node : node + 1] for part in outputs.hidden_states))
            if self._keeps["attentions"]:
                columns = [*range(self._columns), *(self._columns + other for other in path[: steps + 1])]
                self.kept["attentions"].append(
                    tuple(
                        None if part is None else part[:, :, node : node + 1, columns]
                        for part in outputs.attentions or ()
                    )
                )


def takes_positions(target: PreTrainedModel) -> bool:
    """Whether the target's forward takes position ids."""
    return "position_ids" in inspect.signature(target.forward).parameters


def tree_columns(target: PreTrainedModel, cache: Any) -> int:
    """How many columns the cache may have for a tree to be verified with `target`; 0 if none can be."""
    text = target.config.get_text_config()
    masked = target.config._attn_implementation in ("sdpa", "eager")
    if not masked or not takes_positions(target) or getattr(text, "alibi", False):
        return 0
    return tree_limit(cache)
