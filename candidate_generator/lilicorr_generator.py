"""The bridge between a drafter and `_assisted_decoding`: target states in, drafted tokens out, once a block.

The contract is deterministic unless the drafter's `proposal` says otherwise: no draft distribution is returned, so
under sampling Transformers draws each verified row from the target alone and keeps a drafted token only if it is the
one drawn. That is exact, whatever was drafted. A sampled proposal returns the logits that its tokens were drawn from,
and Transformers accepts and replaces by the ratio of the two distributions, which is exact too.
"""

import copy
import time
import weakref
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.generation.candidate_generator import CandidateGenerator
from transformers.utils import output_capturing

from .figures import GenerationFigures
from .pace import SHORT, Pace

if TYPE_CHECKING:
    from ..modeling_lilicorr.configuration_lilicorr import LiLiCorrConfig
    from ..modeling_lilicorr.dflash import DraftCache
    from ..modeling_lilicorr.modeling_lilicorr import LiLiCorrModel

_RIDING = "_lilicorr_context"  # attribute of a target cache that holds the drafter's context of the same rows

_DEFAULT_COUNT = 20  # Transformers' own num_assistant_tokens where a call names none

# Rows from which MKL's fp32 product with a vocabulary-sized matrix is fast again: 15 take it over twice as long as 16.
_FULL_TILE = 16

# Whether a list in `output_hidden_states` selects entries of the full tuple. The first releases that took a list
# counted differently (layer ids, no entry for the embedding), so there every state is asked for instead.
_SELECTS_STATES = hasattr(output_capturing, "selected_hidden_states")


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
        check_request(drafter, target, input_ids)
        self.drafter = drafter
        self.figures = drafter.last_generation = GenerationFigures()
        self._embedding: Any = target.get_input_embeddings()
        self._lm_head: Any = target.get_output_embeddings()
        self._target_dtype = target.dtype
        on_cpu = drafter.device.type == target.device.type == "cpu"
        self._fast_logits = drafter.fast_logits.of(self._lm_head) if on_cpu else None
        self._graphs = drafter.graphs.of(drafter, self._embedding, self._lm_head)
        self._max_length: int = generation_config.max_length
        eos = generation_config.eos_token_id
        self._eos = None if eos is None else torch.as_tensor(eos, device=drafter.device).reshape(-1)

        self._taps = [layer + 1 for layer in drafter.config.target_layer_ids]  # entry 0 is the embedding's output
        # Transformers cannot give a person all states of a pass that recorded only some of them.
        only_taps = _SELECTS_STATES and not generation_config.output_hidden_states
        self._overrides: dict[str, Any] = {"output_hidden_states": self._taps if only_taps else True}

        cache = model_kwargs["cache"] if "cache" in model_kwargs else model_kwargs["past_key_values"]
        mask = model_kwargs.get("attention_mask")
        self._mask: Tensor | None = mask if mask is not None and not bool(mask.all()) else None
        self._padding = 0 if self._mask is None else int((self._mask == 0).sum())
        self._rows = int(cache.get_seq_length())  # rows that the target has run and kept, padding included
        self._context = RidingContext.board(cache, drafter, self._rows)
        new_rows = _only_new_rows(generation_config, model_kwargs, input_ids.to(target.device), self._rows)
        self.model_kwargs_overrides = self._overrides | _whole_mask(model_kwargs, input_ids, 0) | new_rows

        self._draws = drafter.config.proposal == "sampled" and bool(generation_config.do_sample)
        self._processors = processors or (lambda _, logits: logits)

        self._length = input_ids.shape[1]
        self._drafted = 0  # tokens of the last draft
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
        self._drafted = tokens.shape[1]
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
            anchor, states, positions, self._context.cache, self._embed, self._project, graphs=self._graphs,
            num_slots=room if self._draws else wanted, warp=partial(self._warp, input_ids) if self._draws else None,
        )  # fmt: skip
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
        unused = self._lm_head.weight.shape[0] - logits.shape[-1]  # rows that fill up the LM head
        return functional.pad(logits[:, :usable], (0, max(0, unused)), value=-torch.inf)

    def update_candidate_strategy(self, input_ids: Tensor, scores: Tensor, num_matches: int | Tensor) -> None:  # type: ignore[override]
        """Note what the last pass committed: `input_ids [1, L]` has grown by it."""
        committed = input_ids.shape[1] - self._length
        self._length = input_ids.shape[1]
        if self._ran:
            self.figures.add_block(self._drafted, committed)
        else:
            self.figures.plain_steps += committed

    def _committed(self, hidden_states: tuple[Tensor, ...], accepted: int) -> tuple[Tensor, Tensor]:
        """Tapped states `[1, C, taps * d]` and positions `[1, C]` of the rows that the last pass committed.

        A pass over 5 tokens, 4 of them drafted and 2 of those accepted, commits its first 5 - 4 + 2 = 3 rows; the
        prompt's pass, with nothing drafted, commits all. Positions count real tokens, so with 3 rows of padding the
        row 7 of the target's cache stands at position 4.
        """
        rows = hidden_states[self._taps[0]].shape[1] - self._drafted + accepted
        device, dtype = self.drafter.device, self.drafter.dtype
        states = torch.cat([hidden_states[tap][:, :rows].to(device, dtype) for tap in self._taps], dim=-1)
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

    def _embed(self, ids: Tensor) -> Tensor:
        return self._embedding(_beside(ids, self._embedding.weight)).to(self.drafter.device)

    def _project(self, hidden: Tensor) -> Tensor:
        if self._fast_logits is not None:
            return self._fast_logits(hidden)
        weight = self._lm_head.weight
        dtype = weight.dtype if weight.is_floating_point() else self._target_dtype  # quantised tables
        hidden, rows = _beside(hidden, weight).to(dtype), hidden.shape[1]
        if hidden.device.type == "cpu" and dtype == torch.float32 and 3 < rows < _FULL_TILE:
            hidden = functional.pad(hidden, (0, 0, 0, _FULL_TILE - rows))
        return self._lm_head(hidden)[:, :rows].to(self.drafter.device)


