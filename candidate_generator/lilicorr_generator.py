"""The bridge between a drafter and `_assisted_decoding`: target states in, drafted tokens out, once a block.

The contract is deterministic unless the drafter's `proposal` says otherwise: no draft distribution is returned, so
under sampling Transformers draws each verified row from the target alone and keeps a drafted token only if it is the
one drawn. That is exact, whatever was drafted. A sampled proposal returns the logits that its tokens were drawn from,
and Transformers accepts and replaces by the ratio of the two distributions, which is exact too.
"""

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.candidate_generator import CandidateGenerator

from .drafter_context import AttachedContext
from .figures import GenerationFigures
from .node_count import DEFAULT_COUNT
from .pace import SHORT, Pace
from .requests import check_single, check_target, warn_of_lengths, warn_of_overflow
from .target_parts import TargetParts
from .transformers_api import cache_in

if TYPE_CHECKING:
    from ..modeling_lilicorr.configuration_lilicorr import LiLiCorrConfig
    from ..modeling_lilicorr.modeling_lilicorr import LiLiCorrModel


class LiLiCorrCandidateGenerator(CandidateGenerator):
    """Drafts blocks for one `generate` call and owns all of that call's state.

    Args:
        drafter: the `LiLiCorrModel`; its `last_generation` is pointed at this call's figures.
        target: the decoder-only model that `generate` was called on.
        generation_config: of the call; `max_length`, `eos_token_id`, `output_hidden_states`, `do_sample`,
            `num_assistant_tokens` and `num_assistant_tokens_schedule` are read.
        model_kwargs: of the call; the cache and the attention mask are read.
        input_ids: the prompt, `[1, L]` (int64), on any device.
        processors: the call's logits processors, through which a sampled proposal is drawn.

    Raises:
        ValueError: before anything is decoded, for a batch, an encoder-decoder target, or a target that the drafter
            was not made for.
    """

    requires_model_outputs = True

    def __init__(
        self,
        drafter: "LiLiCorrModel",
        target: PreTrainedModel,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        input_ids: Tensor,
        processors: Any = None,
    ) -> None:
        check_single(input_ids, "Transformers' assisted loop takes one at a time")
        check_target(drafter, target)
        warn_of_lengths(target)
        self.drafter = drafter
        self.figures = drafter.last_generation = GenerationFigures()
        self._parts = TargetParts(drafter, target, bool(generation_config.output_hidden_states))
        self._max_length: int = generation_config.max_length
        eos = generation_config.eos_token_id
        self._eos = None if eos is None else torch.as_tensor(eos, device=drafter.device).reshape(-1)

        self._overrides: dict[str, Any] = {"output_hidden_states": self._parts.output_hidden_states}
        cache = cache_in(model_kwargs)[1]
        mask = model_kwargs.get("attention_mask")
        self._mask: Tensor | None = mask if mask is not None and not bool(mask.all()) else None
        self._padding = 0 if self._mask is None else int((self._mask == 0).sum())
        self._rows = int(cache.get_seq_length())  # rows that the target has run and kept, padding included
        self._context = AttachedContext.of(cache, drafter, self._rows)
        new_rows = _only_new_rows(generation_config, model_kwargs, input_ids.to(target.device), self._rows)
        self.model_kwargs_overrides = self._overrides | _whole_mask(model_kwargs, input_ids, 0) | new_rows

        self._draws = drafter.config.proposal == "sampled" and bool(generation_config.do_sample)
        self._processors = processors or (lambda _, logits: logits)

        self._length = input_ids.shape[1]
        self._drafted, self._tokens = 0, list[int]()  # the last draft
        self._ran = False  # whether the drafter ran for the last pass, even if nothing of its draft was usable
        self._longest, adapts = longest_draft(drafter.config, target, generation_config)
        self._pace = Pace(self._longest, drafter.step_times.of(target)) if adapts else None
        self._verifying = 0.0  # when the last step's draft was ready
        self._probabilities: list[float] = []  # that its draft gave its tokens, those that were not proposed too
        self._took_in = 0  # context rows that it read for the first time; a prompt's would spoil its time

    @property
    def num_drafting_tokens(self) -> int:
        """The most tokens a call drafts at once; since 5.25 Transformers keeps as many states of recurrent layers."""
        return max(1, self._longest)

    def get_candidates(  # type: ignore[override]
        self,
        input_ids: Tensor,
        model_kwargs: dict[str, Any],
        model_outputs: Any,
        is_first_iteration: bool,
        n_last_matches: int | Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """`input_ids [1, L]` with up to `B - 1` tokens drafted behind it, and logits of drawn ones, `[1, S, vocab]`.

        The first call drafts nothing, because the target has not run yet. Later `model_outputs` holds the states of
        the last pass, of which those up to the last accepted token are committed context.
        """
        if is_first_iteration:
            return input_ids, None
        accepted = int(n_last_matches)  # once: on a GPU it waits for the device
        self._context.wait(*self._committed(model_outputs.hidden_states, accepted))
        self._context.rows = self._rows
        tokens, logits = self._paced(input_ids, accepted) if self._pace else self._draft(input_ids, self._longest)
        self._drafted, self._tokens = tokens.shape[1], tokens[0].tolist() if tokens.shape[1] else []
        self.model_kwargs_overrides = self._overrides | _whole_mask(model_kwargs, input_ids, self._drafted)
        return torch.cat([input_ids, tokens.to(input_ids.device)], dim=1), logits

    def _paced(self, input_ids: Tensor, accepted: int) -> tuple[Tensor, None]:
        """As `_draft`, of a length that follows what steps took, the last of which kept `accepted` drafted tokens."""
        assert self._pace is not None
        pace, began = self._pace, time.perf_counter()
        if self._verifying:
            pace.times.rest.add(self._drafted, began - self._verifying)
            pace.note(self._drafted, accepted, self._probabilities)
        wanted = pace.choose()
        tokens, _ = self._draft(input_ids, wanted)
        tokens = tokens[:, : pace.cut(self._probabilities)]
        self._ran = self._ran and (tokens.shape[1] > 0 or not self._probabilities)
        self._verifying = time.perf_counter()
        if 0 < self._took_in <= 2 * self.drafter.config.block_size:
            pace.times.draft.add(wanted, self._verifying - began)
        return tokens, None

    def _draft(self, input_ids: Tensor, wanted: int) -> tuple[Tensor, Tensor | None]:
        """Drafted tokens `[1, 0 … wanted]` to follow `input_ids [1, L]`, and what drawn ones were drawn from."""
        room = min(wanted, self._max_length - input_ids.shape[1] - 1)  # the target adds a token of its own to a draft
        self._ran, self._took_in, self._probabilities = room > 0, 0, []
        if not self._ran:
            return input_ids[:, :0], None
        anchor = input_ids[0, -1:].to(self.drafter.device)
        states, positions = self._context.waiting()
        self._took_in = states.shape[1]
        draft = self.drafter.draft(
            anchor, states, positions, self._context.cache, self._parts.embed, self._parts.project,
            graphs=self._parts.graphs,
            num_slots=room if self._draws else wanted, warp=partial(self._warp, input_ids) if self._draws else None,
        )  # fmt: skip
        warn_of_overflow(self.drafter, draft.finite)
        tokens = draft.tokens[:, :room]
        usable = self._usable(tokens[0], draft.finite[0, :room])
        if self._pace is not None:
            self._probabilities = draft.probabilities()[0, :usable].tolist()
        return tokens[:, :usable], self._all_rows(draft.logits, usable)

    def _warp(self, input_ids: Tensor, drafted: Tensor, logits: Tensor) -> Tensor:
        """`logits [1, vocab]` behind `input_ids [1, L]` and `drafted [1, s]`, as the target's own are warped."""
        ids = torch.cat([input_ids, drafted.to(input_ids.device)], dim=1)
        return self._processors(ids, logits.to(input_ids.device, copy=True)).to(logits)

    def _all_rows(self, logits: Tensor | None, usable: int) -> Tensor | None:
        """The first `usable` of `logits [1, S, vocab]`, as wide as the target's; `None` if there are none."""
        if logits is None or not usable:
            return None
        unused = self._parts.lm_head.weight.shape[0] - logits.shape[-1]  # rows that fill up the LM head
        return functional.pad(logits[:, :usable], (0, max(0, unused)), value=-torch.inf)

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int | Tensor) -> None:  # type: ignore[override]
        """Note what the last pass committed: `input_ids [1, L]` has grown by it."""
        new = input_ids[0, self._length :].tolist()
        committed = len(new)
        self._length = input_ids.shape[1]
        if self._ran:
            pairs = zip(new, self._tokens, strict=False)
            accepted = next((i for i, (token, drafted) in enumerate(pairs) if token != drafted), None)
            self.figures.add_block(
                self._drafted, committed, min(committed, self._drafted) if accepted is None else accepted
            )
        else:
            self.figures.plain_steps += committed

    def _committed(self, hidden_states: tuple[Tensor, ...], accepted: int) -> tuple[Tensor, Tensor]:
        """Target hidden states `[1, C, layers * d]` and positions `[1, C]` of the rows that the last pass committed.

        A pass over 5 tokens, 4 of them drafted and 2 of those accepted, commits its first 5 - 4 + 2 = 3 rows; the
        prompt's pass, with nothing drafted, commits all. Positions count real tokens, so with 3 rows of padding the
        row 7 of the target's cache stands at position 4.
        """
        rows = self._parts.rows_of(hidden_states) - self._drafted + accepted
        device = self.drafter.device
        states = self._parts.target_hidden_states(hidden_states, lambda part: part[:, :rows])
        first = self._rows - self._padding
        positions = torch.arange(first, first + rows, device=device)[None]
        self._rows += rows
        if self._mask is not None:  # only the prompt's pass has padding rows
            real = self._mask[0, -rows:].to(device).bool()
            states, positions = states[:, real], positions[:, real]
            self._mask = None
        return states, positions

    def _usable(self, tokens: Tensor, finite: Tensor) -> int:
        """How many of the drafted `tokens [S]` to propose: none from the first slot without usable logits
        (`finite [S]`, bool), none after an end-of-sequence token.
        """
        if self._eos is not None:
            ends = torch.isin(tokens, self._eos).int()
            finite = finite & (ends.cumsum(0) == ends)  # ends 0 1 0 1: keep 1 1 0 0
        return int(finite.cumprod(0).sum())


