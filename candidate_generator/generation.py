"""Many prompts with one drafter: as many sequences at a time as are wanted, a new one whenever one has ended."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .decode import can_share, decode
from .decoding_loop import DecodingLoop
from .decoding_row import DecodingRow, Request
from .figures import GenerationFigures
from .node_count import node_count
from .requests import check_answers, check_cache, check_options, check_target, prompt_ids, warn_of_lengths

if TYPE_CHECKING:
    from ..modeling_lilicorr.modeling_lilicorr import LiLiCorrModel


@torch.no_grad()
def generate(
    target: PreTrainedModel,
    drafter: "LiLiCorrModel",
    prompts: Iterable[Sequence[int] | Tensor],
    batch_size: int = 8,
    **options: Any,
) -> list[Tensor]:
    """Answer any number of prompts, `batch_size` of them at a time; each answer is that of `target.generate` alone.

    Args:
        target: a decoder-only model; drafter: made for it.
        prompts: token ids of each, without padding.
        batch_size: sequences that share a pass of the target, 1 or more.
        **options: of `target.generate`, such as `max_new_tokens` or `do_sample`.

    Returns:
        Prompt and answer of each, `[L + new]` (int64), in the order of the prompts. The figures of all, and of each as
        `rows`, are the drafter's `last_generation`.

    Raises:
        ValueError: a prompt is empty or holds no token ids, `batch_size` is below 1, or the drafter cannot serve the
            target or the options, of which those of a single prompt (a mask, a cache, a streamer) are refused.
        TypeError: target or drafter is no loaded model.
    """
    if not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"batch_size is {batch_size!r}, expected a whole number from 1 on.")
    if not hasattr(target, "generate") or not hasattr(drafter, "new_batch_cache"):
        raise TypeError(
            f"Got a {type(target).__name__} as target and a {type(drafter).__name__} as drafter, expected a loaded "
            "causal LM and a loaded LiLiCorrModel; give them in this order."
        )
    check_options(options)
    check_target(drafter, target)
    warn_of_lengths(target)
    vocabulary = target.config.get_text_config().vocab_size
    waiting = [(number, prompt_ids(number, prompt, vocabulary)) for number, prompt in enumerate(prompts)]
    answers: dict[int, Tensor] = {}
    figures: dict[int, GenerationFigures] = {}
    running: dict[int, DecodingRow] = {}
    loop: DecodingLoop | None = None
    waiting.reverse()
    while waiting or running:
        while waiting and len(running) < batch_size:
            number, ids = waiting.pop()
            call = _prepared(target, ids, options)
            request = Request(call["logits_processor"], call["stopping_criteria"], call["generation_config"])
            if not can_share(target, call["model_kwargs"], request):
                answers[number] = _alone(drafter, target, call)
                figures[number] = drafter.last_generation or GenerationFigures()
                continue
            started = _started(drafter, target, request, call)
            running[number] = started.rows[0]
            if loop is None:
                loop = started
            else:
                loop.add(started)
        if loop is None:
            continue
        for number, row in [(number, row) for number, row in running.items() if row.finished_at is not None]:
            answers[number], figures[number] = row.ids[0].clone(), row.figures
            del running[number]
            loop.drop([loop.rows.index(row)])
        if loop.rows and (len(running) == batch_size or not waiting):
            loop.step()
    order = sorted(answers)
    drafter.last_generation = GenerationFigures.of_rows(figures[number] for number in order)
    return [answers[number] for number in order]


def _prepared(target: Any, input_ids: Tensor, options: dict[str, Any]) -> dict[str, Any]:
    """What `generate` prepares for one prompt: processors, criteria, configuration, the model's arguments, a cache."""

    def capture(
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> dict[str, Any]:
        for name in ("synced_gpus", "streamer"):
            model_kwargs.pop(name, None)
        return {
            "input_ids": input_ids,
            "logits_processor": logits_processor,
            "stopping_criteria": stopping_criteria,
            "generation_config": generation_config,
            "model_kwargs": model_kwargs,
        }

    ids = input_ids.to(target.device)
    given = {"attention_mask": torch.ones_like(ids)} | options
    call = target.generate(ids, custom_generate=capture, **given)
    check_answers(call["generation_config"])
    check_cache(call["model_kwargs"], call["generation_config"], call["input_ids"])
    return call


def _started(drafter: "LiLiCorrModel", target: PreTrainedModel, request: Request, call: dict[str, Any]) -> DecodingLoop:
    """A loop of one sequence that others may join."""
    nodes = node_count(drafter.config, target, request.config)
    loop = DecodingLoop(drafter, target, nodes, lookup=drafter.config.lookup, shared=True)
    loop.start(call["input_ids"], request, call["model_kwargs"])
    return loop


def _alone(drafter: "LiLiCorrModel", target: PreTrainedModel, call: dict[str, Any]) -> Tensor:
    """The answer to a prompt whose cache cannot be shared."""
    rest = {name: value for name, value in call.items() if name != "model_kwargs"}
    output = decode(drafter, target, **rest, **call["model_kwargs"])
    return (output if isinstance(output, Tensor) else output.sequences)[0]