class RidingContext:
    """A drafter's context cache that stays with the target's cache, so that the next turn of a chat goes on with it.

    It affects what is drafted, never what is right: a stale one only costs acceptance. Copies of the target's cache
    take a copy along; a pickled one leaves it behind.
    """

    def __init__(self, drafter: "LiLiCorrModel") -> None:
        self.drafter = weakref.ref(drafter)
        self.placement = (drafter.device, drafter.dtype)
        self.cache: DraftCache = drafter.new_cache()
        self.rows = 0  # rows of the target's cache, from the start, that `cache` knows (a few may be missing)
        self._waiting: list[tuple[Tensor, Tensor]] = []  # committed rows that the drafter has not taken in yet

    @classmethod
    def board(cls, target_cache: Any, drafter: "LiLiCorrModel", rows: int) -> "RidingContext":
        """The context riding with `target_cache` if it is `drafter`'s and knows at most its `rows`, else a new one."""
        riding: Any = getattr(target_cache, _RIDING, None)
        ours = isinstance(riding, cls) and riding.drafter() is drafter and riding.rows <= rows
        if not ours or riding.placement != (drafter.device, drafter.dtype):
            riding = cls(drafter)
            setattr(target_cache, _RIDING, riding)
        return riding

    def wait(self, states: Tensor, positions: Tensor) -> None:
        """Keep committed rows, states `[1, C, taps * d]` and positions `[1, C]`, for the next draft."""
        self._waiting.append((states, positions))

    def waiting(self) -> tuple[Tensor, Tensor]:
        """All rows kept since the last draft, as given to `wait`; they wait no longer."""
        states, positions = (torch.cat(parts, dim=1) for parts in zip(*self._waiting, strict=True))
        self._waiting = []
        return states, positions

    def __deepcopy__(self, memo: dict[int, Any]) -> "RidingContext":
        copied = object.__new__(type(self))
        copied.__dict__ = self.__dict__ | {"cache": copy.deepcopy(self.cache, memo), "_waiting": [*self._waiting]}
        return copied

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return dict, ()


def check_request(drafter: "LiLiCorrModel", target: PreTrainedModel, input_ids: Tensor) -> None:
    """Raise a `ValueError` of one sentence if `drafter` cannot draft for `target` or for these prompts `[batch, L]`."""
    if input_ids.shape[0] > 1:
        raise ValueError(
            f"Got a batch of {input_ids.shape[0]} prompts, but generate() with an assistant takes one at a time; call "
            "it once for each prompt."
        )
    if target.config.is_encoder_decoder:
        raise ValueError(
            f"The target {type(target).__name__} is an encoder-decoder, but this drafter reads a decoder-only model; "
            "call generate() without assistant_model."
        )
    text = target.config.get_text_config()
    expected = {
        "vocab_size": (text.vocab_size, drafter.config.vocab_size),
        "hidden_size": (text.hidden_size, drafter.config.hidden_size),
        "num_hidden_layers": (text.num_hidden_layers, drafter.config.num_target_layers),
    }
    for name, (given, wanted) in expected.items():
        if given != wanted:
            raise ValueError(
                f"The target has {name} {given}, but this drafter was made for a target with {wanted}; use the target "
                "that the drafter's card names, or a drafter of this target."
            )
    if target.get_input_embeddings() is None or target.get_output_embeddings() is None:
        raise ValueError(
            f"The target {type(target).__name__} shows no input embedding or no LM head, and the drafter borrows both; "
            "use a causal LM class whose get_input_embeddings() and get_output_embeddings() return them."
        )


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
    given = count not in (None, _DEFAULT_COUNT)
    adapts = schedule not in (None, "constant") or (config.draft_lengths == "adaptive" and not given)
    longest = min(count, config.num_slots) if given else config.num_slots
    if not adapts or not longest or target.device.type != "cpu":
        return longest, False
    return (min(SHORT, longest), False) if asked.do_sample else (longest, True)


def check_processors(processors: Iterable[Any]) -> None:
    """Raise a `ValueError` of one sentence for a logits processor that counts on seeing every token once, in order.

    The assisted loop also shows it drafted tokens that are then refused, so what it keeps of them would be wrong.
    """
    for processor in processors:
        if isinstance(processor, (UnbatchedClassifierFreeGuidanceLogitsProcessor, SynthIDTextWatermarkLogitsProcessor)):
            raise ValueError(
                f"{type(processor).__name__} keeps a state that drafted tokens would spoil, and generate() with an "
                "assistant needs processors without one; leave out guidance_scale or the watermark, or assistant_model."
            )


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


def _beside(tensor: Tensor, weight: Tensor) -> Tensor:
    """`tensor` on the device of `weight`; the hooks of an offloaded (meta) weight move their input themselves."""
    return tensor if weight.is_meta else tensor.to(weight.device)
