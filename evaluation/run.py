"""Ask every question of every arm, row by row, and put the finished rows together."""

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .arms import Measured, arms_of, ask, differences, warm_up_arms
from .compare import Answer, decoding_options, encode
from .coverage import add_coverage, count_coverage
from .journal import Journal
from .loading import Pair
from .machine import machine, models
from .names import CHAIN, PLAIN, TREE
from .sets import Question, in_order
from .summary import Asked, by_temperature


@dataclass(frozen=True)
class Plan:
    """How every question is asked.

    Attributes:
        max_new_tokens: tokens of each answer at most.
        temperatures: 0 is greedy; seeds: of the runs at every temperature above it; greedy_runs: runs at 0.
        all_turns: ask later turns too, on top of plain decoding's answers to those before.
        coverage_blocks: blocks of each question's first answer drafted again to count coverage; 0: none.
        arms: those of `names.ARMS` to ask besides plain decoding; nodes: of their trees, see `arms.arms_of`.
    """

    max_new_tokens: int
    temperatures: tuple[float, ...] = (0.0, 1.0)
    seeds: tuple[int, ...] = (42, 43, 44)
    greedy_runs: int = 1
    all_turns: bool = False
    coverage_blocks: int = 4
    arms: tuple[str, ...] = (TREE, CHAIN)
    nodes: int | None = None

    @property
    def runs(self) -> list[tuple[float, int]]:
        """Temperature and seed of every run."""
        greedy = list(range(self.greedy_runs))
        return [(heat, seed) for heat in self.temperatures for seed in (self.seeds if heat > 0 else greedy)]


def settings_of(pair: Pair, name: str, drafters: dict[str, str], plan: Plan, target: str | Path) -> dict[str, Any]:
    """All that decides about rows: models with what tells their weights apart, the plan, the machine.

    Args:
        name: what a report calls the target; target, drafters: what `pair` was loaded from.
    """
    decided = {"plan": asdict(plan), "machine": machine(pair.target.device)}
    return models(pair, name, drafters, target) | decided


def evaluate(
    pair: Pair,
    questions: Iterable[Question],
    plan: Plan,
    journal: Journal,
    advance: Callable[[int], None] = lambda runs: None,
) -> None:
    """Ask those of `questions` that `journal` does not hold yet, and append a row for each.

    A question that does not fit the target's context, with its answer, becomes a row that says so.

    Args:
        advance: called with the number of runs (of `plan.runs`, for each question) that are done since.
    """
    warm = False
    for number, question in enumerate(questions):
        if question.key in journal.rows:
            advance(len(plan.runs))
            continue
        if not warm:
            inputs = encode(pair.tokenizer, _messages(question)[:1], pair.target.device)
            arms = arms_of(pair.drafters, plan.arms, plan.nodes)
            warm_up_arms(pair.target, arms, {key: ids[:, :64] for key, ids in inputs.items()})
            warm = True
        journal.add(_row(pair, question, plan, number, advance))


def _messages(question: Question) -> list[dict[str, str]]:
    system = [] if question.system is None else [{"role": "system", "content": question.system}]
    return [*system, {"role": "user", "content": question.turns[0]}]


def _row(pair: Pair, question: Question, plan: Plan, number: int, advance: Callable[[int], None]) -> dict[str, Any]:
    row: dict[str, Any] = {"key": question.key, "set": question.set, "category": question.category, "asked": []}
    limit = getattr(pair.target.config.get_text_config(), "max_position_embeddings", None)
    for count, (temperature, seed) in enumerate(plan.runs):
        arms = arms_of(pair.drafters, plan.arms, plan.nodes)
        messages = _messages(question)
        for turn in range(len(question.turns) if plan.all_turns else 1):
            if turn:
                messages.append({"role": "user", "content": question.turns[turn]})
            inputs = encode(pair.tokenizer, messages, pair.target.device)
            length = inputs["input_ids"].shape[1]
            if limit is not None and length + plan.max_new_tokens > limit:
                row["left_out"] = f"{length} prompt and {plan.max_new_tokens} new tokens exceed the context of {limit}"
                break
            draw = zlib.crc32(f"{seed} {turn} {question.key}".encode())  # its own, whatever was asked before
            options = decoding_options(plan.max_new_tokens, temperature)
            answers = ask(pair.target, arms, inputs, first=number + count, seed=draw, **options)
            greedy = temperature == 0
            parted = differences(pair.target, inputs, answers) if greedy else {}
            measured = {
                name: Measured.of(given, greedy and name != PLAIN, parted.get(name)).to_json()
                for name, given in answers.items()
            }
            run = {"temperature": temperature, "seed": seed, "turn": turn, "prompt_tokens": length, "arms": measured}
            row["asked"].append(run)
            if count == turn == 0 and plan.coverage_blocks:
                row["coverage"] = _coverage(pair, inputs, answers[PLAIN], plan.coverage_blocks, draw)
            said = pair.tokenizer.decode(list(answers[PLAIN].token_ids), skip_special_tokens=True)
            messages.append({"role": "assistant", "content": str(said)})
        advance(1)
    return row


def _coverage(pair: Pair, inputs: dict[str, Any], plain: Answer, blocks: int, seed: int) -> dict[str, Any]:
    counts = {
        name: count_coverage(pair.target, drafter, inputs, plain.token_ids, blocks, seed)
        for name, drafter in pair.drafters.items()
    }
    return {name: count for name, count in counts.items() if count is not None}


def report_of(settings: dict[str, Any], rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The report on finished `rows`: by temperature (see `summary.by_temperature`), and `coverage` by drafter and set.

    Raises:
        ValueError: if no row holds an answer, or one lacks what rows hold.
    """
    asked = [one for row in rows for one in _asked(row)]
    if not asked:
        raise ValueError(
            f"No question was answered, since {rows[0]['left_out']}; ask shorter ones or lower --max-new-tokens."
            if rows and "left_out" in rows[0]
            else "No question was answered; give --data and --benchmarks some prompts."
        )
    sets = in_order({one.set for one in asked})
    return {
        "settings": settings,
        "questions": sum(bool(row["asked"]) for row in rows),
        "left_out": {row["key"]: row["left_out"] for row in rows if "left_out" in row},
        "temperatures": by_temperature(asked, sets),
        "coverage": {name: _covered(rows, name, sets) for name in settings["drafters"]},
    }


def _asked(row: dict[str, Any]) -> list[Asked]:
    """What a row says of every run of its question."""
    try:
        name, category, found = row["set"], row["category"], []
        for run in row["asked"]:
            arms = {arm: Measured.from_json(measured) for arm, measured in run["arms"].items()}
            found.append(Asked(name, category, run["prompt_tokens"], run["temperature"], run["seed"], arms))
        return found
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"The row of {row.get('key')!r} is not as an evaluation writes it ({type(error).__name__}: {error}); "
            "remove its line from the file of rows to ask it again."
        ) from None


def _covered(rows: Sequence[dict[str, Any]], drafter: str, sets: Sequence[str]) -> dict[str, Any]:
    def of(name: str | None) -> dict[str, Any] | None:
        held = [row.get("coverage", {}) for row in rows if name in (None, row["set"])]
        return add_coverage(one[drafter] for one in held if drafter in one)

    return {"all": of(None), "sets": {name: covered for name in sets if (covered := of(name)) is not None}}
