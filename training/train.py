"""Joint training of drafter and head: from answers to a checkpoint that `generate` can use, on any machines."""

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from signal import SIGTERM
from typing import Any, NoReturn

import torch
from accelerate import Accelerator
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel

from ..modeling_lilicorr.configuration_lilicorr import LiLiCorrConfig
from ..modeling_lilicorr.head_settings import OPTIONAL, default_head_config
from ..modeling_lilicorr.modeling_lilicorr import LiLiCorrModel
from .anchors import Blocks, sample_blocks
from .batch_order import BatchOrder, Share, fingerprint
from .calibration import fit_tree_beta
from .checkpoint import load_state, local_floats, not_written, resort_of, save_state, state_tensors, whole_tensor
from .data import collate
from .interruption import Interrupted, Signals
from .layers import apply_layer_options
from .log import StepLog
from .losses.joint import JointObjective
from .manifest import training_data
from .optimizer import build_optimizer, rate_share, set_rates
from .processes import add_up, prepare, start_accelerator
from .progress import Bar, waiting
from .report import write_report
from .settings import TrainSettings
from .sources import report_left_out, training_examples
from .tally import Tally
from .target import TargetStates, load_target
from .warm_start import balance_head, start_from_checkpoint, start_from_target

NONFINITE = "nonfinite-step-"  # files that name a batch a run ended on


@dataclass
class Run:
    """What the steps of a run work with; `wrapped` is `joint` as accelerate distributes it."""

    settings: TrainSettings
    accelerator: Accelerator
    joint: JointObjective
    wrapped: torch.nn.Module
    optimizer: torch.optim.Optimizer
    states: TargetStates
    order: BatchOrder
    log: StepLog
    total: int

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What a saved state must have in common with this run."""
        return self.settings.identity() | {"data": fingerprint(self.order.examples)}


def train(settings: TrainSettings) -> Path:
    """Train a drafter; returns the folder of the finished checkpoint. A run started again resumes.

    Raises:
        ValueError: for unusable data or settings, a state of another run, or a loss or weights no longer finite.
        OSError: if a state cannot be written; the one before it is kept.
        Interrupted: after a signal, with the state saved.
    """
    settings.validate()
    accelerator = start_accelerator(settings)
    output = Path(settings.output)
    output.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(settings.seed)
    others = not accelerator.is_main_process
    with waiting(f"loading {settings.target}", hidden=others):
        target, tokenizer = load_target(settings.target, settings.dtype)
        target = target.requires_grad_(False).to(accelerator.device)
    tally = Tally(settings.strict)
    with waiting("reading the answers", hidden=others):
        examples, mask = training_examples(settings, tokenizer, target.config, tally)
    if not others:
        report_left_out(tally)
    order = BatchOrder(
        examples,
        settings.batch_size,
        settings.micro_batch_size,
        settings.seed,
        accelerator.num_processes,
        accelerator.process_index,
    )
    drafter = build_drafter(settings, target, mask)
    tokens = sum(sum(example.loss_mask) for example in examples)
    drafter.config.training_data = training_data(settings.data, {"sequences": len(examples), "tokens": tokens})
    apply_layer_options(drafter, settings)
    joint = JointObjective(drafter, target, settings.objective, settings.blocks_together, settings.blocks_at_once)
    folder = Path(settings.states) if settings.states else None
    states = TargetStates(target, drafter.config.target_layer_ids, folder)
    if folder and accelerator.is_main_process:
        print(states.plan([example.input_ids for example in examples]))
    wrapped, optimizer = prepare(accelerator, joint, build_optimizer(drafter, settings))
    total = total_steps(settings, order.steps_an_epoch)
    run = Run(settings, accelerator, joint, wrapped, optimizer, states, order, StepLog(output), total)
    with Signals(says=accelerator.is_main_process) as signals:
        _run(run, signals)
    return _finish(run)


def total_steps(settings: TrainSettings, steps_an_epoch: int) -> int:
    """Optimiser steps of the run."""
    return settings.steps or max(1, round(settings.epochs * steps_an_epoch))


def drafter_config(settings: TrainSettings, target_config: Any, mask_token_id: int) -> LiLiCorrConfig:
    """The drafter that `settings` describe; of `head_config` they need to name only what differs from the papers'.

    `mask_token_id` is that of `choose_mask`.

    Raises:
        ValueError: if it cannot work.
    """
    head = head_config_for(settings.head_type, target_config, settings.config.get("head_config"))
    given = settings.config | ({"head_config": head} if head else {})
    return LiLiCorrConfig.for_target(
        target_config,
        head_type=settings.head_type,
        block_size=settings.block_size,
        **({"mask_token_id": mask_token_id} | given),
    )


def head_config_for(head_type: str, target_config: Any, given: Any) -> dict[str, Any]:
    """The papers' settings of a head for this target, with those `given` (`None` for none); empty where it needs none.

    Raises:
        ValueError: it takes no setting of such a name, or `given` is no mapping.
    """
    given = {} if given is None else given
    if not isinstance(given, dict):
        raise ValueError(f"head_config is {given!r}, expected the head's settings by name; fix the recipe.")
    usual = default_head_config(head_type, target_config.get_text_config().hidden_size)
    known = [*usual, *OPTIONAL.get(head_type, ())]
    if usual and (unknown := [name for name in given if name not in known]):
        raise ValueError(f"head_config sets {unknown[0]!r}, but the head {head_type} takes {', '.join(known)}.")
    return usual | given if usual else {}


def build_drafter(settings: TrainSettings, target: PreTrainedModel, mask_token_id: int) -> LiLiCorrModel:
    """A fresh fp32 drafter on the target's device, warm-started from `settings.init` where given."""
    config = drafter_config(settings, target.config, mask_token_id)
    drafter = LiLiCorrModel(config)
    if settings.init:
        start_from_checkpoint(drafter, target, Path(settings.init))
    else:
        if settings.from_target:
            start_from_target(drafter, target)
        balance_head(drafter, target)
    return drafter.train().to(target.device)


