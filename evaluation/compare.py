"""Plain against assisted generation of one target: same prompts, one run, alternating, only `generate` is timed."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..training.decode import check_temperature
from .metrics import Trace, first_difference, trace_of


@dataclass(frozen=True)
class Answer:
    """One timed call of `generate`: the new token ids, the seconds it took, what drafting did, seconds by stage.

    `passes` of the target after the prompt's are counted where stages are timed.
    """

    token_ids: tuple[int, ...]
    seconds: float
    trace: Trace | None = None
    stages: dict[str, float] = field(default_factory=dict)
    passes: int | None = None

    @property
    def tokens_per_second(self) -> float:
        """New tokens by wall-clock seconds, prefill included."""
        return len(self.token_ids) / self.seconds


@dataclass(frozen=True)
class Difference:
    """Where two greedy answers part, and how far apart the target's logits of the two tokens are there.

    `logit_gap` is `None` where one answer merely ended earlier.
    """

    index: int
    logit_gap: float | None


LOOKUP_TOKENS = 3  # of Transformers' prompt lookup


@dataclass(frozen=True)
class Comparison:
    """A prompt answered plainly and assisted; under sampling `equal` is `None`, since two draws need not agree.

    `lookup` is what a person has without a drafter, Transformers' prompt lookup; greedy only.
    """

    prompt: str
    plain: Answer
    assisted: Answer
    equal: bool | None
    difference: Difference | None = None
    lookup: Answer | None = None


def encode(
    tokenizer: PreTrainedTokenizerBase, prompt: str | list[dict[str, str]], device: torch.device
) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` `[1, length]` (int64), by the chat template if there is one.

    Args:
        prompt: one user turn, or the messages of a conversation; without a template they are joined by line breaks.

    Raises:
        ValueError: if the prompt has no tokens.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    encoded: Any
    if tokenizer.chat_template is None:
        encoded = tokenizer("\n".join(message["content"] for message in messages), return_tensors="pt")
    else:
        options: Any = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
        encoded = tokenizer.apply_chat_template(messages, **options)
    if encoded["input_ids"].shape[-1] == 0:
        raise ValueError(f"The prompt {prompt!r} has no tokens, and a model needs one to go on from; give some text.")
    return {key: encoded[key].to(device) for key in ("input_ids", "attention_mask")}


def decoding_options(max_new_tokens: int, temperature: float = 0.0) -> dict[str, Any]:
    """Arguments for `generate`: greedy at temperature 0, else sampling from the whole distribution.

    Raises:
        ValueError: for a temperature that is neither 0 nor one to sample at.
    """
    check_temperature(temperature)
    if temperature == 0:
        return {"max_new_tokens": max_new_tokens, "do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    whole = {"top_k": 0, "top_p": 1.0}
    return {"max_new_tokens": max_new_tokens, "do_sample": True, "temperature": temperature, **whole}


@torch.no_grad()
def answer(
    target: PreTrainedModel,
    inputs: dict[str, torch.Tensor],
    drafter: Any = None,
    *,
    seed: int = 0,
    stages: bool = False,
    **options: Any,
) -> Answer:
    """Call `generate` once and time it.

    Args:
        target: the causal LM; inputs: from `encode`; drafter: the assistant model, or `None` for plain generation.
        seed: set before the call.
        stages: also time what goes before and the prompt's pass ("prefill"), drafting and the target's other passes
            apart.
        **options: passed to `generate`, see `decoding_options`.

    Returns:
        `Answer` with the ids after the prompt.
    """
    torch.manual_seed(seed)
    if drafter is not None:
        options["assistant_model"] = drafter
    clock = Clock(target.device) if stages and target.device.type in ("cpu", "cuda") else None
    _wait(target.device)
    with stage_clock(target, drafter, clock):
        started = time.perf_counter()
        output = cast(Any, target).generate(**inputs, **options)
        _wait(target.device)
        seconds = time.perf_counter() - started
    new = tuple(output[0, inputs["input_ids"].shape[1] :].tolist())
    trace = None if drafter is None else trace_of(drafter.last_generation, len(new))
    return Answer(new, seconds, trace) if clock is None else Answer(new, seconds, trace, clock.spent(), clock.passes)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Clock:
    """Tells seconds between moments: read off the clock on a CPU, off events on a GPU, where nothing waits for it.

    `spent` of a GPU is complete only after the device has been waited for.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._spans: list[tuple[str, Any, Any]] = []

    def now(self) -> Any:
        """This moment."""
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def add(self, stage: str, started: Any) -> None:
        """Note that `stage` lasted from `started` until now."""
        self._spans.append((stage, started, self.now()))

    def timed(self, stage: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, noted as `stage` whenever it is called."""

        def noted(*args: Any, **kwargs: Any) -> Any:
            started = self.now()
            result = call(*args, **kwargs)
            self.add(stage, started)
            return result

        return noted

    @property
    def passes(self) -> int:
        """Passes of the target after the prompt's."""
        return sum(stage == "target" for stage, _, _ in self._spans)

    def spent(self) -> dict[str, float]:
        """Seconds by stage."""
        totals = {"prefill": 0.0, "draft": 0.0, "target": 0.0}
        for stage, started, ended in self._spans:
            span = started.elapsed_time(ended) / 1000 if self._on_gpu else ended - started
            totals[stage] = totals.get(stage, 0.0) + span
        return totals


@contextmanager
def stage_clock(target: PreTrainedModel, drafter: Any, clock: Clock | None) -> Iterator[None]:
    """Note the seconds inside the target's forward and the drafter's `draft` (`None`: no drafter).

    The first pass of a call reads the prompt; all until its end is the stage "prefill", later ones are "target".
    A `clock` of `None` measures nothing.
    """
    if clock is None:
        yield
        return
    entered = [clock.now()]
    stages = iter(("prefill",))
    before = target.register_forward_pre_hook(lambda *_: entered.append(clock.now()))
    after = target.register_forward_hook(lambda *_: _note(clock, next(stages, "target"), entered))
    held = {} if drafter is None else {name: each for name, each in vars(drafter).items() if name == "draft"}
    if drafter is not None:
        drafter.draft = clock.timed("draft", drafter.draft)
    try:
        yield
    finally:
        if drafter is not None:
            del drafter.draft  # the class's own method shows again
            vars(drafter).update(held)
        before.remove()
        after.remove()


def _note(clock: Clock, stage: str, entered: list[Any]) -> None:
    clock.add(stage, entered[0] if stage == "prefill" else entered[-1])
    entered.pop()


def compare(
    target: PreTrainedModel,
    drafter: Any,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    assisted_first: bool = False,
    seed: int = 0,
) -> Comparison:
    """Answer `prompt` plainly and assisted, in the asked order, then by prompt lookup; `warm_up` before."""
    inputs = encode(tokenizer, prompt, target.device)
    options = decoding_options(max_new_tokens, temperature)
    answers = {
        assistant is not None: answer(target, inputs, assistant, seed=seed, **options)
        for assistant in ((drafter, None) if assisted_first else (None, drafter))
    }
    plain, assisted = answers[False], answers[True]
    if temperature > 0:
        return Comparison(prompt, plain, assisted, None)
    difference = find_difference(target, inputs, plain.token_ids, assisted.token_ids)
    lookup = answer(target, inputs, prompt_lookup_num_tokens=LOOKUP_TOKENS, **options)
    return Comparison(prompt, plain, assisted, difference is None, difference, lookup)


def warm_up(target: PreTrainedModel, drafters: Sequence[Any], inputs: dict[str, torch.Tensor]) -> None:
    """Generate a few tokens plainly and with every drafter, so that first calls are not timed."""
    for drafter in (None, *drafters):
        answer(target, inputs, drafter, **decoding_options(12))


@torch.no_grad()
def find_difference(
    target: PreTrainedModel, inputs: dict[str, torch.Tensor], left: Sequence[int], right: Sequence[int]
) -> Difference | None:
    """`None` for equal answers, else the first difference and the target's logit gap there (in its own dtype)."""
    index = first_difference(left, right)
    if index is None:
        return None
    if index >= min(len(left), len(right)):
        return Difference(index, None)
    prompt = inputs["input_ids"]
    shared = torch.tensor([left[:index]], dtype=prompt.dtype, device=prompt.device)
    logits = target(torch.cat([prompt, shared], dim=1)).logits[0, -1].float()
    return Difference(index, float((logits[left[index]] - logits[right[index]]).abs()))
