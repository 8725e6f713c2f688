"""`lilicorr explain` as a person calls it."""

import os
import subprocess
import sys
from xml.etree import ElementTree

import pytest
from lilicorr.cli import app
from typer.testing import CliRunner

FEW = ["--max-new-tokens", "24", "--dtype", "fp32", "--device", "cpu"]


def named(folders, head="lilicorr"):
    return ["explain", "--target", str(folders / "target"), "--drafter", str(folders / head)]


def test_it_prints_blocks_and_writes_a_page(tiny_folders, tmp_path):
    path = tmp_path / "new" / "page.html"
    arguments = [*named(tiny_folders), "--prompt", "abc <b>[red]", "--output", str(path), "--blocks", "2", *FEW]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert "24 tokens in" in said and "block 2 of" in said and "block 3 of" not in said
    assert "[walk]" in said and "where acceptance is lost" in said and "page in" in said
    root = ElementTree.fromstring(path.read_text("utf-8"))
    (tokens, *_) = root.findall(".//dl/div/dd/span[@class='number']")
    assert tokens.text == "24"
    prompt = "".join(root.find(".//details/p").itertext())
    assert "<" in prompt and [each.name for each in path.parent.iterdir()] == ["page.html"]


def test_nodes_and_the_texts_own_continuation_are_as_asked(tiny_folders, tmp_path):
    path = tmp_path / "page.html"
    options = ["--prompt", "abababab", "--nodes", "2", "--no-lookup", "--output", str(path), "--blocks", "0"]
    result = CliRunner().invoke(app, [*named(tiny_folders), *options, *FEW])
    assert result.exit_code == 0, result.output
    trees = ElementTree.fromstring(path.read_text("utf-8")).findall(".//section/ul[@class='tree']")
    assert trees and all(len(tree.findall(".//li")) <= 3 for tree in trees)
    assert not any("text" in "".join(tree.itertext()) for tree in trees)
    assert "continuation off" in path.read_text("utf-8") and "block 1 of" not in result.output


def test_a_page_that_cannot_be_written_is_said_at_once(tiny_folders, tmp_path):
    (tmp_path / "file").write_text("mine")
    for output in (tmp_path, tmp_path / "file" / "page.html"):
        result = CliRunner().invoke(app, [*named(tiny_folders), "--output", str(output)])
        assert result.exit_code == 1 and "cannot be written; name a file" in " ".join(result.output.split())
    assert (tmp_path / "file").read_text() == "mine"


def test_one_token_has_no_blocks(tiny_folders, tmp_path):
    path = tmp_path / "page.html"
    arguments = [*named(tiny_folders), "--prompt", "abc", "--max-new-tokens", "1", "--output", str(path)]
    result = CliRunner().invoke(app, [*arguments, "--device", "cpu"])
    assert result.exit_code == 0, result.output
    assert "1 token, which the prompt's own pass gave" in " ".join(result.output.split())
    assert ElementTree.fromstring(path.read_text("utf-8")).findall(".//section") == []


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "gbk"])
def test_it_prints_on_a_console_of_any_encoding(encoding, tiny_folders, tmp_path):
    arguments = [*named(tiny_folders), "--prompt", "abc ✓ 中", "--output", str(tmp_path / "page.html"), *FEW]
    settings = {"PYTHONIOENCODING": encoding, "PYTHONUTF8": "0", "COLUMNS": "100"}
    done = subprocess.run(
        [sys.executable, "-m", "lilicorr", *arguments], env=os.environ | settings, capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode(encoding)
    said = done.stdout.decode(encoding)
    assert "where acceptance is lost" in said and "block 3 of" in said
    assert "⏎" in (tmp_path / "page.html").read_text("utf-8")  # the page is UTF-8 all the same
