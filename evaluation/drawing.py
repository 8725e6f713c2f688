"""Draw comparisons and lattices as rich tables."""

import math
from collections.abc import Iterator, Sequence

import torch
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from .blocks import DrawnBlock
from .compare import Comparison
from .metrics import Trace, acceptance_length

PROMPT_WIDTH = 9  # with it all columns fit into a terminal of 80
TIE = 64  # roundings of one part in the dtype's precision that a logit of up to 16 may have gathered: 0.5 in bf16


def comparison_table(comparisons: Sequence[Comparison], dtype: torch.dtype = torch.float32) -> Table:
    """One row a prompt and one for all: tokens/s plain and assisted, speed-up, acceptance length, equality.

    Args:
        dtype: the target's, by which ties are told.
    """
    table = Table(title="plain generate against assistant_model=drafter")
    table.add_column("prompt", max_width=PROMPT_WIDTH, no_wrap=True, overflow="ellipsis")
    for name in ("tokens", "plain\ntok/s", "assisted\ntok/s", "speed-up", "acceptance\nlength"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("output", no_wrap=True)
    for comparison in comparisons:
        plain, assisted = comparison.plain, comparison.assisted
        table.add_row(
            Text(" ".join(comparison.prompt.split())),
            str(len(assisted.token_ids)),
            *_speeds(plain.tokens_per_second, assisted.tokens_per_second),
            _length([assisted.trace] if assisted.trace else []),
            verdict(comparison, dtype),
        )
    if not comparisons:
        return table
    total = {arm: [getattr(c, arm) for c in comparisons] for arm in ("plain", "assisted")}
    rates = {arm: sum(len(a.token_ids) for a in runs) / sum(a.seconds for a in runs) for arm, runs in total.items()}
    table.add_section()
    table.add_row(
        Text("all", style="bold"),
        str(sum(len(a.token_ids) for a in total["assisted"])),
        *_speeds(rates["plain"], rates["assisted"]),
        _length([a.trace for a in total["assisted"] if a.trace]),
        _overall(comparisons),
    )
    return table


def _speeds(plain: float, assisted: float) -> tuple[str, str, Text]:
    return f"{plain:.1f}", f"{assisted:.1f}", Text(f"{assisted / plain:.2f}×", style="bold")


def _length(traces: Sequence[Trace]) -> str:
    length = acceptance_length(traces)
    return "-" if math.isnan(length) else f"{length:.2f}"


def verdict(comparison: Comparison, dtype: torch.dtype = torch.float32) -> Text:
    """Whether the two outputs agree; `explain_differences` says where and why they do not."""
    if comparison.equal is None:
        return Text("sampled", style="dim")
    if comparison.difference is None:
        return Text("equal", style="green")
    return Text("tie", "yellow") if _is_tie(comparison, dtype) else Text("differs", "red")


def _is_tie(comparison: Comparison, dtype: torch.dtype) -> bool:
    """Whether the target's logits of the two tokens are as near as rounding over its layers can bring them."""
    gap = None if comparison.difference is None else comparison.difference.logit_gap
    return gap is not None and gap <= TIE * torch.finfo(dtype).eps


def summary_line(comparisons: Sequence[Comparison]) -> str:
    """One sentence on all of them: tokens/s of plain decoding, of prompt lookup where it ran, and with the drafter."""
    runs = {"plain": [c.plain for c in comparisons], "with the drafter": [c.assisted for c in comparisons]}
    lookups = [c.lookup for c in comparisons if c.lookup is not None]
    if len(lookups) == len(comparisons):
        runs = {"plain": runs["plain"], "prompt lookup": lookups, "with the drafter": runs["with the drafter"]}
    rates = {arm: sum(len(a.token_ids) for a in each) / sum(a.seconds for a in each) for arm, each in runs.items()}
    shown = ", ".join(f"{arm} {rate:.1f}" for arm, rate in rates.items())
    gain = rates["with the drafter"] / rates["plain"]
    slower = "" if gain >= 1 else ": here a tree's pass costs more than the tokens it brings are worth"
    return f"Tokens/s: {shown} ({gain:.2f}× plain{slower})."


def explain_differences(
    comparisons: Sequence[Comparison], tokenizer: PreTrainedTokenizerBase, dtype: torch.dtype
) -> Iterator[str]:
    """One sentence for every difference, and what ties are where there is one; nothing where all outputs are equal."""
    ties = False
    for number, comparison in enumerate(comparisons, 1):
        difference = comparison.difference
        if difference is None:
            continue
        index, gap = difference.index, difference.logit_gap
        where = f"Prompt {number}, token {index + 1}: "
        if gap is None:
            yield f"{where}one output ends and the other goes on, which must not happen; please report it."
            continue
        said = [_word(tokenizer, answer.token_ids[index]) for answer in (comparison.plain, comparison.assisted)]
        words = f"“{said[0]}” (plain) and “{said[1]}” (assisted)"
        if _is_tie(comparison, dtype):
            ties = True
            yield f"{where}the target finds {words} equally likely, to within {math.expm1(gap):.1%}."
        else:
            yield f"{where}{words} are {gap:.3g} apart in the target's logits, which must not happen; please report it."
    if ties:
        name = str(dtype).removeprefix("torch.")
        finer = "" if dtype == torch.float32 else " With --dtype fp32 they are the same to the last token."
        yield (
            f"That is less than {name} can tell apart, so rounding decides which of the two is said: plain generate "
            f"changes its mind in the same way when prompts are batched. Both outputs are the target's own.{finer}"
        )


def _overall(comparisons: Sequence[Comparison]) -> str:
    judged = [comparison.equal for comparison in comparisons if comparison.equal is not None]
    return f"{sum(judged)} of {len(judged)} equal" if judged else ""


def lattice_table(block: DrawnBlock, tokenizer: PreTrainedTokenizerBase, shown: int = 8) -> Table:
    """Candidates of every slot, likeliest first, and the walk: green while the target agrees, red where it ends.

    Args:
        block: from `blocks.draw_block`; shown: candidates listed a slot (the walk's own is always shown).
    """
    candidates = block.lattice.candidates[0].tolist()
    log_probs = block.lattice.log_probs[0].tolist()
    table = Table(title="one block: the walk through each slot's candidates, likeliest first")
    table.add_column("slot", justify="right")
    table.add_column("walk", no_wrap=True)
    table.add_column("the target says", no_wrap=True)
    for rank in range(min(shown, len(candidates[0]))):
        table.add_column(f"#{rank + 1}", no_wrap=True, overflow="ellipsis")
    for slot, pick in enumerate(block.lattice.picks[0].tolist()):
        if slot < block.accepted:
            style, mark = "bold green", "✓"
        elif slot == block.accepted:
            style, mark = "bold red", "✗"
        else:
            style, mark = "dim", " "
        cells = [
            _candidate(tokenizer, token, log_probs[slot][rank], rank == pick, style)
            for rank, token in enumerate(candidates[slot][:shown])
        ]
        walk = Text(f"{mark} {_word(tokenizer, block.token_ids[slot])} (#{pick + 1})", style=style)
        table.add_row(str(slot + 1), walk, Text(_word(tokenizer, block.answer_ids[slot])), *cells)
    table.caption = f"{block.accepted} of {len(block.token_ids)} drafts accepted (✓); the drafter's probabilities"
    return table


def _candidate(tokenizer: PreTrainedTokenizerBase, token: int, log_prob: float, picked: bool, style: str) -> Text:
    label = f"{_word(tokenizer, token)} {math.exp(log_prob):.0%}"
    return Text(f"[{label}]", style=style) if picked else Text(label, style="dim")


def _word(tokenizer: PreTrainedTokenizerBase, token: int) -> str:
    return str(tokenizer.decode([token])).replace("\n", "⏎").replace("\t", "⇥").replace(" ", "·")
