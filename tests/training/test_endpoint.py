import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
from lilicorr.training.data import load_examples
from lilicorr.training.decode import Decoding
from lilicorr.training.endpoint import Endpoint
from lilicorr.training.manifest import Manifest
from lilicorr.training.prompts import Source
from lilicorr.training.regenerate import regenerate
from lilicorr.training.rows import read_jsonl
from lilicorr.training.tally import Tally
from transformers import AutoTokenizer

pytest.importorskip("openai")


@pytest.fixture
def server():
    """A chat server that answers "w<number of messages> w5"; `failures` are statuses to fail with, one a request."""
    state = SimpleNamespace(
        requests=[], failures=[], refused="w40", reasoning=None, finish="stop", url="", strict=False, answer={}
    )
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                state.requests.append((self.path, body))
                status = state.failures.pop(0) if state.failures else 200
            if body["messages"][-1]["content"] == state.refused:
                status = 400
            known = {"role", "content", "tool_calls", "tool_call_id"}
            if state.strict and any(message.keys() - known for message in body["messages"]):
                status = 422
            message = {"role": "assistant", "content": f"w{len(body['messages'])} w5"}
            if state.reasoning:
                message["reasoning_content"] = state.reasoning
            message |= state.answer
            reply = {
                "id": "x", "object": "chat.completion", "created": 0, "model": body["model"],
                "choices": [{"index": 0, "message": message, "finish_reason": state.finish}],
                "usage": {"prompt_tokens": 1, "completion_tokens": 3, "total_tokens": 4},
            }  # fmt: skip
            content = json.dumps(reply if status == 200 else {"error": {"message": f"status {status}"}}).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.send_header("retry-after-ms", "1")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        state.url = f"http://127.0.0.1:{running.server_port}/v1"
        yield state
        running.shutdown()
        thread.join()


