"""Joint training of drafter and head: the plain path from answers to a checkpoint that `generate` can use."""

import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from ..modeling_lilicorr.configuration_lilicorr import LiLiCorrConfig
from ..modeling_lilicorr.modeling_lilicorr import LiLiCorrModel
from .anchors import sample_blocks
from .checkpoint import load_state, save_state
from .data import Example, batches, collate, load_examples
from .objective import JointObjective
from .settings import TrainSettings
from .target import TargetStates, load_target
from .warm_start import balance_head, start_from_checkpoint, start_from_target


def train(settings: TrainSettings) -> Path:
    """Train a drafter; returns the folder of the finished checkpoint. A run started again resumes.

    Raises:
        ValueError: for unusable data or settings, a state of another run, or a loss that is no longer finite.
    """
    settings.validate()
    accelerator = Accelerator(mixed_precision=settings.mixed_precision)
    output = Path(settings.output)
    output.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(settings.seed)
    target, tokenizer = load_target(settings.target, settings.dtype)
    target = target.requires_grad_(False).to(accelerator.device)
    examples = load_examples(settings.data, tokenizer, settings.max_length, settings.loop_limit)
    largest = max(max(example.prompt_ids + example.answer_ids) for example in examples)
    if largest >= target.config.get_text_config().vocab_size:
        raise ValueError(f"The data hold token id {largest}, which {settings.target} lacks; regenerate them with it.")
    if settings.max_examples:
        # Whatever the seed, the same answers: runs that follow each other share their kept states.
        chosen = torch.randperm(len(examples), generator=torch.Generator().manual_seed(0))
        examples = [examples[i] for i in chosen[: settings.max_examples].tolist()]
    drafter = build_drafter(settings, target, len(tokenizer))
    optimizer = build_optimizer(drafter, settings)
    groups_a_epoch = len(batches(examples, settings.batch_size, settings.seed, 0)) // accelerator.num_processes
    total = settings.steps or max(1, round(settings.epochs * groups_a_epoch))
    step = load_state(output, drafter, optimizer, settings.identity())
    joint = JointObjective(drafter, target, settings.objective)
    folder = Path(settings.states) if settings.states else None
    states = TargetStates(target, drafter.config.target_layer_ids, folder)
    wrapped, optimizer = accelerator.prepare(joint, optimizer)
    _run(settings, accelerator, joint, wrapped, optimizer, states, examples, step, total)
    finished = output / "checkpoint"
    if accelerator.is_main_process:
        drafter.to(torch.bfloat16).save_pretrained(finished)
    return finished


def build_drafter(settings: TrainSettings, target: PreTrainedModel, tokenizer_size: int) -> LiLiCorrModel:
    """A fresh fp32 drafter on the target's device, warm-started from `settings.init` where given."""
    try:
        config = LiLiCorrConfig.for_target(
            target.config,
            tokenizer_size=tokenizer_size,
            head_type=settings.head_type,
            block_size=settings.block_size,
            **settings.config,
        )
        drafter = LiLiCorrModel(config)
    except (TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"The recipe's config {settings.config} cannot work ({error}); mend it.") from error
    if settings.init:
        start_from_checkpoint(drafter, target, Path(settings.init))
    else:
        if settings.from_target:
            start_from_target(drafter, target)
        balance_head(drafter, target)
    return drafter.train().to(target.device)


def build_optimizer(drafter: LiLiCorrModel, settings: TrainSettings) -> torch.optim.AdamW:
    """AdamW with the drafter's and the head's own learning rate and weight decay (Table 4)."""
    prefix = f"{drafter.config.head_type}."
    head = [p for name, p in drafter.named_parameters() if name.startswith(prefix)]
    backbone = [p for name, p in drafter.named_parameters() if not name.startswith(prefix)]
    groups: list[dict[str, Any]] = [{"params": backbone, "weight_decay": 0.0}]
    if head:
        groups.append({"params": head, "weight_decay": settings.head_weight_decay})
    return torch.optim.AdamW(groups, betas=(settings.betas[0], settings.betas[1]))


