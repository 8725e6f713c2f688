import json

import pytest
from lilicorr.evaluation.sets import choose, load_sets


def write(folder, name, *rows):
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def user(text, **more):
    return {"messages": [{"role": "user", "content": text}], **more}


def test_sets_come_in_the_papers_order_with_ids_categories_and_turns(tmp_path):
    write(tmp_path, "zoo", user("z"))
    write(tmp_path, "mt-bench", {**user("a", id=7, category="writing", domain="chat")})
    turns = [("system", "s"), ("user", "first"), ("assistant", "x"), ("user", "second")]
    row = {"messages": [{"role": role, "content": text} for role, text in turns], "domain": "math"}
    plain = write(tmp_path / "..", "gsm8k", row)
    sets = load_sets([tmp_path, plain])
    assert list(sets) == ["gsm8k", "mt-bench", "zoo"]
    question = sets["gsm8k"][0]
    assert (question.system, question.turns, question.category, question.id) == ("s", ("first", "second"), "math", "1")
    assert (sets["mt-bench"][0].category, sets["mt-bench"][0].id) == ("writing", "7")
    assert sets["zoo"][0].category == "other"
    plain.unlink()


def test_one_set_or_all_by_name(tmp_path):
    write(tmp_path, "a", user("x"))
    write(tmp_path, "b", user("y"))
    assert list(load_sets([tmp_path], ["b"])) == ["b"]
    assert list(load_sets([tmp_path], ["all"])) == ["a", "b"]
    with pytest.raises(ValueError, match=r"no set 'c'.*choose all or some of a, b"):
        load_sets([tmp_path], ["a", "c"])
    with pytest.raises(ValueError, match="both hold the set 'a'"):
        load_sets([tmp_path, tmp_path / "a.jsonl"])


def test_a_key_follows_the_text(tmp_path):
    write(tmp_path, "a", user("x", id="1"))
    before = load_sets([tmp_path])["a"][0].key
    write(tmp_path, "a", user("y", id="1"))
    after = load_sets([tmp_path])["a"][0].key
    assert before != after and before.startswith("a/1/") and after.startswith("a/1/")


def test_ids_are_not_shared(tmp_path):
    write(tmp_path, "a", user("x", id="1"), user("y", id="1"))
    with pytest.raises(ValueError, match=r"a\.jsonl line 2 repeats the id '1'"):
        load_sets([tmp_path])


def test_fewer_questions_are_a_part_of_more_and_come_in_turn(tmp_path):
    write(tmp_path, "a", *(user(f"a{i}") for i in range(6)))
    write(tmp_path, "b", *(user(f"b{i}") for i in range(2)))
    sets = load_sets([tmp_path])
    everything = choose(sets, 0)
    assert len(everything) == 8 and choose(sets, 5) == everything[:5] and choose(sets, 99) == everything
    assert [question.set for question in everything[:5]] == ["a", "b", "a", "b", "a"]


@pytest.mark.parametrize("messages", [None, [], "text", [{"role": "user"}], [{"role": "user", "content": 5}], [3]])
def test_rows_without_a_user_turn_are_named(tmp_path, messages):
    write(tmp_path, "a", user("x"), {"messages": messages})
    with pytest.raises(ValueError, match=r"a\.jsonl line 2 is not a JSON object with messages and a user turn"):
        load_sets([tmp_path])
