"""Conversations as people have them, made alike: roles, tool calls, parts of content, ShareGPT's names.

Alike means: `role` is system, developer, user, assistant or tool; `content` is text; an assistant's `tool_calls` are
`{"id", "type": "function", "function": {"name", "arguments"}}` with `arguments` as JSON, and a tool's message names the
call it answers by `tool_call_id`. Templates read them so.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .rows import is_text
from .tally import Unusable

COLUMNS = ("messages", "conversations", "conversation", "prompt")
REASONING = ("reasoning_content", "reasoning", "thinking")  # where a message may hold its thinking
ROLES = {
    "system": "system", "developer": "developer", "user": "user", "human": "user", "assistant": "assistant",
    "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant", "model": "assistant",
    "function_call": "assistant", "tool": "tool", "observation": "tool", "function": "tool", "ipython": "tool",
    "function_response": "tool", "tool_response": "tool",
}  # fmt: skip
LIKE = 'each like {"role": "user", "content": "text"}'


@dataclass(frozen=True)
class Chatlog:
    """A row made alike: its id, its messages, and the tools' schemas (`None` without)."""

    id: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None


def chatlog(path: str | Path, row: Mapping[str, Any], column: str = "", answers: bool = True) -> Chatlog:
    """`row` of `path` made alike; without `id` it gets one that its content decides.

    `column` holds the messages, or the text of one user's; empty: the first of `COLUMNS` that the row has. Without
    `answers` an assistant's message that cannot be made alike is empty, and its `problem` says why.

    Raises:
        Unusable: if that cannot be done, naming file and row.
    """
    named = row.get("id") is not None
    where = f"{path}: row {row['id']!r}" if named else f"{path}: a row without id"
    if named and not is_text(str(row["id"])):
        raise Unusable("an id that is no text", f"{where} has an id that UTF-8 cannot hold; give it another.")
    column = column or next((known for known in COLUMNS if row.get(known)), COLUMNS[0])
    if column not in row:
        raise Unusable("no messages", f"{where} has no {column}, only {', '.join(row)}; name the column of messages.")
    messages = _messages(where, row[column] or [], column, answers)
    system = row.get("system")
    if is_text(system) and system and (not messages or messages[0]["role"] != "system"):
        messages.insert(0, {"role": "system", "content": system})
    tools = _tools(where, row.get("tools") or row.get("functions"))
    _name_calls(messages)
    return Chatlog(str(row["id"]) if named else _digest([messages, tools]), messages, tools)


def _digest(content: Any) -> str:
    """An id that `content` decides."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()[:16]


def is_answer(message: Mapping[str, Any]) -> bool:
    """Whether the target said it: an assistant's, and not one of weight 0, which is context alone."""
    return message.get("role") == "assistant" and message.get("weight") != 0


def _messages(where: str, value: Any, column: str, answers: bool) -> list[dict[str, Any]]:
    if isinstance(value, str) and column != "messages":
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise _no_message(where, value)
    made = []
    for message in value:
        try:
            made.append(_message(where, message))
        except Unusable as problem:
            name = message.get("role", message.get("from")) if isinstance(message, dict) else None
            if answers or ROLES.get(str(name).lower()) != "assistant":
                raise
            made.append({"role": "assistant", "content": "", "problem": problem})
    return made


def _no_message(where: str, message: Any) -> Unusable:
    said = f"{where} has a message {str(message)[:80]!r}, expected a list of messages, {LIKE}; fix or remove the row."
    return Unusable("a message that is no text", said)