def prompts(path, contents=("w1", "w2", "w3")):
    turns = [{"role": "user", "content": "w0"}]
    rows = [{"id": f"p{i}", "messages": [*turns, {"role": "user", "content": text}]} for i, text in enumerate(contents)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Source([str(path)])


def run(server, source, output, target_folder, decoding=None, options=None, **changes):
    endpoint = Endpoint(server.url, **({"model": "served", "concurrency": 2, "retries": 3} | changes))
    return regenerate(target_folder, source, str(output), decoding, options, endpoint=endpoint)


def test_a_server_answers_turn_by_turn(server, target_folder, tmp_path):
    output = tmp_path / "out.jsonl"
    decoding = Decoding(max_new_tokens=7, temperature=0.5, top_p=0.9, top_k=3)
    outcome = run(server, prompts(tmp_path / "p.jsonl"), output, target_folder, decoding, {"enable_thinking": False})
    assert (outcome.rows, outcome.turns, outcome.tokens, outcome.skipped) == (3, 6, 18, 0)
    assert len(server.requests) == 6 and {path for path, _ in server.requests} == {"/v1/chat/completions"}
    for _, body in server.requests:
        assert (body["model"], body["max_tokens"], body["temperature"], body["top_p"]) == ("served", 7, 0.5, 0.9)
        assert body["top_k"] == 3 and body["chat_template_kwargs"] == {"enable_thinking": False}
    seconds = [body["messages"] for _, body in server.requests if len(body["messages"]) == 3]
    assert all(messages[1] == {"role": "assistant", "content": "w1 w5"} for messages in seconds)
    assert len({body["seed"] for _, body in server.requests}) == 6
    for row in read_jsonl(output):
        assert [m["content"] for m in row["messages"]][1::2] == ["w1 w5", "w3 w5"]
        assert (row["finish_reason"], row["finished"], row["tokens"]) == ("stop", True, 6) and "output_ids" not in row
    manifest = Manifest.beside(output)
    assert manifest.revision is None and manifest.decoding["endpoint_model"] == "served"
    assert manifest.counts == {"rows": 3, "turns": 6, "tokens": 18, "finished": 1.0}
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    assert [sum(example.loss_mask) for example in load_examples([output], tokenizer, 64)] == [6, 6, 6]
    assert (
        run(server, prompts(tmp_path / "p.jsonl"), output, target_folder, decoding, {"enable_thinking": False}).rows
        == 0
    )
    assert len(server.requests) == 6


def test_requests_that_fail_are_sent_again(server, target_folder, tmp_path):
    server.failures = [503, 429, 500]
    assert run(server, prompts(tmp_path / "p.jsonl"), tmp_path / "out.jsonl", target_folder).rows == 3
    assert len(server.requests) == 9


def test_a_prompt_that_the_server_refuses_is_cut_short_and_the_rest_goes_on(server, target_folder, tmp_path):
    outcome = run(server, prompts(tmp_path / "p.jsonl", ("w1", "w40")), tmp_path / "out.jsonl", target_folder)
    assert (outcome.rows, outcome.turns, outcome.skipped) == (2, 3, 0)
    assert outcome.left_out.counts == {"refused by the server": 1} and outcome.cut == 1
    assert outcome.left_out.first.startswith("'p1': the server refuses it")
    refused = next(row for row in read_jsonl(tmp_path / "out.jsonl") if row["id"] == "p1")
    assert refused["finished"] is False and refused["stopped"].startswith("'p1': the server refuses it")
    server.refused = "w0"
    with pytest.raises(ValueError, match=r"None of 3 prompts could be answered; .* the server refuses it: .*400"):
        run(server, prompts(tmp_path / "p.jsonl"), tmp_path / "none.jsonl", target_folder)


@pytest.mark.parametrize("status", [401, 404, 500])
def test_a_server_that_fails_stops_the_run_and_keeps_what_is_done(server, target_folder, tmp_path, status):
    source, output = prompts(tmp_path / "p.jsonl"), tmp_path / "out.jsonl"
    server.failures = [200, 200, *[status] * 50]
    with pytest.raises(ValueError, match=f"failed on 'p1': .*{status}.*give the same command again"):
        run(server, source, output, target_folder, concurrency=1, retries=1)
    assert [row["id"] for row in read_jsonl(output)] == ["p0"]
    server.failures = []
    assert run(server, source, output, target_folder).rows == 2


def test_thinking_that_the_server_parts_off_is_kept_and_a_cut_answer_ends(server, target_folder, tmp_path):
    server.reasoning, server.finish = "w7 w8", "length"
    run(server, prompts(tmp_path / "p.jsonl"), tmp_path / "out.jsonl", target_folder)
    for row in read_jsonl(tmp_path / "out.jsonl"):
        assert [m["role"] for m in row["messages"]] == ["user", "assistant"]
        assert row["messages"][-1]["reasoning_content"] == "w7 w8"
        assert (row["finish_reason"], row["finished"]) == ("length", False)


def templated(target_folder, folder, template):
    """The target with another chat template."""
    shutil.copytree(target_folder, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return str(folder)


SPLITS = (  # as Qwen3's on its latest turns: thinking by its field, or inside the text
    "{% for m in messages %}{% set thought = m.reasoning_content or '' %}{% set text = m.content %}"
    "{% if '</think>' in text %}{% set thought = text.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{% set text = text.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
    "{{ m.role + ' : ' + (' w20 ' + thought + ' w21 ' if thought else '') + text + ' </s> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant : ' }}{% endif %}"
)
FIELD = (
    "{% for m in messages %}{{ m.role + ' : ' + (m.reasoning_content or '') + m.content + ' </s> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant : ' }}{% endif %}"
)


@pytest.mark.parametrize(("template", "sent"), [(None, "w1 w5"), (SPLITS, "<think>\nw7 w8\n</think>\n\nw1 w5")])
def test_a_strict_server_is_sent_thinking_in_the_text_where_the_template_wants_it(
    server, target_folder, tmp_path, template, sent
):
    server.strict, server.reasoning = True, "w7 w8"
    target = templated(target_folder, tmp_path / "t", template) if template else target_folder
    outcome = run(server, prompts(tmp_path / "p.jsonl"), tmp_path / "out.jsonl", target)
    assert (outcome.rows, outcome.turns, outcome.cut, outcome.left_out.total) == (3, 6, 0, 0)
    seconds = [body["messages"] for _, body in server.requests if len(body["messages"]) == 3]
    assert [messages[1] for messages in seconds] == [{"role": "assistant", "content": sent}] * 3
    for row in read_jsonl(tmp_path / "out.jsonl"):
        assert row["finished"] and [m.get("reasoning_content") for m in row["messages"][1::2]] == ["w7 w8"] * 2


def test_thinking_that_only_its_field_can_carry_goes_by_the_name_the_server_uses(server, target_folder, tmp_path):
    target = templated(target_folder, tmp_path / "t", FIELD)
    server.answer = {"reasoning": "w7 "}
    assert run(server, prompts(tmp_path / "p.jsonl"), tmp_path / "out.jsonl", target).turns == 6
    seconds = [body["messages"][1] for _, body in server.requests if len(body["messages"]) == 3]
    assert all(message == {"role": "assistant", "content": "w1 w5", "reasoning": "w7 "} for message in seconds)
    server.strict = True
    outcome = run(server, prompts(tmp_path / "p.jsonl"), tmp_path / "strict.jsonl", target)
    assert outcome.left_out.counts == {"refused by the server": 3} and outcome.cut == 3 and not outcome.skipped
    for row in read_jsonl(tmp_path / "strict.jsonl"):
        assert not row["finished"] and "422" in row["stopped"] and row["finish_reason"] == "stop"
    examples = load_examples([tmp_path / "strict.jsonl"], AutoTokenizer.from_pretrained(target), 64)
    assert [sum(example.loss_mask) for example in examples] == [4, 4, 4]  # the turn that was answered, with its end


CALL = {"id": "c", "type": "function", "function": {"name": "w45", "arguments": '{"x": "w46"}'}}
CALLS = (
    "{% for m in messages %}{{ m.role + ' : ' + m.content }}{% for call in m.tool_calls or [] %}"
    "{{ call.function.name + ' ' + call.function.arguments.x }}{% endfor %}{{ ' </s> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant : ' }}{% endif %}"
)


def test_a_tool_call_ends_its_conversation_and_is_trained_on(server, target_folder, tmp_path):
    server.answer, server.finish = {"content": None, "tool_calls": [CALL]}, "tool_calls"
    target = templated(target_folder, tmp_path / "t", CALLS)
    tools = [{"type": "function", "function": {"name": "w45"}}]
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"id": "a", "tools": tools, "messages": [{"role": "user", "content": "w1"}] * 2}))
    outcome = run(server, Source([str(path)]), tmp_path / "out.jsonl", target)
    assert (outcome.turns, outcome.cut, outcome.untrainable.total) == (1, 0, 0)
    assert [body["tools"] for _, body in server.requests] == [tools]
    (row,) = read_jsonl(tmp_path / "out.jsonl")
    said = row["messages"][-1]["tool_calls"][0]["function"]
    assert row["finished"] and row["tools"] == tools and said == {"name": "w45", "arguments": {"x": "w46"}}
    tokenizer = AutoTokenizer.from_pretrained(target)
    (example,) = load_examples([tmp_path / "out.jsonl"], tokenizer, 64)
    said_ids = [token for token, on in zip(example.input_ids, example.loss_mask, strict=True) if on]
    assert tokenizer.decode(said_ids) == "w45 w46 </s>"


