"""What a run would do, from configuration, tokenizer and data alone: no weights are read and nothing is written."""

import os

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from ..hub.sources import check_tokenizer_files
from ..modeling_lilicorr.modeling_lilicorr import LiLiCorrModel
from .batch_order import BatchOrder
from .data import Example
from .memory import step_memory
from .settings import TrainSettings
from .sources import training_examples
from .tally import Tally
from .target import UNLOADABLE
from .train import drafter_config, total_steps

OPEN, CLOSE = "⟦", "⟧"  # around what is supervised


def describe(settings: TrainSettings) -> str:
    """Parameters, memory, steps and tokens of a run, and its first example with the supervised part in ⟦ ⟧.

    Raises:
        ValueError: for settings, a target or data that training would refuse.
    """
    settings.validate()
    try:
        check_tokenizer_files(settings.target)
        target_config = AutoConfig.from_pretrained(settings.target)
        tokenizer = AutoTokenizer.from_pretrained(settings.target)
    except UNLOADABLE as error:
        raise ValueError(f"The target {settings.target} could not be read: {' '.join(str(error).split())}") from error
    text = target_config.get_text_config()
    tally = Tally(settings.strict)
    examples, mask = training_examples(settings, tokenizer, target_config, tally)
    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(target_config)
        drafter = LiLiCorrModel(drafter_config(settings, target_config, mask))
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    order = BatchOrder(examples, settings.batch_size, settings.micro_batch_size, settings.seed, processes)
    prefix = f"{settings.head_type}."
    head = sum(p.numel() for name, p in drafter.named_parameters() if name.startswith(prefix))
    backbone = sum(p.numel() for p in drafter.parameters()) - head
    counts = {
        "target": sum(p.numel() for p in target.parameters()),
        "drafter": backbone + head,
        "trained": head if settings.freeze_backbone else backbone + head,
    }
    memory = step_memory(
        settings,
        drafter.config,
        text,
        counts,
        order.micro_batch_size,
        order.accumulation,
    )
    return "\n\n".join(
        [
            f"Parameters: target {counts['target']:,}, drafter backbone {backbone:,}, head {head:,}, of which "
            f"{counts['trained']:,} are trained.",
            _memory_table(memory),
            _amounts(settings, order, processes),
            *(["\n".join(f"Left out: {line}" for line in tally.lines())] if tally.total else []),
            f"The first example ({examples[0].id}), what is supervised in {OPEN} {CLOSE}:\n"
            f"{render(examples[0], tokenizer)}",
        ]
    )


def _memory_table(memory: dict[str, int]) -> str:
    rows = [f"  {name:<22}{size / 2**30:>9.2f}" for name, size in memory.items()]
    total = f"  {'in all':<22}{sum(memory.values()) / 2**30:>9.2f}"
    return "\n".join(
        ["Memory of one process without sharding, GiB (an estimate for the longest sequences):", *rows, total]
    )


def _amounts(settings: TrainSettings, order: BatchOrder, processes: int) -> str:
    """Steps, tokens and blocks."""
    steps = total_steps(settings, order.steps_an_epoch)
    tokens = sum(map(len, order.examples))
    supervised = sum(sum(example.loss_mask) for example in order.examples)
    epochs = steps / order.steps_an_epoch
    blocks = steps * settings.batch_size * settings.anchors
    shared = f"{_many(processes, 'process', 'processes')}, {_many(order.accumulation, 'micro-batch', 'micro-batches')}"
    return (
        f"Data: {len(order.examples):,} examples, {tokens:,} tokens, {supervised:,} of them supervised.\n"
        f"Run: {steps:,} steps of {settings.batch_size} sequences ({shared} of {order.micro_batch_size}), "
        f"{epochs:.2f} epochs, {epochs * tokens:,.0f} tokens, at most {blocks:,} blocks."
    )


def _many(count: int, one: str, several: str) -> str:
    return f"{count} {one if count == 1 else several}"


def render(example: Example, tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of `example` with its supervised runs in ⟦ ⟧."""
    ids, mask = example.input_ids, example.loss_mask
    parts, start = [], 0
    for end in range(1, len(ids) + 1):
        if end == len(ids) or mask[end] != mask[start]:
            text = str(tokenizer.decode(ids[start:end], skip_special_tokens=False))
            parts.append(f"{OPEN}{text}{CLOSE}" if mask[start] else text)
            start = end
    return "".join(parts)
