"""Figures of one arm over many answers, and of all arms over runs with several seeds."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from .arms import Measured
from .metrics import acceptance_by_slot, acceptance_length, mean_of_response_means, tokens_per_verification
from .names import PLAIN

POOLINGS: dict[str, Callable[..., float]] = {
    "acceptance_length": acceptance_length,
    "mean_of_response_means": mean_of_response_means,
    "tokens_per_verification": tokens_per_verification,
}
OVER_SEEDS = ("acceptance_length", "tokens_per_second", "speed_up")
LENGTHS = (128, 256, 512, 1024, 2048)  # prompt tokens up to which a group reaches


@dataclass(frozen=True)
class Asked:
    """One turn that every arm answered at one temperature and seed."""

    set: str
    category: str
    prompt_tokens: int
    temperature: float
    seed: int
    arms: dict[str, Measured]

    @property
    def loops(self) -> bool:
        """Whether some arm's answer only repeats itself; under greedy decoding they are one answer."""
        return any(run.loops for run in self.arms.values())

    @property
    def length(self) -> str:
        """The group of prompt lengths that it belongs to."""
        lower = 0
        for upper in LENGTHS:
            if self.prompt_tokens <= upper:
                return f"{lower + 1}–{upper}"
            lower = upper
        return f"{lower + 1} and more"


def arm_figures(runs: Sequence[Measured]) -> dict[str, Any]:
    """Speed, tokens a pass, time by stage, equality with plain and, for a drafter, acceptance.

    Speed counts new tokens by the wall clock, prefill included. `tokens_per_pass`, `milliseconds_per_pass` and `shares`
    are of the time after the prefill; a pass of the target that had nothing to verify counts as well.
    """
    tokens, seconds = sum(run.new_tokens for run in runs), sum(run.seconds for run in runs)
    made: dict[str, Any] = {
        "answers": len(runs),
        "new_tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "looping": sum(run.loops for run in runs),
        "equal": sum(run.equal is not False for run in runs),
        "largest_logit_gap": max((run.logit_gap for run in runs if run.logit_gap is not None), default=None),
    }
    traces = [run.trace for run in runs if run.trace is not None]
    made["blocks"] = sum(trace.blocks for trace in traces)
    passes = _passes(runs)
    if passes:
        made["tokens_per_pass"] = (tokens - len(runs)) / passes
    stages = {name: sum(run.stages.get(name, 0.0) for run in runs) for name in ("prefill", "draft", "target")}
    after = seconds - stages.pop("prefill")
    if passes and any(stages.values()):
        made["milliseconds_per_pass"] = {name: 1000 * spent / passes for name, spent in stages.items()}
        made["shares"] = {name: spent / after for name, spent in stages.items()}
    if made["blocks"]:
        made |= {name: pool(traces) for name, pool in POOLINGS.items()}
        made["acceptance_by_slot"] = acceptance_by_slot(traces)
        made["drafted_per_pass"] = sum(trace.drafted for trace in traces) / passes
    return made


def _passes(runs: Sequence[Measured]) -> int:
    """Passes of the target after the prompts': as counted, else as the traces tell; 0 where nothing does."""
    counted = [run.passes for run in runs]
    if None not in counted:
        return sum(filter(None, counted))
    traces = [run.trace for run in runs if run.trace is not None]
    if len(traces) < len(runs):
        return 0
    # Those outside blocks give a token each, as the prompt's does.
    return sum(trace.new_tokens - 1 - trace.committed + trace.blocks for trace in traces)


def spread(values: Iterable[float]) -> dict[str, Any]:
    """Median, mean, sample standard deviation (0 of one value) and range; values that are NaN do not count."""
    known = [value for value in values if not math.isnan(value)]
    if not known:
        return {"runs": 0}
    return {
        "runs": len(known),
        "median": statistics.median(known),
        "mean": statistics.fmean(known),
        "sd": statistics.stdev(known) if len(known) > 1 else 0.0,
        "min": min(known),
        "max": max(known),
    }


def condense(asked: Sequence[Asked]) -> dict[str, Any]:
    """Figures of every arm over `asked`, of one temperature: of all seeds together, and their spread over seeds."""
    seeds = sorted({one.seed for one in asked})
    arms: dict[str, Any] = {}
    for name in asked[0].arms if asked else []:
        arms[name] = arm_figures([one.arms[name] for one in asked])
        by_seed = []
        for seed in seeds:
            own = arm_figures([one.arms[name] for one in asked if one.seed == seed])
            plain = arm_figures([one.arms[PLAIN] for one in asked if one.seed == seed])
            by_seed.append(own | {"speed_up": own["tokens_per_second"] / plain["tokens_per_second"]})
        arms[name]["over_seeds"] = {
            key: spread(figure[key] for figure in by_seed if key in figure) for key in OVER_SEEDS
        }
    return {"answers": len(asked), "seeds": seeds, "arms": arms}


def views(asked: Sequence[Asked], sets: Sequence[str]) -> dict[str, Any]:
    """`condense` of everything, of every one of `sets`, of every category and of every group of prompt lengths."""
    categories = sorted({one.category for one in asked})
    lengths = list(dict.fromkeys(one.length for one in sorted(asked, key=lambda one: one.prompt_tokens)))
    by_set = {name: [one for one in asked if one.set == name] for name in sets}
    return {
        "total": condense(asked),
        "sets": {name: condense(part) for name, part in by_set.items() if part},
        "categories": {name: condense([one for one in asked if one.category == name]) for name in categories},
        "prompt_lengths": {name: condense([one for one in asked if one.length == name]) for name in lengths},
    }


def by_temperature(asked: Sequence[Asked], sets: Sequence[str]) -> dict[str, Any]:
    """By temperature (`"0"`, `"1"`): `views` of all answers and of those left `without_loops`.

    A turn counts as looping if one arm's answer loops, so that both views hold the same turns for every arm.
    """
    made = {}
    for temperature in sorted({one.temperature for one in asked}):
        part = [one for one in asked if one.temperature == temperature]
        kept = [one for one in part if not one.loops]
        made[f"{temperature:g}"] = {
            "looping_share": 1 - len(kept) / len(part),
            "all": views(part, sets),
            "without_loops": views(kept, sets),
        }
    return made
