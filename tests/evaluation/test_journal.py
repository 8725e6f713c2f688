import json

import pytest
from lilicorr.evaluation.journal import Journal

SETTINGS = {"plan": {"seeds": (1, 2)}, "dtype": "float32"}


def test_rows_are_kept_and_found_again(tmp_path):
    path = tmp_path / "new" / "rows.jsonl"
    journal = Journal(path, SETTINGS)
    journal.add({"key": "a", "value": 1})
    assert Journal(path, SETTINGS).rows == journal.rows == {"a": {"key": "a", "value": 1}}


@pytest.mark.parametrize("torn", ['{"key": "b", "val', "\0" * 9, '{"key": "b"\0\0'])
def test_a_torn_last_line_is_cut_off(tmp_path, torn):
    path = tmp_path / "rows.jsonl"
    Journal(path, SETTINGS).add({"key": "a"})
    whole = path.read_bytes()
    path.write_bytes(whole + torn.encode())
    journal = Journal(path, SETTINGS)
    assert list(journal.rows) == ["a"] and path.read_bytes() == whole
    journal.add({"key": "b"})
    assert list(Journal(path, SETTINGS).rows) == ["a", "b"]


@pytest.mark.parametrize("lost", ["", "\0\0"])
def test_a_row_that_lost_only_its_line_break_is_kept(tmp_path, lost):
    path = tmp_path / "rows.jsonl"
    Journal(path, SETTINGS).add({"key": "a"})
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + lost.encode())
    assert list(Journal(path, SETTINGS).rows) == ["a"] and path.read_bytes() == whole


def test_a_torn_first_line_begins_anew(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"settings": {"pl')
    Journal(path, SETTINGS)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"settings": {"plan": {"seeds": [1, 2]}, "dtype": "float32"}}
    ]


def test_other_settings_are_named_and_nothing_is_touched(tmp_path):
    path = tmp_path / "rows.jsonl"
    Journal(path, SETTINGS).add({"key": "a"})
    before = path.read_bytes() + b'{"torn'
    path.write_bytes(before)
    with pytest.raises(ValueError, match=r"other settings \(plan\.seeds was \[1, 2\], is \[3\]\)"):
        Journal(path, SETTINGS | {"plan": {"seeds": [3]}})
    assert path.read_bytes() == before


@pytest.mark.parametrize("line", ["nonsense", "[1]", '{"no": "key"}'])
def test_a_broken_line_in_the_midst_is_named(tmp_path, line):
    path = tmp_path / "rows.jsonl"
    Journal(path, SETTINGS)
    path.write_text(path.read_text() + line + "\n" + '{"key": "a"}\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl line 2 is no row"):
        Journal(path, SETTINGS)


@pytest.mark.parametrize("content", ['{"step": 1}\n', '{"step": 1}', "my notes", '{"key": "a", "va', " "])
def test_a_file_of_something_else_is_refused_and_left_as_it_is(tmp_path, content):
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(ValueError, match="does not begin with the settings"):
        Journal(path, SETTINGS)
    assert path.read_text() == content