def test_calls_and_results_are_sent_in_the_protocols_form(server, target_folder, tmp_path):
    path = tmp_path / "p.jsonl"
    talk = [("human", "w1"), ("function_call", '{"name": "w45", "arguments": {"x": "w46"}}'), ("observation", "w7")]
    path.write_text(json.dumps({"id": "a", "conversations": [{"from": name, "value": text} for name, text in talk]}))
    server.strict = True
    run(server, Source([str(path)]), tmp_path / "out.jsonl", templated(target_folder, tmp_path / "t", CALLS))
    ((_, body),) = server.requests
    call = CALL | {"id": "call00000"}
    assert body["messages"] == [
        {"role": "user", "content": "w1"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "w7", "tool_call_id": "call00000"},
    ]


@pytest.mark.parametrize(
    ("answer", "finish", "template", "reason"),
    [
        ({"content": None}, "stop", None, "an answer of which cannot be told which tokens the target said"),
        ({"content": None, "tool_calls": [CALL]}, "tool_calls", None, "the chat template knows no tool calls"),
        ({"content": None, "reasoning_content": "w7 w8"}, "length", None, "an answer of which cannot be told"),
        ({"content": None, "reasoning_content": "w7 w8"}, "length", FIELD, ""),  # thinking cut off is thinking said
        ({"content": None, "reasoning_content": "w7 w8"}, "stop", FIELD, ""),
    ],
)
def test_answers_that_training_will_leave_out_are_said_when_they_are_written(
    server, target_folder, tmp_path, answer, finish, template, reason
):
    server.answer, server.finish = answer, finish
    target = templated(target_folder, tmp_path / "t", template) if template else target_folder
    path, output = tmp_path / "p.jsonl", tmp_path / "out.jsonl"
    path.write_text('{"id": "a", "prompt": "w1"}')
    outcome = run(server, Source([str(path)]), output, target)
    tally, tokenizer = Tally(), AutoTokenizer.from_pretrained(target)
    if not reason:
        (example,) = load_examples([output], tokenizer, 64)
        assert not outcome.untrainable.total and sum(example.loss_mask) == (3 if finish == "stop" else 2)
        return
    with pytest.raises(ValueError, match="No usable answer"):
        load_examples([output], tokenizer, 64, tally=tally)
    assert outcome.rows == 1 and outcome.untrainable.counts == tally.counts
    (said,) = tally.counts
    assert said.startswith(reason)


