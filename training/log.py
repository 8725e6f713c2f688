"""`log.jsonl`: means of losses, acceptance lengths and coverage, one line every few steps."""

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .checkpoint import not_written, resort_of
from .losses.registry import DENOMINATORS

LOG_FILE = "log.jsonl"


class StepLog:
    """Adds up a run's sums and appends their means to `log.jsonl`.

    A sum is a scalar or has one entry a slot, `[slots]`. `sums` is what is not yet written; a saved state holds it.
    """

    def __init__(self, output: Path) -> None:
        self.path = output / LOG_FILE
        self.sums: dict[str, Tensor] = {}
        self._since = time.monotonic()

    def add(self, sums: dict[str, Tensor]) -> None:
        """Take in the sums of one step."""
        for name, value in sums.items():
            value = value.detach().to("cpu", torch.float64)
            self.sums[name] = self.sums[name] + value if name in self.sums else value

    def flush(self, step: int, **more: Any) -> dict[str, Any]:
        """Append the means since the last line, with `step`, `more` and the rate; returns the line.

        Raises:
            OSError: in one sentence if the disk is full or fails.
        """
        now = time.monotonic()
        line = {"step": step, **means(self.sums), **more}
        if "tokens" in line:
            line["tokens_per_second"] = line["tokens"] / max(now - self._since, 1e-9)
        self._since = now
        try:
            with open(self.path, "a", encoding="utf-8") as log:
                log.write(json.dumps(line) + "\n")
        except OSError as error:
            raise not_written(f"The log line of step {step}", self.path, error, resort_of(self.path.parent)) from error
        self.sums = {}
        return line

    def rewind(self, step: int, sums: dict[str, Tensor]) -> None:
        """Go back to where a state of `step` was saved: lines after it go, a torn last one too, `sums` are taken up.

        Without a state (`step` 0) an existing log is kept beside the new one.
        """
        self.sums = {name: value.to(torch.float64) for name, value in sums.items()}
        if not self.path.exists():
            return
        if step == 0:
            os.replace(self.path, self.path.with_suffix(".jsonl.old"))
            return
        kept = [line for line in read_log(self.path) if line["step"] <= step]
        unfinished = self.path.with_suffix(".jsonl.tmp")
        unfinished.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        os.replace(unfinished, self.path)


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a log; a torn last one is left out.

    Raises:
        ValueError: if another line is no log line, naming it.
    """
    lines = path.read_bytes().splitlines()
    found = []
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text)
            if not isinstance(line, dict) or type(line.get("step")) is not int:
                raise ValueError("it is no object with a step")
        except ValueError as error:
            if number == len(lines):
                break
            raise ValueError(f"{path} line {number} is no line of a training log ({error}); remove it.") from None
        found.append(line)
    return found


def means(sums: dict[str, Tensor]) -> dict[str, Any]:
    """What a log line says of `sums`.

    Losses are over their `DENOMINATORS`. `X_accepted` becomes `X_length`, the acceptance length with the bonus token,
    and where it has slots `X_by_slot`, the share of blocks accepted up to each. `in_candidates` over the slots
    `supervised` becomes `coverage_by_slot`. What is left is passed on as a sum.
    """
    blocks = sums["blocks"].clamp(min=1.0)
    over = {name: sums[by].clamp(min=1e-6) for name, by in DENOMINATORS.items() if by in sums}
    line: dict[str, Any] = {}
    for name, value in sums.items():
        if name in over:
            line[name] = (value / over[name]).tolist()
        elif name.endswith("_accepted"):
            kind = name.removesuffix("_accepted")
            line[f"{kind}_length"] = 1 + (value.sum() / blocks).item()
            if value.ndim:
                line[f"{kind}_by_slot"] = (value / blocks).tolist()
        elif name == "in_candidates":
            line["coverage_by_slot"] = (value / sums["supervised"].clamp(min=1.0)).tolist()
        elif name not in ("supervised", *DENOMINATORS.values()):
            line[name] = value.tolist()
    return line
