"""Draw comparisons and lattices as rich tables."""

import math
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from .blocks import DrawnBlock
from .compare import Comparison
from .metrics import Trace, acceptance_length

PROMPT_WIDTH = 14


def comparison_table(comparisons: Sequence[Comparison]) -> Table:
    """One row a prompt and one for all: tokens/s plain and assisted, speed-up, acceptance length, equality."""
    table = Table(title="plain generate against assistant_model=drafter")
    table.add_column("prompt", max_width=PROMPT_WIDTH, no_wrap=True, overflow="ellipsis")
    for name in ("tokens", "plain tok/s", "assisted tok/s", "speed-up", "acceptance length"):
        longest = max(map(len, name.split()))  # headers wrap at words; in a narrow terminal the prompt gives way
        table.add_column(name, justify="right", min_width=longest)
    table.add_column("output", min_width=6)
    for comparison in comparisons:
        plain, assisted = comparison.plain, comparison.assisted
        table.add_row(
            Text(" ".join(comparison.prompt.split())),
            str(len(assisted.token_ids)),
            *_speeds(plain.tokens_per_second, assisted.tokens_per_second),
            _length([assisted.trace] if assisted.trace else []),
            verdict(comparison),
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


def verdict(comparison: Comparison) -> Text:
    """Whether the two outputs agree; at the first difference, how near a tie the target's logits are there."""
    if comparison.equal is None:
        return Text("sampled", style="dim")
    if comparison.difference is None:
        return Text("equal", style="green")
    index, gap = comparison.difference.index, comparison.difference.logit_gap
    if gap is None:
        return Text(f"one ends at token {index + 1}", style="red")
    return Text(f"near tie at token {index + 1}? logit gap {gap:.3g}", style="yellow")


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