def _run(run: Run, signals: Signals) -> None:
    """All steps that are left, with log and states."""
    settings, accelerator = run.settings, run.accelerator
    step, kept = load_state(Path(settings.output), run.joint.drafter, run.optimizer, run.identity)
    if len(set(accelerator.gather(torch.tensor([step], device=accelerator.device)).tolist())) > 1:
        raise ValueError(f"Not every process sees the states in {settings.output}; give a folder that all share.")
    if accelerator.is_main_process:
        run.log.rewind(step, {name.removeprefix("log."): value for name, value in kept.items()})
        print(f"The log is written to {run.log.path}.")
    saved_at = time.monotonic()
    with Bar(run.total, "steps", step, "tokens", hidden=not accelerator.is_main_process) as bar:
        while step < run.total:
            due = accelerator.is_main_process and time.monotonic() - saved_at > 60 * settings.save_minutes
            # Processes agree on what only one of them knows.
            sums = _one_step(run, step, {"save": float(due), "signal": float(signals.number)})
            save, stop = sums.pop("save"), sums.pop("signal")
            step += 1
            bar.advance(1, sums["tokens"].item())
            run.log.add(sums)
            if step % settings.log_every == 0 or step == run.total:
                _write_log(run, step, bar)
            every = settings.save_every and step % settings.save_every == 0
            if save or stop or every or step == run.total:
                _save(run, step)
                saved_at = time.monotonic()
            if stop and step < run.total:
                raise Interrupted(signals.number or SIGTERM, step)


def _save(run: Run, step: int) -> None:
    """Save the state after `step` steps, if all of it is finite."""
    settings, drafter = run.settings, run.joint.drafter
    _check_finite(run, step - 1, state_tensors(drafter, run.optimizer))  # moments too, which overflow before weights do
    extra = {f"log.{name}": value for name, value in run.log.sums.items()}
    writes = run.accelerator.is_main_process
    save_state(Path(settings.output), step, drafter, run.optimizer, run.identity, extra, settings.keep_states, writes)


