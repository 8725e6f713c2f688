"""The target answering many prompts at once: batches of like length out of which finished rows are taken."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from .chat import Chat, hash_of
from .prompts import Conversation
from .tally import Unusable

ENDED = ("stop", "tool_calls", "function_call")  # why an answer ends that the target itself ended
COLDEST = 1e-6  # logits divided by less may be no fp32 numbers any more
WINDOW = 32  # batches that are sorted by length together


def check_temperature(temperature: float) -> None:
    """Raise a `ValueError` for a temperature that is neither 0 nor one to sample at."""
    if temperature and not COLDEST <= temperature < float("inf"):
        raise ValueError(
            f"temperature is {temperature}, expected 0, which is greedy, or a finite number of {COLDEST} or more."
        )


@dataclass(frozen=True)
class Decoding:
    """How answers are decoded.

    Attributes:
        max_new_tokens: longest answer; max_context: prompt and answer together (0: as long as the target can).
        temperature: 0 is greedy; above it, sampling with top_p and top_k (0: all).
        seed: each answer's draws depend on it, on the conversation's id and on the turn, not on the batch.
    """

    max_new_tokens: int = 256
    max_context: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def validate(self) -> None:
        """Raise a `ValueError` of one sentence for a setting out of range."""
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}, expected 1 or more.")
        for name in ("max_context", "top_k"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, expected 0 or more.")
        check_temperature(self.temperature)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}, expected more than 0 and at most 1.")
        if not self.temperature and (self.top_p < 1 or self.top_k):
            raise ValueError("top_p and top_k need a temperature above 0; greedy answers draw nothing.")

    def seed_of(self, conversation: str, turn: int) -> int:
        """63 bits that belong to one answer."""
        digest = hashlib.sha256(f"{self.seed}\0{conversation}\0{turn}".encode()).digest()
        return int.from_bytes(digest[:8], "big") >> 1


@dataclass
class Answer:
    """One answer: its text, why it ended, how many tokens it has, and their ids where they are known.

    `finish_reason` is `stop` or `tool_calls` where the target ended it, `length` where a cap did, or what else a server
    says; `reasoning` and `tool_calls` are what a server has parted from the text.
    """

    text: str
    finish_reason: str
    tokens: int
    ids: list[int] | None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] | None = None

    @property
    def finished(self) -> bool:
        """Whether the target itself ended it."""
        return self.finish_reason in ENDED


@dataclass
class Dialogue:
    """A conversation on its way: `messages` with the answers so far, turn by turn.

    `prompt_hashes` are those of the token ids that each answer followed, `skipped` says why it was given up, if it was,
    and `now` what the clock showed where that differs by conversation.
    """

    conversation: Conversation
    messages: list[dict[str, Any]] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    prompt_hashes: list[str] = field(default_factory=list)
    skipped: Unusable | None = None
    now: datetime | None = None

    @property
    def open(self) -> bool:
        """Whether there is more to answer.

        An answer cut off ends the conversation, for a later turn would build on it; so does a tool call of the target's
        own, whose result nobody has.
        """
        over = self.skipped or len(self.answers) == len(self.conversation.turns)
        last = self.answers[-1] if self.answers else None
        return not over and (last is None or (last.finished and not last.tool_calls))

    @property
    def finished(self) -> bool:
        """Whether all was answered that could be, and the target itself ended its last answer."""
        last = self.answers[-1] if self.answers else None
        whole = len(self.answers) == len(self.conversation.turns)
        return last is not None and not self.skipped and last.finished and (whole or bool(last.tool_calls))

    @property
    def context(self) -> list[dict[str, Any]]:
        """The messages that the next answer follows."""
        return self.messages + self.conversation.turns[len(self.answers)]

    def give_up(self, reason: str, sentence: str) -> None:
        """End the conversation for `reason`."""
        self.skipped = Unusable(reason, f"{self.conversation.id!r}: {sentence}")

    def add(self, answer: Answer, prompt_ids: list[int]) -> None:
        """Append the next answer, which follows `prompt_ids`."""
        parted = {"reasoning_content": answer.reasoning, "tool_calls": answer.tool_calls}
        said = {name: part for name, part in parted.items() if part}
        self.messages = [*self.context, {"role": "assistant", "content": answer.text, **said}]
        self.answers.append(answer)
        self.prompt_hashes.append(hash_of(prompt_ids))


class TargetAnswers:
    """Conversations answered by a target in this process.

    Args:
        model: the target, in evaluation mode; chat: of its tokenizer.
        decoding: how; batch_size: prompts decoded together.
    """

    def __init__(self, model: Any, chat: Chat, decoding: Decoding, batch_size: int) -> None:
        self.model, self.chat, self.decoding, self.batch_size = model, chat, decoding, batch_size
        longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.max_context = min(decoding.max_context or longest or 1 << 60, longest or 1 << 60)

    def __call__(self, conversations: Iterable[Conversation]) -> Iterator[Dialogue]:
        """Every conversation once it is over, like lengths together: in another order than they came in."""
        source, begun = iter(conversations), list[tuple[list[int], Dialogue]]()
        while window := list(islice(source, WINDOW * self.batch_size)):
            fresh: list[tuple[list[int], Dialogue]] = []
            for conversation in window:
                yield from self._enqueue(Dialogue(conversation), fresh)
            while fresh or begun:
                # Later turns go first, so that a kill loses few conversations that were under way.
                queue = begun if len(begun) >= self.batch_size or not fresh else fresh
                queue.sort(key=lambda pair: len(pair[0]))
                group, queue[:] = queue[: self.batch_size], queue[self.batch_size :]
                self._answer(group)
                for _, dialogue in group:
                    yield from self._enqueue(dialogue, begun)

    def _enqueue(self, dialogue: Dialogue, queue: list[tuple[list[int], Dialogue]]) -> Iterator[Dialogue]:
        """Put `dialogue` into `queue` if another answer fits, else hand it out."""
        if dialogue.open:
            try:
                prompt = self.chat.prompt_ids(dialogue.context, dialogue.conversation.tools)
            except Unusable as problem:
                dialogue.give_up(problem.reason, str(problem))
            else:
                if len(prompt) < self.max_context:
                    queue.append((prompt, dialogue))
                    return
                told = f"its prompt of {len(prompt)} tokens leaves no room in {self.max_context}"
                dialogue.give_up("a prompt that leaves no room for an answer", told)
        yield dialogue

    def _answer(self, group: list[tuple[list[int], Dialogue]]) -> None:
        prompts = [prompt for prompt, _ in group]
        caps = [min(self.decoding.max_new_tokens, self.max_context - len(prompt)) for prompt in prompts]
        seeds = [self.decoding.seed_of(dialogue.conversation.id, len(dialogue.answers)) for _, dialogue in group]
        stops = stop_ids(self.model)
        for (prompt, dialogue), ids in zip(group, decode(self.model, prompts, caps, self.decoding, seeds), strict=True):
            if ids is None:
                dialogue.give_up("logits that are NaN", "the target's logits are NaN")
                continue
            finished = bool(ids) and ids[-1] in stops
            text = self.chat.tokenizer.decode(ids[:-1] if finished else ids)
            dialogue.add(Answer(str(text), "stop" if finished else "length", len(ids), ids), prompt)


def stop_ids(model: PreTrainedModel) -> set[int]:
    """The tokens that end an answer of `model`."""
    assert model.generation_config is not None
    eos = model.generation_config.eos_token_id
    return set(eos if isinstance(eos, list) else [] if eos is None else [eos])


@torch.inference_mode()
def decode(
    model: Any, prompts: Sequence[list[int]], caps: Sequence[int], decoding: Decoding, seeds: Sequence[int]
) -> list[list[int] | None]:
    """Answers' ids, each through its stop token or of `caps` tokens; `None` for a row whose logits are NaN.

    Greedy answers are those of `generate` on each prompt alone, up to what the batch's shape does to rounding. Sampled
    ones follow draws of their own seeds, so they too depend on the batch through rounding only.
    """
    stops, device = stop_ids(model), model.device
    answers: list[list[int] | None] = [[] for _ in prompts]
    rows = list(range(len(prompts)))
    width = max(map(len, prompts))
    pad = min(stops, default=0)
    ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    draws = torch.stack([_draws(seed, max(caps)) for seed in seeds]).to(device) if decoding.temperature else None
    cache: dict[str, Any] = {}
    while rows:
        left = [caps[row] - len(answers[row] or []) for row in rows]
        choice = _Choice(decoding, draws[rows] if draws is not None else None, ids.shape[1] - width)
        watch = _Watch(stops, left, ids.shape[1])
        settings = GenerationConfig(
            do_sample=False,
            max_new_tokens=max(left),
            eos_token_id=sorted(stops) or None,
            pad_token_id=pad,
            return_dict_in_generate=True,
        )
        output = model.generate(
            ids,
            attention_mask=mask,
            generation_config=settings,
            logits_processor=LogitsProcessorList([choice]),
            stopping_criteria=StoppingCriteriaList([watch]),
            **cache,
        )
        keep = []
        for place, row in enumerate(rows):
            said = _through_stop(output.sequences[place, ids.shape[1] :].tolist()[: left[place]], stops)
            whole = [*(answers[row] or []), *said]
            answers[row] = None if choice.broken[place] else whole
            if not choice.broken[place] and len(whole) < caps[row] and whole[-1] not in stops:
                keep.append(place)
        kept = torch.tensor(keep, dtype=torch.long, device=device)
        mask = torch.cat([mask, mask.new_ones(len(rows), output.sequences.shape[1] - ids.shape[1])], dim=1)[kept]
        ids, rows = output.sequences[kept], [rows[place] for place in keep]
        cache = _compacted(output, kept) if keep else {}
    return answers


def _compacted(output: Any, kept: Tensor) -> dict[str, Any]:
    """The cache of the rows that go on, as an argument of `generate`; nothing where a cache cannot give up rows."""
    name = "cache" if "cache" in output else "past_key_values"
    cache = output[name]
    if not all(hasattr(layer, "batch_select_indices") for layer in getattr(cache, "layers", [None])):
        return {}  # the next segment reads the texts anew
    cache.batch_select_indices(kept)
    return {name: cache}


def _through_stop(ids: list[int], stops: set[int]) -> list[int]:
    for place, token in enumerate(ids):
        if token in stops:
            return ids[: place + 1]
    return ids


def _draws(seed: int, count: int) -> Tensor:
    """`[count]` uniform numbers (fp64)."""
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


class _Watch(StoppingCriteria):
    """Ends a segment once a quarter of its rows are over, so that the rest goes on in a smaller batch."""

    def __init__(self, stops: set[int], left: list[int], start: int) -> None:
        self.stops, self.left, self.start = stops, left, start
        self.over: Tensor | None = None

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        last = input_ids[:, -1]
        ended = torch.isin(last, torch.tensor(sorted(self.stops), device=last.device, dtype=last.dtype))
        full = input_ids.shape[1] - self.start >= torch.tensor(self.left, device=last.device)
        self.over = ended | full if self.over is None else self.over | ended | full
        return (4 * self.over.sum() >= len(last)).expand(len(last))


class _Choice(LogitsProcessor):
    """Notes rows of NaN; with `draws [rows, steps]`, leaves of each row only the token that its draw falls on."""

    def __init__(self, decoding: Decoding, draws: Tensor | None, produced: int) -> None:
        self.draws, self.step = draws, produced
        self.broken: Any = None
        self.warpers: list[Any] = []
        if draws is not None:
            self.warpers.append(TemperatureLogitsWarper(decoding.temperature))
            self.warpers += [TopKLogitsWarper(decoding.top_k)] if decoding.top_k else []
            self.warpers += [TopPLogitsWarper(decoding.top_p)] if decoding.top_p < 1 else []

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        nan = scores.isnan().any(dim=-1)
        self.broken = nan if self.broken is None else self.broken | nan
        if self.draws is None:
            return scores
        for warper in self.warpers:
            scores = warper(input_ids, scores)
        heap = scores.softmax(dim=-1, dtype=torch.float64).cumsum(dim=-1)
        point = self.draws[:, self.step, None] * heap[:, -1:]
        picked = torch.searchsorted(heap, point, right=True).clamp(max=scores.shape[-1] - 1)
        self.step += 1
        return torch.full_like(scores, -torch.inf).scatter(-1, picked, 0.0)
