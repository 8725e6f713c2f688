"""A recorded call in a terminal: figures, the answer by who proposed what, blocks with lattice and tree, losses."""

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from .losses import ABSENT, ELSEWHERE, LOSSES, UNCHOSEN, UNDRAFTED, SlotTally, tally
from .picture import Cell, cells_of
from .trace import BOTH, LATTICE, TEXT, BlockTrace, CallTrace
from .words import Words, percent, told

STYLES = {LATTICE: "green", TEXT: "blue", BOTH: "cyan", "": "yellow"}  # of tokens by who proposed them; "": the target
BAR = 24  # letters of a bar
BARS = {"accepted": ("█", "green"), ABSENT: ("░", "red"), UNCHOSEN: ("▒", "yellow"), ELSEWHERE: ("▓", "magenta")} | {
    UNDRAFTED: ("-", "blue"),
    "ended": (".", "dim"),
}


def print_call(console: Console, call: CallTrace, tokenizer: Any, blocks: int) -> None:
    """Print `call`, with the first `blocks` of its blocks drawn."""
    words = Words(tokenizer)
    console.print(figures_line(call), markup=False, highlight=False)
    console.print()
    console.print(answer_text(call, words))
    console.print(_colours())
    for number, block in enumerate(call.blocks[:blocks], 1):
        console.rule(f"block {number} of {call.passes}")
        console.print(told(block, words), markup=False, highlight=False)
        if block.slots:
            console.print(lattice_table(block, words, shown=max(2, min(6, (console.width - 10) // 16))))
        console.print(tree_of(block, words))
    console.rule()
    console.print(losses_table(tally(call.blocks)))


def figures_line(call: CallTrace) -> str:
    """The call's figures in a sentence."""
    if not call.passes:
        return f"{len(call.tokens)} token, which the prompt's own pass gave: nothing was drafted."
    return (
        f"{len(call.tokens)} tokens in {call.passes} passes of the target behind the prompt's "
        f"({call.tokens_per_pass:.2f} tokens a pass); {call.accepted} of {call.proposed} proposed tokens accepted, "
        f"{call.skipped} drafts skipped by the text."
    )


def answer_text(call: CallTrace, words: Words) -> Text:
    """The answer, in colours that say who proposed each token."""
    made = Text(words(call.first), style=STYLES[""])
    for block in call.blocks:
        kept = block.accepted
        for index, token in enumerate(block.committed):
            source = block.nodes[kept[index]].source if index < len(kept) else ""
            made.append(words(token), style=STYLES[source])
            if words.breaks(token):
                made.append("\n")
    return made


def _colours() -> Text:
    names = {LATTICE: "the drafter", TEXT: "the text's own continuation", BOTH: "both", "": "the target itself"}
    return Text("by ", style="dim") + Text(", ").join(Text(name, STYLES[source]) for source, name in names.items())


def lattice_table(block: BlockTrace, words: Words, shown: int = 6) -> Table:
    """Candidates of every slot, likeliest first: `[ ]` the walk, ✓ accepted, ✗ refused, → what the target said.

    Args:
        shown: candidates listed a slot; others that the walk, the tree or the target name stand behind them.
    """
    table = Table(show_edge=False, pad_edge=False)
    table.add_column("slot", justify="right", no_wrap=True)
    table.add_column(Text("candidates, likeliest first: [walk], ✓ accepted, ✗ refused, → said by the target"))
    cells = cells_of(block)
    for slot in range(1, max(slot for slot, _ in cells) + 1):
        own = [cell for (at, _), cell in cells.items() if at == slot]
        listed = [cell for cell in own if cell.kinds or 0 < cell.rank <= shown]
        table.add_row(str(slot), Text("  ").join(_candidate(cell, words) for cell in listed))
    return table


def _candidate(cell: Cell, words: Words) -> Text:
    label = f"{words(cell.token)} {'' if cell.chance is None else percent(cell.chance)}".rstrip().replace(" %", "%")
    label = f"[{label}]" if "walk" in cell.kinds else label
    for kind, sign, style in (("kept", "✓", "bold green"), ("bonus", "→", "bold yellow"), ("node", "✗", "red")):
        if kind in cell.kinds:
            return Text(f"{sign} {label}", style=style)
    return Text(label, style="" if "walk" in cell.kinds else "dim")


def tree_of(block: BlockTrace, words: Words) -> Tree:
    """The tree that was verified, with what the target said at each node."""
    grown: list[Tree] = []
    for number, node in enumerate(block.nodes):
        bonus = number == block.path[-1] and block.bonus is not None
        label = Text(words(node.token), style="bold")
        if number:
            kept = number in block.accepted
            label.stylize("green" if kept else "dim")
            source = "drafter" if node.source == LATTICE else node.source
            label.append(f"  {percent(node.chance)} {source} {'✓' if kept else '✗'}", style="" if kept else "dim")
        label.append("  target: ", style="dim")
        label.append(words(node.said), style="bold yellow" if bonus else "")
        label.append(f" {percent(node.sure)}{', added' if bonus else ''}", style="dim")
        grown.append(grown[node.parent].add(label) if number else Tree(label))
    return grown[0]


def losses_table(slots: list[SlotTally]) -> Table:
    """Where acceptance is lost, by slot, with a bar of the shares."""
    table = Table(title="where acceptance is lost, in blocks that got to a slot", title_justify="left")
    table.add_column("slot", justify="right", no_wrap=True)
    table.add_column("there", justify="right", no_wrap=True)
    for sign, style in BARS.values():
        table.add_column(Text(sign, style=style), justify="right")
    table.add_column("shares", min_width=BAR, no_wrap=True)
    names = {"accepted": "accepted", **LOSSES, "ended": "the text ended"}
    table.caption = Text("\n").join(
        Text(f"{BARS[name][0]} {meaning}", BARS[name][1]) for name, meaning in names.items()
    )
    table.caption_justify = "left"
    for each in slots:
        counts = {"accepted": each.accepted, **each.lost, "ended": each.ended}
        table.add_row(str(each.slot), str(each.reached), *map(str, counts.values()), _bar(counts, each.reached))
    return table


def _bar(counts: dict[str, int], total: int) -> Text:
    """Letters by share; ends are rounded, so that they always fill the bar."""
    bar, before = Text(), 0
    for name, count in counts.items():
        start, end = (round(BAR * part / max(1, total)) for part in (before, before + count))
        before += count
        bar.append(BARS[name][0] * (end - start), style=BARS[name][1])
    return bar
