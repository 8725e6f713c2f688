"""One call of `generate` with a drafter: what the decoding loop is given, and what comes back."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from .decoding_loop import DecodingLoop, tree_columns
from .decoding_pass import Observer
from .decoding_row import DecodingRow, Request
from .figures import GenerationFigures
from .node_count import node_count
from .requests import check_cache, check_prompt, check_target, warn_of_lengths
from .target_cache import copied, keep_rows
from .transformers_api import cache_in, decoder_output

if TYPE_CHECKING:
    from ..modeling_lilicorr.modeling_lilicorr import LiLiCorrModel

MARGIN = 256  # columns that a batch's cache may hold beyond its longest row: gaps, and nodes not yet accepted
_OF_ROWS = ("attention_mask", "token_type_ids", "mm_token_type_ids", "inputs_embeds")


@torch.no_grad()
def decode(
    drafter: "LiLiCorrModel",
    target: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    streamer: Any = None,
    observer: Observer | None = None,
    **model_kwargs: Any,
) -> Any:
    """What `target.generate(..., assistant_model=drafter)` returns, from what it prepared.

    Args:
        input_ids: prompts, `[rows, L]` (int64), padded on the left.
        observer: called with every pass of the loop behind the prompt's, see `DecodingPass`.
        model_kwargs: of the call, with the target's cache.

    Returns:
        `[rows, L + new]` (int64), finished rows padded as plain `generate` pads them, or its output object, with the
        call's figures as its attribute `figures`. The cache in it is `None` for a batch, whose rows end apart.

    Raises:
        ValueError: the drafter does not fit the target, or the call asks for what cannot be had, in one sentence.
    """
    check_target(drafter, target)
    check_cache(model_kwargs, generation_config, input_ids)
    check_prompt(model_kwargs, input_ids)
    warn_of_lengths(target)
    config, rows = generation_config, input_ids.shape[0]
    request = Request(logits_processor, stopping_criteria, config, streamer)
    wants = {
        name: bool(config.return_dict_in_generate and getattr(config, f"output_{name}"))
        for name in ("hidden_states", "attentions")
    }
    options: dict[str, Any] = {
        "lookup": drafter.config.lookup,
        "all_states": wants["hidden_states"],
        "attentions": wants["attentions"],
        "observer": observer,
    }
    # Rows that cannot share a pass are decoded one after the other.
    together = rows == 1 or (not any(wants.values()) and can_share(target, model_kwargs, request))
    if rows > 1:  # whose rows end apart: a given cache stays as it is
        name, cache = cache_in(model_kwargs)
        model_kwargs[name] = copied(cache)
    parts = [slice(None)] if together else [slice(row, row + 1) for row in range(rows)]
    loops, everyone = [], list[DecodingRow]()
    for part in parts:
        loop = DecodingLoop(drafter, target, node_count(drafter.config, target, config), **options)
        given = model_kwargs if together else _of_row(model_kwargs, part.start, rows)
        own = request if together else request.of_row(part.start, rows)
        loop.start(input_ids[part], own, given)
        everyone += loop.rows
        loops.append(loop)
        if together:
            drafter.last_generation = GenerationFigures.of_rows(row.figures for row in everyone)
    _finish(loops, everyone, request)
    if streamer is not None:
        streamer.end()
    drafter.last_generation = figures = GenerationFigures.of_rows(row.figures for row in everyone)
    return _output(input_ids, everyone, request, loops, figures, wants)


def _finish(loops: list[DecodingLoop], everyone: list[DecodingRow], request: Request) -> None:
    """Step until all rows, which are `everyone`, have ended, as rows of one batch do.

    Plain `generate` pads finished rows where there is an end-of-sequence token; without one they go on until the last
    row has finished. A row alone in its loop waits until it is known how far that is.
    """
    streamed = 0
    while True:
        longest = max((row.finished_at or 0) for row in everyone)
        over = all(row.finished_at is not None for row in everyone)
        stepped = False
        for loop in loops:
            ended = [
                number
                for number, row in enumerate(loop.rows)
                if row.finished_at is not None and (row.ends or row.room <= 0 or (over and len(row.tokens) >= longest))
            ]
            if len(ended) == len(loop.rows):
                continue
            if ended:
                loop.drop(ended)
            if over or any(row.finished_at is None for row in loop.rows):
                loop.step()
                stepped = True
        if request.streamer is not None and len(everyone) > 1:
            streamed = _stream(everyone, request, streamed)
        if not stepped:
            return


def _stream(rows: list[DecodingRow], request: Request, streamed: int) -> int:
    """Hand a batch's streamer all steps from `streamed` on that every row has, `[rows]` each; how many it has got."""
    fill = _padding(request)
    whole = [row for row in rows if row.finished_at is None or not row.ends]  # the others are padded
    ready = min((len(row.tokens) for row in whole), default=0)
    if all(row.finished_at is not None for row in rows):
        longest = max(row.finished_at or 0 for row in rows)
        ready = min(ready, longest) if whole else longest
    for step in range(streamed, ready):
        tokens = [row.tokens[step] if row in whole or step < (row.finished_at or 0) else fill for row in rows]
        request.streamer.put(torch.tensor(tokens))
    return max(streamed, ready)