def test_each_conversation_with_a_server_says_when_it_was(server, target_folder, tmp_path):
    target = templated(target_folder, tmp_path / "t", "{{ strftime_now('w%d') + ' ' }}" + FIELD)
    run(server, prompts(tmp_path / "p.jsonl"), tmp_path / "out.jsonl", target)
    output, tokenizer = tmp_path / "out.jsonl", AutoTokenizer.from_pretrained(target)
    rows = [row | {"now": "2031-05-17T11:30:00", "prompt_hashes": None} for row in read_jsonl(output)]
    output.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert all(tokenizer.decode(e.input_ids).startswith("w17 user") for e in load_examples([output], tokenizer, 64))


def test_a_context_too_long_is_not_asked_for(server, target_folder, tmp_path):
    decoding = Decoding(max_new_tokens=20, max_context=15)
    outcome = run(server, prompts(tmp_path / "p.jsonl"), tmp_path / "out.jsonl", target_folder, decoding)
    assert [body["max_tokens"] for _, body in server.requests] == [9, 9, 9]
    assert outcome.turns == 3 and "leaves no room in 15 tokens" in outcome.left_out.first


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"url": "localhost:8000"}, "expected an address"),
        ({"model": ""}, "add --model"),
        ({"concurrency": 0}, "1 or more"),
    ],
)
def test_wrong_endpoints_are_one_sentence(target_folder, tmp_path, changes, said):
    endpoint = Endpoint(**({"url": "http://localhost:1/v1", "model": "m"} | changes))
    with pytest.raises(ValueError, match=said):
        regenerate(target_folder, prompts(tmp_path / "p.jsonl"), str(tmp_path / "o.jsonl"), endpoint=endpoint)


def test_a_server_that_is_not_there_and_a_tokenizer_that_is_not_there_are_said(target_folder, tmp_path, monkeypatch):
    gone = SimpleNamespace(url="http://127.0.0.1:9/v1")
    with pytest.raises(ValueError, match=r"http://127\.0\.0\.1:9/v1 failed on 'p\d': Connection error"):
        run(gone, prompts(tmp_path / "p.jsonl"), tmp_path / "out.jsonl", target_folder, retries=0)
    with pytest.raises(ValueError, match=r"The tokenizer of .*absent could not be loaded"):
        run(gone, prompts(tmp_path / "p.jsonl"), tmp_path / "o.jsonl", str(tmp_path / "absent"))
