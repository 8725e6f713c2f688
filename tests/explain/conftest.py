"""Made-up blocks, and a tokenizer whose tokens are what a test needs them to be."""

import pytest
from lilicorr.explain.trace import BlockTrace, CallTrace, Node, Slot

HOSTILE = {
    90: "<script>alert(1)</script>",
    91: "</style><b>",
    92: '"\' onclick="x',
    93: "]]>&amp;<!--",
    94: "\x00\x1b[31m\r",
    95: "\u202eevil\u2066",
    96: "{{ 7 * 7 }}{% raw %}",
    97: "\ud800",
    98: "",
    99: " \n\t",
}


class Letters:
    """Token n is "tn", but for those of `HOSTILE`."""

    def decode(self, ids, **_):
        return "".join(HOSTILE.get(token, f"t{token}") for token in ids)


@pytest.fixture
def letters():
    return Letters()


@pytest.fixture
def hostile():
    return HOSTILE


def tree(anchor, *nodes):
    """Nodes of `(token, parent)` below `anchor`, all the drafter's unless a third says otherwise."""
    made = [Node(anchor, -1, 0, "", 1.0, 0, 0.5)]
    for token, parent, *source in nodes:
        made.append(Node(token, parent, made[parent].depth + 1, *(source or ["lattice"]), 0.5, 0, 0.5))
    return tuple(made)


def slot(*tokens, pick=0):
    return Slot(tokens, tuple(0.5 ** (rank + 1) for rank in range(len(tokens))), pick)


@pytest.fixture
def made_up():
    """A call whose blocks end in every way there is, by name."""
    lattice = (slot(11, 12, 13), slot(21, 22, 23, pick=1), slot(31, 32, 33))
    branches = tree(1, (11, 0), (21, 1), (12, 0), (22, 3))
    written = (11, 41, 42)

    def block(slots, nodes, path, committed, text=(), ended=False):
        return BlockTrace(slots, text, (0.9,) * len(text), nodes, path, committed, ended)

    return {
        "not among the candidates": block(lattice, branches, (0, 1), (11, 77)),
        "not chosen": block(lattice, branches, (0, 1), (11, 23)),
        "below a refused token": block(lattice, branches, (0, 1), (11, 22)),
        "at the very first slot": block(lattice, branches, (0,), (13,)),
        "where the tree stopped": block(lattice, branches, (0, 1, 2), (11, 21, 32)),
        "the text's token, not chosen": block(lattice, branches, (0, 1), (11, 41), text=written),
        "the text's token behind another path": block(lattice, branches, (0, 3), (12, 41), text=written),
        "only the text": block((), tree(1, (11, 0, "text"), (41, 1, "text")), (0, 1), (11, 5), text=written),
        "right to the last": block(lattice, tree(1, (11, 0), (21, 1), (31, 2)), (0, 1, 2, 3), (11, 21, 31, 8)),
        "nothing usable": block((slot(), slot(), slot()), tree(1), (0,), (6,)),
        "nothing proposed": block((), tree(1), (0,), (6,)),
        "ended by an accepted token": block(lattice, branches, (0,), (11,), ended=True),
        "ended by the target's": block(lattice, branches, (0, 1), (11, 9), ended=True),
    }


@pytest.fixture
def hostile_call():
    """Every hostile token as prompt, answer, candidate, node and what the target says."""
    ids = tuple(HOSTILE)
    nodes = [Node(ids[0], -1, 0, "", 1.0, ids[1], 0.5)]
    nodes += [
        Node(token, 0, 1, source, 0.1, ids[2], 0.5)
        for token, source in zip(ids, ["lattice", "text", "both"] * 4, strict=False)
    ]
    block = BlockTrace((slot(*ids, pick=3),), ids, (0.1,) * len(ids), tuple(nodes), (0, 1), (ids[0], ids[9]), False)
    return CallTrace(
        ids, ids[0], [block] + [BlockTrace((), (), (), (nodes[0],), (0,), (token,), False) for token in ids]
    )
