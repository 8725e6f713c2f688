"""Where everything stands in the picture of a block: slots from left to right, candidates from the top down."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from .trace import BlockTrace
from .words import Words, percent

SHOWN = 6  # candidates a slot, and below them those that the walk, the tree or the target name
WIDTH, HEIGHT, ACROSS, DOWN, TOP, EDGE = 96, 30, 30, 8, 24, 6  # of a cell, between cells, above and around all
LETTERS = 7  # of a token in a cell


@dataclass
class Cell:
    """A token at a slot.

    Attributes:
        row: counted from the top; rank: among the candidates, 1 the likeliest, 0 for none; chance: the drafter's own.
        kinds: what it is besides: `anchor`, `walk`, `node`, `kept`, `text` (proposed by the text alone), `bonus`.
    """

    slot: int
    row: int
    token: int
    rank: int = 0
    chance: float | None = None
    kinds: set[str] = field(default_factory=set)


def cells_of(block: BlockTrace) -> dict[tuple[int, int], Cell]:
    """The cells of `block` by slot and token; slot 0 holds the anchor."""
    kinds: dict[tuple[int, int], set[str]] = {}
    for number, node in enumerate(block.nodes):
        kept = {"kept"} if number in block.accepted else set[str]()
        own = {"node", *kept, *({"text"} if node.source == "text" else ())} if number else {"anchor"}
        kinds.setdefault((node.depth, node.token), set()).update(own)
    for slot, drafted in enumerate(block.slots, 1):
        if drafted.tokens:
            kinds.setdefault((slot, drafted.tokens[drafted.pick]), set()).add("walk")
    if block.bonus is not None:
        kinds.setdefault((len(block.accepted) + 1, block.bonus), set()).add("bonus")
    cells: dict[tuple[int, int], Cell] = {}
    rows: dict[int, int] = {}

    def place(slot: int, token: int, rank: int = 0, chance: float | None = None) -> None:
        row = rows.get(slot, 0)
        cells[slot, token] = Cell(slot, row, token, rank, chance, kinds.get((slot, token), set()))
        rows[slot] = row + 1

    for slot, drafted in enumerate(block.slots, 1):
        for index, (token, chance) in enumerate(zip(drafted.tokens, drafted.chances, strict=True)):
            if index < SHOWN or (slot, token) in kinds:
                place(slot, token, index + 1, chance)
    for slot, token in kinds:
        if (slot, token) not in cells:
            place(slot, token)
    return cells


def edges_of(block: BlockTrace) -> list[tuple[str, tuple[int, int], tuple[int, int]]]:
    """Lines between cells: their kind (`node`, `walk`, `kept`, `bonus`), from and to; those on top come last."""
    edges = []
    for number, node in enumerate(block.nodes[1:], 1):
        above = block.nodes[node.parent]
        kind = "kept" if number in block.accepted else "node"
        edges.append((kind, (above.depth, above.token), (node.depth, node.token)))
    at = (0, block.nodes[0].token)
    for slot, drafted in enumerate(block.slots, 1):
        if not drafted.tokens:
            break
        to = (slot, drafted.tokens[drafted.pick])
        edges.append(("walk", at, to))
        at = to
    if block.bonus is not None:
        end = block.nodes[block.path[-1]]
        edges.append(("bonus", (end.depth, end.token), (end.depth + 1, block.bonus)))
    return sorted(set(edges), key=lambda edge: (("node", "bonus", "kept", "walk").index(edge[0]), *edge[1:]))


def picture(block: BlockTrace, words: Words) -> dict[str, object]:
    """What the page's template draws of a block: sizes, columns, lines and cells, in pixels."""
    cells = cells_of(block)
    slots = max(slot for slot, _ in cells) + 1
    rows = max(cell.row for cell in cells.values()) + 1
    return {
        "width": 2 * EDGE + slots * (WIDTH + ACROSS) - ACROSS,
        "height": TOP + rows * (HEIGHT + DOWN) + EDGE,
        "columns": [{"x": _left(slot), "name": f"slot {slot}" if slot else "anchor"} for slot in range(slots)],
        "edges": [{"kind": kind, "line": _line(cells[start], cells[end])} for kind, start, end in edges_of(block)],
        "cells": [_drawn(cell, words) for cell in cells.values()],
        "cell": {"width": WIDTH, "height": HEIGHT},
    }


def _left(slot: int) -> int:
    return EDGE + slot * (WIDTH + ACROSS)


def _middle(cell: Cell) -> int:
    return TOP + cell.row * (HEIGHT + DOWN) + HEIGHT // 2


def _line(start: Cell, end: Cell) -> str:
    """A curve from the right side of a cell to the left side of one of the next slot, as an SVG path."""
    x, y, to_x, to_y = _left(start.slot) + WIDTH, _middle(start), _left(end.slot), _middle(end)
    return f"M{x} {y}C{x + ACROSS // 2} {y} {to_x - ACROSS // 2} {to_y} {to_x} {to_y}"


def _drawn(cell: Cell, words: Words) -> dict[str, object]:
    word = words(cell.token)
    return {
        "x": _left(cell.slot),
        "y": TOP + cell.row * (HEIGHT + DOWN),
        "kinds": " ".join(sorted(cell.kinds)),
        "label": word if len(word) <= LETTERS else word[: LETTERS - 1] + "…",
        "chance": "" if cell.chance is None else percent(cell.chance),
        "bar": 0 if cell.chance is None else round((WIDTH - 8) * cell.chance, 1),
        "title": "; ".join(_said(cell, word)),
    }


def _said(cell: Cell, word: str) -> Iterable[str]:
    place = f"slot {cell.slot}" if cell.slot else "anchor"
    yield f"{place}: {word}"
    if cell.rank and cell.chance is not None:
        yield f"candidate number {cell.rank}, {percent(cell.chance)}"
    elif cell.slot:
        yield "not a candidate of the drafter"
    told = {
        "walk": "on the walk",
        "text": "proposed by the text's own continuation",
        "kept": "accepted",
        "bonus": "the target's own token",
    }
    yield from (meaning for kind, meaning in told.items() if kind in cell.kinds)
    if "node" in cell.kinds and "kept" not in cell.kinds:
        yield "in the tree, refused"
