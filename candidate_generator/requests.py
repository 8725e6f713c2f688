"""What a drafter can serve: one sentence for every call that it cannot, before anything is decoded."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import (
    PreTrainedModel,
    SynthIDTextWatermarkLogitsProcessor,
    UnbatchedClassifierFreeGuidanceLogitsProcessor,
)
from transformers.utils import logging

from .transformers_api import cache_in

if TYPE_CHECKING:
    from transformers import GenerationConfig

    from ..modeling_lilicorr.modeling_lilicorr import LiLiCorrModel

logger = logging.get_logger(__name__)


def check_target(drafter: "LiLiCorrModel", target: PreTrainedModel) -> None:
    """Raise a `ValueError` of one sentence if `drafter` cannot draft for `target`."""
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
    if drafter.device.type == "meta":
        raise ValueError("The drafter holds no weights (its device is meta); load them with from_pretrained().")
    # State space layers, known by the logarithm of their decay. Transformers 5.25 keeps states that a crop returns to,
    # but not in every family, and its own assisted loop says other tokens than plain generate() with several.
    if any(name.rpartition(".")[2] == "A_log" for name, _ in target.named_parameters()):
        raise ValueError(
            f"The target {type(target).__name__} has recurrent layers, which cannot take back what they have read, and "
            "drafting takes back rejected tokens; call generate() without assistant_model."
        )


def check_single(input_ids: Tensor, reason: str) -> None:
    """Raise a `ValueError` of one sentence for a batch `[batch, L]` where only one sequence can be decoded."""
    if input_ids.shape[0] > 1:
        raise ValueError(
            f"Got a batch of {input_ids.shape[0]} prompts, but {reason}; call generate() once for each prompt."
        )


def check_processors(processors: Iterable[Any]) -> None:
    """Raise a `ValueError` of one sentence for a logits processor that counts on seeing every token once, in order.

    Transformers' assisted loop also shows it drafted tokens that are then refused, so what it keeps of them would be
    wrong.
    """
    for processor in processors:
        if isinstance(processor, (UnbatchedClassifierFreeGuidanceLogitsProcessor, SynthIDTextWatermarkLogitsProcessor)):
            raise ValueError(
                f"{type(processor).__name__} keeps a state that Transformers' assisted loop spoils with drafted "
                "tokens; leave out guidance_scale or the watermark, or set the drafter's decoding to 'auto'."
            )


def check_cache(model_kwargs: dict[str, Any], generation_config: "GenerationConfig", input_ids: Tensor) -> None:
    """Raise a `ValueError` of one sentence for a call without a cache that can be cropped."""
    name, cache = cache_in(model_kwargs)
    if not generation_config.use_cache:
        raise ValueError(
            "Drafting requires the target's cache, and use_cache is False, in the call or in the target's own "
            "configuration; give generate() use_cache=True, or leave out assistant_model."
        )
    if cache is None:
        raise ValueError("Drafting crops the target's cache, and this target has none; leave out assistant_model.")
    # Layers with convolutions or recurrent states know only behind the prompt's pass what they keep.
    if not all(hasattr(layer, "conv_states") or layer.is_croppable for layer in cache.layers):
        check_croppable(cache, generation_config)
    cached = int(cache.get_seq_length())
    mask = model_kwargs.get("attention_mask")
    whole = mask.shape[1] if mask is not None else getattr(generation_config, "_mask_length", input_ids.shape[1])
    if cached and input_ids.shape[1] and whole == input_ids.shape[1] and cached >= whole:
        raise ValueError(
            f"{name} holds {cached} tokens and the prompt has {whole}; give the whole conversation with at least one "
            "token more than the cache, or crop the cache."
        )


def check_prompt(model_kwargs: dict[str, Any], input_ids: Tensor) -> None:
    """Raise a `ValueError` of one sentence for prompts `[rows, L]` without a token."""
    if not input_ids.shape[1] and model_kwargs.get("inputs_embeds") is None:
        raise ValueError("The prompt has no tokens, and a model needs one to go on from; give it some.")


def prompt_ids(number: int, prompt: Any, vocabulary: int) -> Tensor:
    """The prompt with this number as ids `[1, L]` (int64).

    Raises:
        ValueError: it is empty, or holds anything but token ids.
    """
    expected = f"expected its token ids, whole numbers below {vocabulary}"
    if isinstance(prompt, str) or (not isinstance(prompt, Tensor) and not hasattr(prompt, "__len__")):
        raise ValueError(
            f"Prompt {number} is {prompt!r}, {expected}; give a list of lists, from tokenizer(...).input_ids."
        )
    try:
        ids = torch.as_tensor(prompt)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"Prompt {number} is no list of numbers, {expected}.") from error
    if ids.dim() == 2 and ids.shape[0] == 1:
        ids = ids[0]
    if ids.dim() != 1:
        raise ValueError(f"Prompt {number} has the shape {list(ids.shape)}, {expected} in a single row.")
    if not ids.numel():
        raise ValueError(f"Prompt {number} has no tokens, and a model needs one to go on from; give it some.")
    if ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
        raise ValueError(f"Prompt {number} holds {ids.dtype} values, {expected}.")
    wrong = ids[(ids < 0) | (ids >= vocabulary)]
    if wrong.numel():
        raise ValueError(f"Prompt {number} holds the id {int(wrong[0])}, {expected}; use the target's own tokenizer.")
    return ids.to(torch.long)[None]


_OF_ONE_PROMPT = (
    "inputs", "input_ids", "inputs_embeds", "attention_mask", "position_ids", "token_type_ids", "cache",
    "past_key_values", "streamer",
)  # fmt: skip
_OF_THE_LOOP = ("assistant_model", "custom_generate")


def check_options(options: dict[str, Any]) -> None:
    """Raise a `ValueError` of one sentence for options of `generate` that many prompts cannot share."""
    for name in (*_OF_ONE_PROMPT, *_OF_THE_LOOP):
        if options.get(name) is None:
            continue
        if name in _OF_THE_LOOP:
            told = f"Got {name}, and lilicorr.generate() decodes with the drafter that it is given; leave it out."
        else:
            told = f"Got {name}, which belongs to a single prompt; leave it out, or call target.generate() for each."
        raise ValueError(told)


def check_answers(generation_config: "GenerationConfig") -> None:
    """Raise a `ValueError` of one sentence if a prompt is to have more than one answer or beam."""
    for name in ("num_beams", "num_return_sequences"):
        count = getattr(generation_config, name)
        if count is not None and count > 1:
            raise ValueError(
                f"{name} is {count}, and each prompt gets one answer here; leave it out, or repeat prompts."
            )


def check_croppable(cache: Any, generation_config: "GenerationConfig") -> None:
    """Raise a `ValueError` of one sentence if rejected rows cannot be taken out of `cache` again."""
    recurrent = [state for layer in cache.layers for state in getattr(layer, "recurrent_states", {}).values()]
    if getattr(cache, "is_croppable", True) and all(state is None for state in recurrent):
        return
    chosen = generation_config.cache_implementation
    if chosen:
        told, leave = f"cache_implementation={chosen!r}", "leave it out, or assistant_model"
    elif getattr(cache, "_is_user_defined", False):
        told, leave = f"The given {type(cache).__name__}", "leave it out, or assistant_model"
    else:
        told, leave = "This target", "call generate() without assistant_model"
    raise ValueError(
        f"{told} keeps what it has read in a cache that cannot be cropped, and drafting crops it; {leave}."
    )


def warn_of_overflow(drafter: "LiLiCorrModel", finite: Tensor) -> None:
    """Warn once of fp16 drafts that hold no number from the first slot on; `finite [N, S]` (bool) as in `Draft`."""
    if drafter.dtype == torch.float16 and not bool(finite[:, 0].any()):
        logger.warning_once(
            "The drafter's states overflow in fp16, so its drafts are empty and nothing is gained; load it with "
            "dtype=torch.bfloat16 or torch.float32."
        )


def warn_of_lengths(target: PreTrainedModel) -> None:
    """Warn once of a target whose rotary frequencies follow the length of each pass."""
    rope = getattr(target.config.get_text_config(), "rope_parameters", None) or {}
    kinds = {rope.get("rope_type")} | {part.get("rope_type") for part in rope.values() if isinstance(part, dict)}
    for kind in kinds & {"dynamic", "longrope"}:
        logger.warning_once(
            f"The target's rotary embedding is {kind!r}: its frequencies follow the length of each pass, so a text "
            "that crosses a length limit may part from plain generate()'s, whose passes have other lengths."
        )