def _check_finite(run: Run, step: int, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """End the run if the update of `step` left something in `tensors` that is not finite, in any process."""
    flags = [own.isfinite().all() for _, own in local_floats(tensors)]
    whole = torch.stack(flags).all() if flags else torch.tensor(True, device=run.accelerator.device)
    if not bool(run.accelerator.gather(whole.reshape(1)).all()):
        _stop_on_nonfinite(run, step, "drafter after the update", "not finite")


def _one_step(run: Run, step: int, flags: dict[str, float]) -> dict[str, Tensor]:
    """One optimiser step; returns the sums of the whole batch and of the processes' `flags`."""
    settings, accelerator = run.settings, run.accelerator
    shares = run.order.shares(step)
    inputs = [_inputs(run, step, share) for share in shares]
    # A loss is divided by counts over the whole batch, some of which only a forward pass can tell. With several
    # micro-batches a first pass without gradients counts; a single one is counted as it goes.
    ahead = nullcontext() if len(shares) == 1 else torch.no_grad()
    with ahead:
        passed = [_forward(run, step, *pair) for pair in zip(shares, inputs, strict=True)]
    totals = add_up(accelerator, passed, flags)
    progress = step / run.total
    loss = run.joint.loss(totals, totals, progress)
    if not torch.isfinite(loss):
        _stop_on_nonfinite(run, step, "loss", str(loss.item()))
    for number, (share, tensors) in enumerate(zip(shares, inputs, strict=True), 1):
        last = number == len(shares)
        with nullcontext() if last else accelerator.no_sync(run.wrapped):
            sums = passed[0] if len(shares) == 1 else _forward(run, step, share, tensors)
            # Gradients are averaged over processes: each loss is its share of the whole times their number.
            accelerator.backward(run.joint.loss(sums, totals, progress) * accelerator.num_processes)
    norm = accelerator.clip_grad_norm_(run.wrapped.parameters(), settings.clip)
    norm = whole_tensor(norm)
    if not torch.isfinite(norm):
        _stop_on_nonfinite(run, step, "gradient norm", str(norm.item()))
    set_rates(run.optimizer, rate_share(step, run.total, settings.warmup, settings.final_rate))
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    _check_finite(run, step, run.joint.drafter.named_parameters())
    tokens = sum(len(run.order.examples[i]) for i in run.order.batch(step))
    return totals | {"tokens": torch.tensor(float(tokens)), "grad_norm": norm.detach(), "steps": torch.tensor(1.0)}


def _inputs(run: Run, step: int, share: Share) -> tuple[Any, ...]:
    """What `JointObjective.forward` takes for one micro-batch."""
    examples = [run.order.examples[i] for i in share.indices]
    batch, device = collate(examples), run.accelerator.device
    input_ids, loss_mask = batch.input_ids.to(device), batch.loss_mask.to(device)
    generators = run.order.generators(step, share)
    blocks = sample_blocks(input_ids, loss_mask, run.settings.block_size, run.settings.anchors, generators)
    return input_ids, *run.states(examples, batch), blocks


def _forward(run: Run, step: int, share: Share, inputs: tuple[Any, ...]) -> dict[str, Tensor]:
    torch.manual_seed(run.order.seed_of(step, share.places[0]))  # dropout, alike in both passes
    return run.wrapped(*inputs)


def _stop_on_nonfinite(run: Run, step: int, what: str, value: str) -> NoReturn:
    """Leave a file that names the batch, and end the run; nothing of this step is saved."""
    ids = [run.order.examples[i].id for i in run.order.batch(step)]
    output = Path(run.settings.output)
    path = output / f"{NONFINITE}{step:08d}.json"
    if run.accelerator.is_main_process:
        path.write_text(json.dumps({"step": step, what: value, "ids": ids}, indent=1) + "\n", encoding="utf-8")
    shown = ", ".join(ids[:4]) + (f" and {len(ids) - 4} more" if len(ids) > 4 else "")
    raise ValueError(
        f"The {what} is {value} at step {step} on {shown} ({path.name} names all): {resort_of(output)}; look at these "
        "examples or lower the learning rate."
    )


def _write_log(run: Run, step: int, bar: Bar) -> None:
    """A line in `log.jsonl`, for the trackers and beside the progress bar."""
    if not run.accelerator.is_main_process:
        run.log.sums = {}
        return
    steps = run.log.sums.pop("steps")
    run.log.sums["grad_norm"] = run.log.sums["grad_norm"] / steps
    rates = [group["lr"] for group in run.optimizer.param_groups]
    line = run.log.flush(step, learning_rate=rates[0], epoch=step / run.order.steps_an_epoch, unix_time=time.time())
    run.accelerator.log({name: value for name, value in line.items() if isinstance(value, float)}, step=step)
    shown = {k: f"{v:.2f}" for k, v in line.items() if k.endswith("length") or k == "dflash"}
    bar.note = ", ".join(f"{name} {value}" for name, value in shown.items())


def _calibrate(run: Run, drafter: LiLiCorrModel) -> None:
    """Fit how the head's scores become probabilities on the batches that it was trained on last."""
    target = run.joint.target
    config, settings = drafter.config, run.settings
    own = LiLiCorrModel(config).to(target.device).eval()
    own.load_state_dict(drafter.state_dict())

    def texts() -> Iterator[tuple[Tensor, Tensor, Blocks]]:
        for step in range(run.total - 1, -1, -1):
            for share in run.order.shares(step):
                input_ids, states, _, blocks = _inputs(run, step, share)
                yield input_ids, states, blocks

    beta = fit_tree_beta(own, target, texts())
    if beta is not None and "tree_beta" in OPTIONAL.get(settings.head_type, ()):
        config.head_config["tree_beta"] = round(beta, 3)


def _finish(run: Run) -> Path:
    """Write the bf16 checkpoint and the report; returns the checkpoint's folder."""
    output = Path(run.settings.output)
    finished = output / "checkpoint"
    trained = run.joint.drafter.state_dict()
    tensors = {name: whole_tensor(tensor).to("cpu", torch.bfloat16) for name, tensor in trained.items()}
    if run.accelerator.is_main_process:
        plain = LiLiCorrModel(run.joint.drafter.config).to(torch.bfloat16)
        plain.load_state_dict(tensors)
        _calibrate(run, plain)
        try:
            plain.save_pretrained(finished)
        except (OSError, SafetensorError) as error:
            raise not_written("The checkpoint", finished, error, resort_of(output)) from error
        if run.log.path.exists():
            write_report(output)
        for told in output.glob(f"{NONFINITE}*.json"):  # of an earlier attempt
            told.unlink()
    run.accelerator.wait_for_everyone()
    run.accelerator.end_training()
    return finished
