"""One sequence of a decoding loop: what it holds so far, how its next token is chosen, and when it ends."""

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from .figures import GenerationFigures
from .text_continuation import TextContinuation
from .tree_growth import Text

_ROOM = 256  # tokens by which a row's buffer grows


@dataclass
class Request:
    """How one sequence is decoded: processors, criteria and configuration as `generate` prepared them."""

    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    config: GenerationConfig
    streamer: Any = None

    @property
    def ends(self) -> set[int]:
        """Tokens that end the sequence."""
        found = [c.eos_token_id for c in self.criteria if type(c) is EosTokenCriteria]
        return {token for ids in found for token in ids.reshape(-1).tolist()}

    @property
    def max_length(self) -> int:
        """Tokens of the sequence at most, prompt included."""
        limits = [c.max_length for c in self.criteria if type(c) is MaxLengthCriteria]
        return min(limits, default=self.config.max_length)

    def of_row(self, row: int, rows: int) -> "Request":
        """The request of one row of a batch: processors and criteria of its own, that see this row alone.

        A streamer is told of whole steps of a batch, by whoever sees all rows.
        """
        if rows == 1:
            return self
        processors = LogitsProcessorList(_row_of(processor, row) for processor in self.processors)
        return Request(processors, StoppingCriteriaList(_copied(c) for c in self.criteria), self.config)


def _row_of(processor: Any, row: int) -> Any:
    """`processor` for a single row of the batch that it was made for; those with a state get one of their own."""
    if type(processor) is PrefixConstrainedLogitsProcessor:
        allowed, beams = processor._prefix_allowed_tokens_fn, processor._num_beams
        return PrefixConstrainedLogitsProcessor(lambda _, ids: allowed(row // beams, ids), 1)
    own = _copied(processor)
    for name in ("prompt_ignore_length", "encoder_input_ids"):
        held = getattr(own, name, None)
        if isinstance(held, Tensor) and held.dim() and held.shape[0] > 1:
            setattr(own, name, held[row : row + 1])
    if hasattr(own, "generated_ngrams") and hasattr(own, "batch_size"):  # of the prompt, by row
        own.generated_ngrams, own.batch_size = own.generated_ngrams[row : row + 1], 1
    context = getattr(own, "unconditional_context", None)
    if isinstance(context, dict):
        for name, held in context.items():
            if isinstance(held, Tensor) and held.shape[0] > 1:
                context[name] = held[row : row + 1]
    return own


def _copied(part: Any) -> Any:
    """A copy with a state of its own that shares the models it may hold; `part` itself if it cannot be copied."""
    shared = {
        id(value): value for value in getattr(part, "__dict__", {}).values() if isinstance(value, torch.nn.Module)
    }
    try:
        return copy.deepcopy(part, shared)
    except Exception:  # whatever a person's own class raises here says only that it has no copies
        return part


@dataclass
class Taken:
    """What `generate` returns besides tokens, a step at a time."""

    scores: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)


class DecodingRow:
    """A sequence that grows token by token, each chosen from the target's logits behind the ones before it.

    Args:
        ids: the prompt, `[L]` (int64), padding included, as processors are to see it.
        request: how it is decoded.
        lookup: whether to look up the text's own continuation; `real` is the prompt without padding then, `[≤ L]`.
    """

    def __init__(self, ids: Tensor, request: Request, real: Tensor, lookup: bool) -> None:
        self.request = request
        self.prompt_length = ids.shape[0]
        self.tokens: list[int] = []  # new ones
        self.finished_at: int | None = None  # new tokens when a criterion was first fulfilled
        self.figures = GenerationFigures()
        self.taken = Taken()
        self.text = TextContinuation(real.tolist()) if lookup else None
        self._buffer = ids[None].clone()
        self.ends, self._max_length = request.ends, request.max_length
        self._own_criteria = [c for c in request.criteria if type(c) not in (EosTokenCriteria, MaxLengthCriteria)]
        config = request.config
        self._keeps = {
            name: bool(config.return_dict_in_generate and getattr(config, f"output_{name}"))
            for name in ("scores", "logits")
        }
        self.plainly_greedy = not (request.processors or config.do_sample or any(self._keeps.values()))

    @property
    def length(self) -> int:
        """Tokens of the sequence, prompt included."""
        return self.prompt_length + len(self.tokens)

    @property
    def room(self) -> int:
        """Tokens that may still follow."""
        return self._max_length - self.length

    @property
    def ids(self) -> Any:
        """The sequence, `[1, length]` (int64)."""
        return self._buffer[:, : self.length]

    def continuation(self) -> Text | None:
        """The text's own continuation, with its chances; `None` where there is none or none is wanted."""
        proposal = self.text.propose() if self.text else None
        return (proposal, self.text.chances(proposal)) if self.text and proposal else None

    def choose(self, logits: Tensor) -> int:
        """The next token from the target's logits behind the sequence, `[1, vocab]`, as plain `generate` chooses it."""
        logits = logits.to(copy=True, dtype=torch.float32, device=self._buffer.device)
        scores = self.request.processors(self.ids, logits)
        if self._keeps["scores"]:
            self.taken.scores.append(scores)
        if self._keeps["logits"]:
            self.taken.logits.append(logits)
        if self.request.config.do_sample:
            return int(torch.multinomial(scores.softmax(dim=-1), num_samples=1))
        return int(scores.argmax(dim=-1))

    def commit(self, token: int) -> bool:
        """Add `token`; whether the sequence has reached an end with it or before."""
        if self.length == self._buffer.shape[1]:
            grown = self._buffer.new_zeros(1, self.length + _ROOM)
            grown[:, : self.length] = self._buffer
            self._buffer = grown
        self._buffer[0, self.length] = token
        self.tokens.append(token)
        if self.text is not None:
            self.text.extend((token,))
        if self.request.streamer is not None:
            self.request.streamer.put(torch.tensor([token]))
        done = token in self.ends or self.room <= 0
        if self._own_criteria:
            scores = tuple(self.taken.scores) if self._keeps["scores"] else None
            done = any([bool(torch.as_tensor(c(self.ids, scores)).all()) for c in self._own_criteria]) or done
        if done and self.finished_at is None:
            self.finished_at = len(self.tokens)
        return done
