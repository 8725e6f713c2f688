import json
import sys

import pytest
from lilicorr.training.prompts import Source, read_conversations


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def said(*pairs, keys=("role", "content")):
    return [dict(zip(keys, pair, strict=True)) for pair in pairs]


def test_assistants_are_left_out_and_each_user_message_gets_a_turn(tmp_path):
    messages = said(("system", "s"), ("user", "a"), ("assistant", "x"), ("user", "b"), ("user", "c"))
    path = write(tmp_path / "p.jsonl", {"id": 1, "messages": messages, "source": "here"})
    (conversation,) = read_conversations(Source([path]))
    assert conversation.id == "1" and conversation.labels == {"source": "here", "domain": None}
    assert conversation.turns == [said(("system", "s"), ("user", "a")), said(("user", "b")), said(("user", "c"))]
    (first,) = read_conversations(Source([path], max_turns=1))
    assert first.turns == conversation.turns[:1]


def test_assistant_messages_without_text_do_no_harm(tmp_path):
    messages = [*said(("user", "a")), {"role": "assistant", "content": None, "reasoning": []}]
    (conversation,) = read_conversations(Source([write(tmp_path / "p.jsonl", {"id": "a", "messages": messages})]))
    assert conversation.turns == [said(("user", "a"))]


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"conversations": said(("human", "a"), ("gpt", "x"), keys=("from", "value"))}, ""),
        ({"prompt": "a"}, ""),
        ({"question": "a", "prompt": "b"}, "question"),
        ({"talk": said(("user", "a"))}, "talk"),
    ],
)
def test_other_columns_of_prompts(tmp_path, row, column):
    (conversation,) = read_conversations(Source([write(tmp_path / "p.jsonl", {"id": "a", **row})], column=column))
    assert conversation.turns == [said(("user", "a"))]


@pytest.mark.parametrize(
    ("row", "column", "message"),
    [
        ({"messages": said(("user", "a"), ("critic", "42"))}, "", "a message of role 'critic'"),
        ({"text": "a"}, "", "has no messages, only id, text; name the column"),
        ({"messages": "a"}, "", "has a message 'a', expected a list"),
        ({"prompt": 5}, "prompt", "has a message '5'"),
        ({"prompt": "a", "domain": {"x": "\ud800"}}, "", "has a domain"),
    ],
)
def test_rows_that_are_no_conversations_are_named(tmp_path, row, column, message):
    with pytest.raises(ValueError, match=rf"p\.jsonl: row 'odd' .*{message}|p\.jsonl: row 'odd' {message}"):
        read_conversations(Source([write(tmp_path / "p.jsonl", {"id": "odd", **row})], column=column))


def test_equal_rows_of_one_id_are_one_conversation(tmp_path):
    row = {"id": "a", "prompt": "x"}
    assert len(read_conversations(Source([write(tmp_path / "p.jsonl", row, row)]))) == 1


@pytest.mark.parametrize("limit", [0, 2])
def test_data_sets_are_read_and_their_rows_named(tmp_path, monkeypatch, limit):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "set").mkdir()
    write(tmp_path / "set" / "train.jsonl", *({"messages": said(("user", f"w{i}"))} for i in range(3)))
    found = read_conversations(Source([str(tmp_path / "set")], limit=limit))
    assert [conversation.id for conversation in found] == ["train-0", "train-1", "train-2"][: limit or 3]
    assert found[1].turns == [said(("user", "w1"))]
    with pytest.raises(ValueError, match="could not be loaded"):
        read_conversations(Source([str(tmp_path / "set")], split="absent"))


def test_data_sets_need_their_library_and_a_name(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"owner/name needs: pip install 'lilicorr\[data\]'"):
        read_conversations(Source(["owner/name"]))
    with pytest.raises(ValueError, match="neither a file nor a folder nor the name of a data set"):
        read_conversations(Source(["prompts"]))
    with pytest.raises(FileNotFoundError):
        read_conversations(Source([str(tmp_path / "absent.jsonl")]))
