"""One HTML page that shows a recorded call: everything is in it, and it asks for nothing from anywhere."""

import base64
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .losses import LOSSES, SlotTally, tally
from .picture import picture
from .trace import BlockTrace, CallTrace
from .words import Words, percent, told, visible

FOLDER = Path(__file__).parent


def page(call: CallTrace, tokenizer: Any, about: Mapping[str, str]) -> str:
    """The page as text, of well-formed XML as well as HTML.

    Args:
        call: from `trace.record`; tokenizer: of its target.
        about: what stands in the page's foot, by name: target, drafter and the like.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    words = Words(tokenizer)
    script = (FOLDER / "page.js").read_text("utf-8")
    style = (FOLDER / "page.css").read_text("utf-8")
    shelf = Environment(
        loader=FileSystemLoader(FOLDER, "utf-8"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return shelf.get_template("page.html").render(
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        style=Markup(style),
        figures=figures(call),
        prompt=[_plain(token, words) for token in call.prompt],
        answer=answer(call, words),
        blocks=[_block(number, block, words) for number, block in enumerate(call.blocks, 1)],
        slots=[_slot(each) for each in tally(call.blocks)],
        reasons=LOSSES,
        about={name: visible(value).replace("·", " ") for name, value in about.items()},
    )


def figures(call: CallTrace) -> list[tuple[str, str, str]]:
    """The figures at the top: number, name, and what it means."""
    rate = f"{call.tokens_per_pass:.2f}" if call.passes else "–"
    return [
        (str(len(call.tokens)), "tokens", "of the answer; the first one comes from the prompt's own pass"),
        (str(call.passes), "passes", "of the target behind the prompt's; without a drafter one for every token"),
        (rate, "tokens a pass", "1 is what the target gets alone"),
        (f"{call.accepted} of {call.proposed}", "proposed tokens accepted", "every node of a tree counts as proposed"),
        (str(call.skipped), "drafts skipped by the text", "the answer repeated itself, so the drafter was not asked"),
    ]


def answer(call: CallTrace, words: Words) -> list[dict[str, Any]]:
    """The answer's tokens: who proposed each (`target` for its own), and in which block (0: the prompt's pass)."""
    made = [_plain(call.first, words) | {"source": "target", "block": 0}]
    for number, block in enumerate(call.blocks, 1):
        kept = block.accepted
        for index, token in enumerate(block.committed):
            source = block.nodes[kept[index]].source if index < len(kept) else "target"
            made.append(_plain(token, words) | {"source": source, "block": number})
    return made


def _plain(token: int, words: Words) -> dict[str, Any]:
    return {"word": words(token), "breaks": words.breaks(token)}


def _block(number: int, block: BlockTrace, words: Words) -> dict[str, Any]:
    return {
        "number": number,
        "told": told(block, words),
        "committed": len(block.committed),
        "picture": picture(block, words),
        "drafted": bool(block.slots),
        "tree": _branch(block, 0, words),
    }


def _branch(block: BlockTrace, number: int, words: Words) -> dict[str, Any]:
    """A node and all below it."""
    node = block.nodes[number]
    below = [_branch(block, index, words) for index, other in enumerate(block.nodes) if other.parent == number]
    return {
        "word": words(node.token),
        "source": node.source,
        "chance": percent(node.chance),
        "kept": number in block.accepted,
        "anchor": number == 0,
        "said": words(node.said),
        "sure": percent(node.sure),
        "bonus": number == block.path[-1] and block.bonus is not None,
        "below": below,
    }


def _slot(each: SlotTally) -> dict[str, Any]:
    counts = {"accepted": each.accepted, **each.lost, "ended": each.ended}
    return {
        "slot": each.slot,
        "reached": each.reached,
        "counts": counts,
        "shares": {name: f"{100 * count / max(1, each.reached):.2f}" for name, count in counts.items() if count},
    }