def _message(where: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise _no_message(where, message)
    message = {key: value for key, value in message.items() if value is not None}  # tables fill in what others have
    name = message.get("role", message.get("from"))
    if not is_text(name):
        raise _no_message(where, message)
    role = ROLES.get(name.lower())
    if role is None:
        said = f"{where} has a message of role {name!r}, which is none of {', '.join(ROLES)}; remove the row."
        raise Unusable(f"a message of role {name!r}", said)
    content = message.get("content", message.get("value"))
    calls: Any = message.get("tool_calls") or message.get("function_call")
    if name.lower() == "function_call" and calls is None and (calls := _as_json(content)) is not None:
        content = None
    made: dict[str, Any] = {"role": role}
    if role == "assistant" and calls:
        made["tool_calls"] = [plain_call(where, call) for call in (calls if isinstance(calls, list) else [calls])]
    made["content"] = _text(where, message, content, role)
    for key in REASONING if role == "assistant" else ():
        if key in message:
            if not is_text(message[key]):
                raise _no_message(where, message)
            made["reasoning_content"] = message[key]
            break
    if role == "assistant" and message.get("weight") == 0:
        made["weight"] = 0
    for key in ("tool_call_id", "name"):
        if role == "tool" and is_text(message.get(key)):
            made[key] = message[key]
    return made


def _text(where: str, message: Any, content: Any, role: str) -> str:
    """A message's content as text: its parts' texts under each other, a tool's result as JSON."""
    if isinstance(content, list) and content and all(isinstance(part, (dict, str)) for part in content):
        kinds = [str(part.get("type", "text")) if isinstance(part, dict) else "text" for part in content]
        other = next((kind for kind in kinds if not kind.endswith("text")), None)
        if other and (role != "tool" or "type" in content[kinds.index(other)]):
            said = f"{where} has a part of type {other!r} in a message, of which only text can be used; remove the row."
            raise Unusable(f"a part of type {other!r}", said)
        texts = [part if isinstance(part, str) else part.get("text") for part in content]
        if all(map(is_text, texts)):
            return "\n".join(texts)
    if content is None and role == "assistant":
        return ""
    if role == "tool" and not isinstance(content, str) and content is not None:
        content = json.dumps(content, ensure_ascii=False)
    if not is_text(content):
        raise _no_message(where, message)
    return content


def _as_json(value: Any) -> Any:
    """The JSON object or array in `value`, or `None`."""
    if not isinstance(value, str):
        return value if isinstance(value, (dict, list)) else None
    try:
        found = json.loads(value)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, (dict, list)) else None


def plain_call(where: str, call: Any) -> dict[str, Any]:
    """A tool call made alike: arguments as JSON, if they are. Raises `Unusable` for one without a function's name."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not is_text(function.get("name")):
        said = f"{where} has a tool call {str(call)[:80]!r} without a function's name; fix or remove the row."
        raise Unusable("a tool call without a name", said)
    arguments = function.get("arguments", function.get("parameters", {}))
    parsed = _as_json(arguments)
    made = {"name": function["name"], "arguments": arguments if parsed is None else parsed}
    name = {"id": call["id"]} if is_text(call.get("id")) else {}
    made = {**name, "type": "function", "function": made}
    if not is_text(json.dumps(made, ensure_ascii=False)):
        raise _no_message(where, call)
    return made


def _name_calls(messages: Sequence[dict[str, Any]]) -> None:
    """Give calls without an id one of nine letters, as Mistral's templates want, and results that of their call."""
    open_calls: list[str] = []
    count = 0
    for message in messages:
        if message["role"] == "assistant":
            open_calls = []
            for call in message.get("tool_calls", ()):
                call.setdefault("id", f"call{count:05d}")
                count += 1
                open_calls.append(call["id"])
        elif message["role"] == "tool" and open_calls:
            if "tool_call_id" in message:
                open_calls = [name for name in open_calls if name != message["tool_call_id"]]
            else:
                message["tool_call_id"] = open_calls.pop(0)


def _tools(where: str, value: Any) -> list[dict[str, Any]] | None:
    """The schemas of tools, each as `{"type": "function", "function": …}`; `None` without."""
    if not value:
        return None
    found = _as_json(value)
    found = [found] if isinstance(found, dict) else found
    if not isinstance(found, list) or not all(isinstance(tool, dict) for tool in found):
        said = f"{where} has tools {str(value)[:80]!r}, expected a list of JSON schemas; fix or remove the row."
        raise Unusable("tools that are no schemas", said)
    if not is_text(json.dumps(found, ensure_ascii=False)):
        raise Unusable("tools that are no schemas", f"{where} has tools that UTF-8 cannot hold; fix the row.")
    return [
        tool if "function" in tool or "type" in tool else {"type": "function", "function": tool} for tool in found
    ] or None