def _padding(request: Request) -> int:
    """The token behind the end of a batch's finished rows."""
    pad = request.config._pad_token_tensor
    return 0 if pad is None else int(pad)


def _output(
    input_ids: Tensor,
    rows: list[DecodingRow],
    request: Request,
    loops: list[DecodingLoop],
    figures: GenerationFigures,
    wants: dict[str, bool],
) -> Any:
    """The sequences, or the output object of `generate` around them."""
    longest = max(row.finished_at or 0 for row in rows)
    fill = _padding(request)
    made = [row.tokens[:longest] for row in rows]
    new = torch.tensor([ids + [fill] * (longest - len(ids)) for ids in made], device=input_ids.device)
    sequences = torch.cat([input_ids, new.to(input_ids.dtype)], dim=1)
    config = request.config
    if not config.return_dict_in_generate:
        return sequences
    parts: dict[str, Any] = {}
    for name in ("scores", "logits"):
        if getattr(config, f"output_{name}"):
            columns = [getattr(row.taken, name) for row in rows]
            parts[name] = tuple(_step(columns, step) for step in range(longest))
    for name, wanted in wants.items():
        if wanted:
            parts[name] = tuple(_kept([loop.kept[name] for loop in loops], step) for step in range(longest))
    output = decoder_output(sequences, loops[0].cache if len(rows) == 1 else None, **parts)
    output.figures = figures  # type: ignore[attr-defined]
    return output


def _step(columns: list[list[Tensor]], step: int) -> Tensor:
    """What all rows had at one step, `[rows, vocab]`; zeros for those that had ended."""
    nothing = torch.zeros_like(columns[0][0])
    return torch.cat([column[step] if step < len(column) else nothing for column in columns])


def _kept(columns: list[list[Any]], step: int) -> Any:
    """What all rows had of every layer at one step; the first row's own where it is the only one."""
    if len(columns) == 1:
        return columns[0][step]
    like = next(column[step] for column in columns if step < len(column))
    nothing = [None if part is None else torch.zeros_like(part) for part in like]
    held = [column[step] if step < len(column) else nothing for column in columns]
    return tuple(None if parts[0] is None else torch.cat(parts) for parts in zip(*held, strict=True))


def can_share(target: PreTrainedModel, model_kwargs: dict[str, Any], request: Request) -> bool:
    """Whether rows of a batch can be verified together: by trees, up to the longest that they may get."""
    return request.max_length + MARGIN <= tree_columns(target, cache_in(model_kwargs)[1])


def _of_row(model_kwargs: dict[str, Any], row: int, rows: int) -> dict[str, Any]:
    """`model_kwargs` for one row of a batch, with a cache of its own.

    Raises:
        ValueError: they hold tensors, or outputs of encoders, of which nobody knows what belongs to a row.
    """
    given = dict(model_kwargs)
    name, cache = cache_in(model_kwargs)
    given[name] = copied(cache)
    keep_rows(given[name], [row])
    for key, value in model_kwargs.items():
        if isinstance(value, Tensor) and key == "position_ids":
            given[key] = value[..., row : row + 1, :] if value.shape[-2] == rows else value
        elif isinstance(value, Tensor) and key in _OF_ROWS:
            given[key] = value[row : row + 1]
        elif isinstance(value, Tensor) or (isinstance(value, (dict, list, tuple)) and value):
            raise ValueError(
                f"Got a batch of {rows} prompts with {key}, and this target's rows cannot be decoded together; call "
                "generate() once for each prompt."
            )
    return given
