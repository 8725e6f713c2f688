"""Plain against assisted generation of one target: same prompts, one run, alternating, only `generate` is timed."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..modeling_lilicorr.lattice import Lattice
from .metrics import Trace, first_difference


@dataclass(frozen=True)
class Answer:
    """One timed call of `generate`: the new token ids, the seconds it took, what drafting did, seconds by stage."""

    token_ids: tuple[int, ...]
    seconds: float
    trace: Trace | None = None
    stages: dict[str, float] = field(default_factory=dict)

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


@dataclass(frozen=True)
class Comparison:
    """A prompt answered plainly and assisted; under sampling `equal` is `None`, since two draws need not agree."""

    prompt: str
    plain: Answer
    assisted: Answer
    equal: bool | None
    difference: Difference | None = None


@dataclass(frozen=True)
class DrawnBlock:
    """One block drafted again on a known answer: its lattice, the drafted ids, and how many the answer confirms."""

    lattice: Lattice
    token_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    accepted: int


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str, device: torch.device) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask` `[1, length]` (int64): one user turn by the chat template, if there is one.

    Raises:
        ValueError: if the prompt has no tokens.
    """
    if tokenizer.chat_template is None:
        encoded = tokenizer(prompt, return_tensors="pt")
    else:
        turn = [{"role": "user", "content": prompt}]
        encoded = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    if encoded["input_ids"].shape[-1] == 0:
        raise ValueError(f"The prompt {prompt!r} has no tokens, and a model needs one to go on from; give some text.")
    return {key: encoded[key].to(device) for key in ("input_ids", "attention_mask")}


def decoding_options(max_new_tokens: int, temperature: float = 0.0) -> dict[str, Any]:
    """Arguments for `generate`: greedy at temperature 0, else sampling from the whole distribution."""
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
        stages: also time drafting and the target's passes apart (CPU only: a GPU would have to be waited for).
        **options: passed to `generate`, see `decoding_options`.

    Returns:
        `Answer` with the ids after the prompt.
    """
    torch.manual_seed(seed)
    if drafter is not None:
        options["assistant_model"] = drafter
    spent: dict[str, float] = {}
    with _stage_clock(target, drafter, spent if stages and target.device.type == "cpu" else None):
        _wait(target.device)
        started = time.perf_counter()
        output = cast(Any, target).generate(**inputs, **options)
        _wait(target.device)
        seconds = time.perf_counter() - started
    new = tuple(output[0, inputs["input_ids"].shape[1] :].tolist())
    return Answer(new, seconds, None if drafter is None else _trace(drafter, len(new)), spent)


def _trace(drafter: Any, new_tokens: int) -> Trace:
    figures = drafter.last_generation
    return Trace(figures.blocks, tuple(figures.accepted_per_slot), new_tokens, figures.drafted)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _stage_clock(target: PreTrainedModel, drafter: Any, spent: dict[str, float] | None) -> Iterator[None]:
    """Add the seconds inside the target's forward and the drafter's `draft` to `spent`; `None` measures nothing."""
    if spent is None or drafter is None:
        yield
        return
    spent.update(draft=0.0, target=0.0)
    draft = drafter.draft
    entered: list[float] = []

    def timed_draft(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        result = draft(*args, **kwargs)
        spent["draft"] += time.perf_counter() - started
        return result

    def leave(*_: Any) -> None:
        spent["target"] += time.perf_counter() - entered.pop()

    before = target.register_forward_pre_hook(lambda *_: entered.append(time.perf_counter()))
    after = target.register_forward_hook(leave)
    drafter.draft = timed_draft
    try:
        yield
    finally:
        del drafter.draft  # the class's own method shows again
        before.remove()
        after.remove()


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
    """Answer `prompt` plainly and assisted, in the asked order; warm both up beforehand with `warm_up`."""
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
    return Comparison(prompt, plain, assisted, difference is None, difference)


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


@torch.no_grad()
def draw_block(
    target: PreTrainedModel,
    drafter: Any,
    inputs: dict[str, torch.Tensor],
    token_ids: Sequence[int],
    tries: int = 12,
) -> DrawnBlock | None:
    """Draft one block again in the midst of an answer, to show what the head saw and chose.

    Of the `tries` positions around the middle, the block in which the answer confirms most picks that are not their
    slot's likeliest candidate is taken (the plain middle one where there is no such pick).

    Args:
        target, drafter, inputs: as for `answer`; token_ids: the answer that `target` gave to `inputs`.
        tries: positions looked at.

    Returns:
        The block, or `None` if the answer is too short to hold one.
    """
    prompt = inputs["input_ids"]
    ids = torch.cat([prompt, torch.tensor([list(token_ids)], dtype=prompt.dtype, device=prompt.device)], dim=1)
    slots = drafter.config.block_size - 1
    first, last = prompt.shape[1], ids.shape[1] - 1 - slots
    if last < first:
        return None
    hidden = target(ids, output_hidden_states=True, use_cache=False).hidden_states
    taps = torch.cat([hidden[i + 1] for i in drafter.config.target_layer_ids], dim=-1)
    taps = taps.to(device=drafter.device, dtype=drafter.dtype)
    middle = (first + last) // 2
    nearest = sorted(range(first, last + 1), key=lambda position: abs(position - middle))[:tries]
    blocks = [_draft_at(target, drafter, ids, taps, position) for position in nearest]
    return max(blocks, key=_confirmed_corrections)  # the first of equals: the one nearest to the middle


def _draft_at(target: Any, drafter: Any, ids: torch.Tensor, taps: torch.Tensor, position: int) -> DrawnBlock:
    embedding, lm_head = target.get_input_embeddings(), target.get_output_embeddings()
    draft = drafter.draft(
        ids[0, position : position + 1].to(drafter.device),
        taps[:, :position],
        torch.arange(position, device=drafter.device)[None],
        drafter.new_cache(),
        lambda tokens: embedding(tokens.to(target.device)).to(device=drafter.device, dtype=drafter.dtype),
        lambda states: lm_head(states.to(device=target.device, dtype=target.dtype)).to(drafter.device),
        return_lattice=True,
    )
    drafted = draft.tokens[0].tolist()
    truth = ids[0, position + 1 : position + 1 + len(drafted)].tolist()
    accepted = first_difference(drafted, truth)
    return DrawnBlock(draft.lattice, tuple(drafted), tuple(truth), len(drafted) if accepted is None else accepted)


def _confirmed_corrections(block: DrawnBlock) -> int:
    return int((block.lattice.picks[0, : block.accepted] > 0).sum())