def longest_draft(config: "LiLiCorrConfig", target: PreTrainedModel, asked: GenerationConfig) -> tuple[int, bool]:
    """The longest draft of a call and whether its steps may choose shorter ones.

    `num_assistant_tokens` and `num_assistant_tokens_schedule` of the call win over the drafter's `draft_lengths`; at
    Transformers' defaults (20, "constant") they count as not given. Steps choose by their times, which differ from run
    to run, so only under greedy decoding, where the text does not depend on it, and on a CPU, where length costs; under
    sampling there all drafts are short.

    Raises:
        ValueError: if `num_assistant_tokens` is negative.
    """
    count, schedule = asked.num_assistant_tokens, asked.num_assistant_tokens_schedule
    if count is not None and count < 0:
        raise ValueError(f"num_assistant_tokens is {count}, expected 0 or more; leave it out for whole blocks.")
    given = count not in (None, DEFAULT_COUNT)
    adapts = schedule not in (None, "constant") or (config.draft_lengths == "adaptive" and not given)
    longest = min(count, config.num_slots) if given else config.num_slots
    if not adapts or not longest or target.device.type != "cpu":
        return longest, False
    return (min(SHORT, longest), False) if asked.do_sample else (longest, True)


def _only_new_rows(
    generation_config: GenerationConfig, model_kwargs: dict[str, Any], input_ids: Tensor, cached: int
) -> dict[str, Any]:
    """Inputs for the prompt's pass where a continued cache already holds its first `cached` rows, else nothing.

    Transformers' assisted loop would run the whole prompt on top of them. A prompt as long as the mask is the whole
    conversation: with 10 rows cached and 14 tokens, only the last 4 belong in the pass.
    """
    mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
    length = input_ids.shape[1]
    whole = mask.shape[1] if mask is not None else getattr(generation_config, "_mask_length", length)
    if cached == 0 or whole != length or cached >= length:
        return {}
    inputs = {"input_ids": input_ids[:, cached:], "attention_mask": mask}
    return inputs if positions is None else inputs | {"position_ids": positions[..., cached:]}


def _whole_mask(model_kwargs: dict[str, Any], input_ids: Tensor, drafted: int) -> dict[str, Any]:
    """The attention mask of the next pass where it covers more than `input_ids [1, L]`, else nothing.

    With only new tokens given to a continued cache, or a prompt given as embeddings, the mask is longer than the ids.
    Transformers' assisted loop would cut it to their length, so here it is, with a 1 for each drafted token.
    """
    mask = model_kwargs.get("attention_mask")
    if mask is None or mask.shape[1] == input_ids.shape[1]:
        return {}
    return {"attention_mask": torch.cat([mask, mask.new_ones(1, drafted)], dim=1)}