def _peak_rates(settings: TrainSettings) -> tuple[float, float]:
    """Peak learning rates of `build_optimizer`'s groups."""
    return settings.learning_rate, settings.head_learning_rate


def _cosine(step: int, warmup: int, total: int, final: float) -> float:
    """Learning rate of a step as a share of its peak: linear warm-up, then a cosine down to `final`."""
    if step < warmup:
        return (step + 1) / warmup
    return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


def _run(
    settings: TrainSettings,
    accelerator: Accelerator,
    joint: JointObjective,
    wrapped: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    states: TargetStates,
    examples: list[Example],
    step: int,
    total: int,
) -> None:
    """Steps `step … total`: order and anchors depend on seed, step and process only, so a resumed run repeats them."""
    output, device = Path(settings.output), accelerator.device
    processes, rank = accelerator.num_processes, accelerator.process_index
    saved_at = time.monotonic()
    totals: dict[str, Tensor] = {}
    order = batches(examples, settings.batch_size, settings.seed, 0)
    steps_an_epoch, epoch = len(order) // processes, 0
    bar = tqdm(total=total, initial=step, desc=settings.head_type, disable=not accelerator.is_main_process)
    while step < total:
        if step // steps_an_epoch != epoch:
            epoch = step // steps_an_epoch
            order = batches(examples, settings.batch_size, settings.seed, epoch)
        group = [examples[i] for i in order[(step % steps_an_epoch) * processes + rank]]
        batch = collate(group)
        generator = torch.Generator().manual_seed((settings.seed * 1_000_003 + step) * 1_009 + rank)
        input_ids = batch.input_ids.to(device)
        blocks = sample_blocks(input_ids, batch.loss_mask.to(device), settings.block_size, settings.anchors, generator)
        sums = wrapped(input_ids, *states(group, batch), blocks)
        # Gradients are averaged over processes, so each loss is its share of the global mean times their number.
        counts = {k: sums[k].detach() / processes for k in ("weight", "covered") if k in sums}
        loss = joint.loss(sums, accelerator.reduce(counts, "sum"))
        if not torch.isfinite(loss):
            raise ValueError(f"The loss is {loss.item()} at step {step} on {[example.id for example in group]}.")
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(wrapped.parameters(), settings.clip)
        rate = _cosine(step, max(1, round(settings.warmup * total)), total, settings.final_rate)
        for parameters, peak in zip(optimizer.param_groups, _peak_rates(settings), strict=False):
            parameters["lr"] = rate * peak
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        bar.update()
        for name, value in sums.items():
            totals[name] = totals.get(name, 0) + value.detach()
        if step % settings.log_every == 0 or step == total:
            _log(accelerator, output, step, totals, bar)
            totals = {}
        if time.monotonic() - saved_at > 60 * settings.save_minutes or step == total:
            if accelerator.is_main_process:
                save_state(output, step, joint.drafter, optimizer, settings.identity())
            saved_at = time.monotonic()
    bar.close()


def _log(accelerator: Accelerator, output: Path, step: int, totals: dict[str, Tensor], bar: Any) -> None:
    """Append mean losses and acceptance lengths (bonus included) since the last line to `log.jsonl`."""
    sums = {name: float(value) for name, value in accelerator.reduce(totals, "sum").items()}
    if not accelerator.is_main_process:
        return
    line: dict[str, Any] = {"step": step, "dflash": sums["dflash"] / max(sums["weight"], 1e-6)}
    for name in ("cross_entropy", "distractor", "margin"):
        if name in sums:
            line[name] = sums[name] / max(sums["covered"], 1.0)
    for name in ("argmax", "walk", "oracle"):
        if f"{name}_accepted" in sums:
            line[f"{name}_length"] = 1 + sums[f"{name}_accepted"] / max(sums["blocks"], 1.0)
    line["blocks"] = sums["blocks"]
    line["seconds"] = time.time()
    bar.set_postfix({k: f"{v:.2f}" for k, v in line.items() if k.endswith("length") or k == "dflash"})
    with open(output / "log.jsonl", "a", encoding="utf-8") as log:
        log.write(json.dumps(line) + "\n")
