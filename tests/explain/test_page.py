"""The page: well-formed, complete, safe with any token, and without a wish for anything from outside."""

import base64
import hashlib
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from lilicorr.explain.page import page
from lilicorr.explain.picture import SHOWN, cells_of, edges_of
from lilicorr.explain.trace import CallTrace
from lilicorr.explain.words import Words

VOID = {"meta", "br", "wbr", "input", "rect", "path", "circle"}


class Balanced(HTMLParser):
    """Reads a page as browsers' parsers do, and keeps what it has."""

    def __init__(self):
        super().__init__()
        self.open, self.seen, self.attributes = [], [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def read(text):
    parser = Balanced()
    parser.feed(text)
    parser.close()
    assert parser.open == []
    return parser


def rows_of(root, place):
    return ["".join(each.itertext()).strip() for each in root.findall(place)]


@pytest.fixture
def call(made_up):
    return CallTrace((2, 3), 4, list(made_up.values()))


def test_it_is_well_formed_and_asks_for_nothing(call, hostile_call, letters):
    for traced in (call, hostile_call, CallTrace((2,), 4, [])):
        text = page(traced, letters, {"target": "a <target>", "drafter": "b & c"})
        ElementTree.fromstring(text)
        parsed = read(text)
        assert not {"link", "img", "iframe", "object", "embed", "base", "form"} & set(parsed.seen)
        assert not re.search(r"https?:|//[a-z]|url\(|@import|fetch\(|XMLHttpRequest|import\(", text.split("</head>")[0])
        for tag, name, value in parsed.attributes:
            assert not name.startswith("on") and name not in ("src", "srcset", "action", "poster"), (tag, name)
            assert name != "href" or re.fullmatch(r"#block-\d+", value)
        script = re.search(r"<script>(.*)</script>", text, re.S).group(1)
        allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        policy = next(value for _, name, value in parsed.attributes if name == "content" and "default-src" in value)
        assert policy.startswith("default-src 'none'") and f"script-src 'sha256-{allowed}'" in policy
        assert "http" not in text.replace("http-equiv", "")


def test_hostile_tokens_are_text(hostile_call, letters, hostile):
    text = page(hostile_call, letters, {"target": "</title><script>x</script>\x00"})
    parsed = read(text)
    assert parsed.seen.count("script") == parsed.seen.count("style") == 1
    root = ElementTree.fromstring(text)
    shown = " ".join(each.text or "" for each in root.iter() if "token" in each.get("class", "").split())
    for part in ("<script>alert(1)</script>", "</style><b>", '"\'·onclick="x', "]]>&amp;<!--", "{{·7·*·7·}}"):
        assert part in shown
    assert "⟦U+0000⟧⟦U+001B⟧[31m⟦U+000D⟧" in shown and "⟦U+202E⟧evil⟦U+2066⟧" in shown
    assert "⟦98⟧" in shown and "⟦U+D800⟧" in shown and "·⏎⇥" in shown
    text.encode("utf-8")


def test_a_call_is_all_there(call, letters):
    root = ElementTree.fromstring(page(call, letters, {"target": "tiny"}))
    assert rows_of(root, ".//dl/div/dd/span[@class='number']") == [
        str(len(call.tokens)), "13", f"{call.tokens_per_pass:.2f}", f"{call.accepted} of {call.proposed}", "1",
    ]  # fmt: skip
    sections = root.findall(".//section")
    assert [each.get("id") for each in sections] == [f"block-{n + 1}" for n in range(13)]
    for section, block in zip(sections, call.blocks, strict=True):
        tree = section.find("ul[@class='tree']")
        assert len(tree.findall(".//li")) == len(block.nodes)
        assert len(tree.findall(".//li[@class='kept']")) == 1 + len(block.accepted)
    answer = root.find(".//p[@class='tokens answer']")
    assert ["".join(each.itertext()) for each in answer if "token" in each.get("class", "")] == [
        f"t{token}" for token in call.tokens
    ]
    cells = rows_of(root, ".//tbody/tr/td")
    assert cells[:3] == ["12", "10", "1"]
    assert "tiny" in rows_of(root, ".//footer/dl/div/dd")


def test_the_picture_holds_what_the_block_had(made_up):
    block = made_up["not among the candidates"]
    cells = cells_of(block)
    assert {key for key, cell in cells.items() if "kept" in cell.kinds} == {(1, 11)}
    assert {key for key, cell in cells.items() if "walk" in cell.kinds} == {(1, 11), (2, 22), (3, 31)}
    assert cells[2, 77].kinds == {"bonus"} and cells[2, 77].rank == 0  # no candidate, and so below them all
    assert [cells[2, token].row for token in (21, 22, 23, 77)] == [0, 1, 2, 3]
    edges = edges_of(block)
    assert ("kept", (0, 1), (1, 11)) in edges and ("bonus", (1, 11), (2, 77)) in edges
    assert [(start, end) for kind, start, end in edges if kind == "walk"] == [
        ((0, 1), (1, 11)), ((1, 11), (2, 22)), ((2, 22), (3, 31)),
    ]  # fmt: skip


def test_candidates_far_down_are_shown_if_something_names_them(hostile_call, letters):
    block = hostile_call.blocks[0]
    assert len(block.slots[0].tokens) > SHOWN
    assert {(1, token) for token in block.slots[0].tokens} <= set(cells_of(block))  # all are nodes
    assert Words(letters)(99) == "·⏎⇥" and Words(letters).breaks(99)
