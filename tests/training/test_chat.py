"""What a chat template reads beside the messages stays what it was when the target answered."""

import json
import shutil
from datetime import datetime

import pytest
from lilicorr.training import regenerate as regenerate_module
from lilicorr.training.chat import UNSAID, Chat, hash_of
from lilicorr.training.data import load_examples
from lilicorr.training.decode import Decoding
from lilicorr.training.manifest import Manifest
from lilicorr.training.prompts import Source
from lilicorr.training.regenerate import regenerate
from lilicorr.training.rows import read_jsonl
from lilicorr.training.tally import Tally
from transformers import AutoTokenizer

# As Llama 3's and gpt-oss's: the date, printed at the top and inside a macro, blank lines and all.
DATED = """
{%- macro day() %}{{ strftime_now("w%-d") }}{% endmacro %}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("w%d w%-m w%-M") %}
    {%- else %}
        {%- set date_string = "w0" %}
    {%- endif %}
{%- endif %}
{{- 'user : ' + date_string + ' ' + day() + ' </s> ' }}
"""


class Calendar(datetime):
    """A clock that stands still where it is set."""

    shown = datetime(2031, 5, 17, 11, 30)

    @classmethod
    def now(cls, tz=None):
        return cls.shown


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(regenerate_module, "datetime", Calendar)
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Calendar)
    monkeypatch.setattr(Calendar, "shown", datetime(2031, 5, 17, 11, 30))
    return Calendar


@pytest.fixture
def dated_target(target_folder, tmp_path):
    folder = tmp_path / "dated"
    shutil.copytree(target_folder, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = DATED + tokenizer.chat_template
    tokenizer.save_pretrained(folder)
    return str(folder)


def answer(target, prompts, output, limit=0):
    return regenerate(target, Source([str(prompts)], limit=limit), str(output), Decoding(8), dtype="float32").rows


def test_a_fixed_clock_renders_what_transformers_renders_at_that_time(dated_target, clock):
    tokenizer, asked = AutoTokenizer.from_pretrained(dated_target), [{"role": "user", "content": "w1"}]
    plain = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    assert plain.startswith("user : w17 w5 w30 w17 </s> ")
    fixed = Chat(tokenizer, now=clock.shown)
    clock.shown = datetime(2032, 1, 2, 3)
    assert fixed.render(asked, answer_follows=True) == plain
    assert Chat(tokenizer, {"date_string": "w9"}, UNSAID).render(asked).startswith("user : w9 w26 </s> ")


@pytest.mark.parametrize(
    "form", ["%d %b %Y", "%A, %-d. %B %y %j", "%I:%M %p %H%S", "%F %T %D %R %e", "100%% %d%%d", ""]
)
def test_every_directive_reads_as_strftime_has_it(word_tokenizer, form):
    now = datetime(2025, 3, 4, 5, 6, 7)
    tokenizer = word_tokenizer("{{ strftime_now(messages[0].content) }}")
    assert Chat(tokenizer, now=now).render([{"role": "user", "content": form}]) == now.strftime(form)


def test_answers_are_trained_on_and_gone_on_with_on_the_day_they_were_begun(dated_target, prompt_file, tmp_path, clock):
    output, tokenizer = tmp_path / "o.jsonl", AutoTokenizer.from_pretrained(dated_target)
    assert answer(dated_target, prompt_file, output, limit=5) == 5
    assert Manifest.beside(output).now == "2031-05-17T11:30:00"
    before = load_examples([output], tokenizer, 64)
    clock.shown = datetime(2031, 5, 18, 9, 0)
    tally = Tally()
    later = load_examples([output], tokenizer, 64, tally=tally)
    assert later == before and not tally.total
    assert answer(dated_target, prompt_file, output) == 7
    for row in read_jsonl(output):
        prompt = Chat(tokenizer, now=datetime(2031, 5, 17, 11, 30)).prompt_ids(row["messages"][:-1])
        assert row["prompt_hashes"] == [hash_of(prompt)]
    assert all(
        tokenizer.decode(example.input_ids).startswith("user : w17 w5 w30 w17 </s>")
        for example in load_examples([output], tokenizer, 64)
    )


def test_answers_that_do_not_say_when_they_were_given_are_not_gone_on_with(dated_target, prompt_file, tmp_path, clock):
    output = tmp_path / "o.jsonl"
    answer(dated_target, prompt_file, output, limit=2)
    Manifest(**(vars(Manifest.beside(output)) | {"now": None})).save_beside(output)  # as older ones are
    with pytest.raises(ValueError, match="do not say when they were given, but the chat template prints the date"):
        answer(dated_target, prompt_file, output)
    tokenizer = AutoTokenizer.from_pretrained(dated_target)
    for row in (rows := list(read_jsonl(output))):
        del row["prompt_hashes"]
    output.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.warns(UserWarning, match=r"o\.jsonl does not say when .* taken to be 2024-07-26"):
        found = load_examples([output], tokenizer, 64)
    clock.shown = datetime(2040, 1, 1)
    with pytest.warns(UserWarning, match="does not say when"):  # the same day ever after: a run can be gone on with
        assert load_examples([output], tokenizer, 64) == found
    assert tokenizer.decode(found[0].input_ids).startswith("user : w26 w7 w0 w26 </s>")


def test_an_answer_whose_prompt_is_rendered_otherwise_now_is_left_out(target_folder, prompt_file, tmp_path):
    output = tmp_path / "o.jsonl"
    answer(target_folder, prompt_file, output, limit=2)
    first, second = read_jsonl(output)
    first["messages"][0]["content"] += " w1"
    output.write_text(json.dumps(first) + "\n" + json.dumps(second))
    tally = Tally()
    (kept,) = load_examples([output], AutoTokenizer.from_pretrained(target_folder), 64, tally=tally)
    assert kept.id == second["id"]
    assert tally.counts == {"an answer in a context that is rendered otherwise now": 1} and first["id"] in tally.first


def test_a_manifest_whose_date_is_none_is_one_sentence(tmp_path):
    Manifest("t", None, "0", now="yesterday").save_beside(tmp_path / "a.jsonl")
    with pytest.raises(ValueError, match="a now of 'yesterday', expected a date and time"):
        Manifest.beside(tmp_path / "a.jsonl")
