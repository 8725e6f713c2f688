"""README and docs: links lead somewhere, code parses, and commands take the options that they are given."""

import ast
import re
import shlex
from pathlib import Path

import pytest
from lilicorr.cli import app
from typer.main import get_command

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text("utf-8"), re.MULTILINE | re.DOTALL)


def commands(text):
    """Every `lilicorr <verb> …` of a shell block, continued lines joined, comments left out."""
    lines = [line.split("  #")[0] for line in text.replace("\\\n", " ").splitlines()]
    found = [
        re.search(r"\blilicorr (\w.*)$", line) for line in lines if "pip install" not in line or "&& lilicorr" in line
    ]
    return [shlex.split(match[1], comments=True) for match in found if match]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    text = page.read_text("utf-8")
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if not link.startswith(("http://", "https://")):
            name, _, heading = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            assert target.exists(), link
            if heading:
                titles = re.findall(r"^#+ (.*)$", target.read_text("utf-8"), re.MULTILINE)
                assert heading in [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles], link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_blocks_parse(page):
    for block in blocks(page, "python"):
        ast.parse(block)


def test_commands_exist_and_take_their_options():
    verbs, seen = get_command(app).commands, 0
    for page in PAGES:
        for block in blocks(page, "bash"):
            for verb, *words in commands(block):
                known = {
                    option
                    for parameter in verbs[verb].params
                    for option in (*parameter.opts, *parameter.secondary_opts)
                }
                assert {word for word in words if word.startswith("--")} <= known, (page.name, verb, words)
                seen += 1
    assert seen > 8


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) < 150
