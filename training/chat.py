"""A tokenizer's chat template: prompts as token ids, and which tokens of a conversation its assistant said."""

import copy
import hashlib
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from .tally import Unusable

UNSAID = datetime(2024, 7, 26)  # the clock where answers do not say when they were given
DIRECTIVES = "aAwdbBmyYHIMSfpjUWcxXGuVzZ"  # of strftime
# Stands before a template that reads the clock, whose `strftime_now` it takes the place of.
CLOCK = (
    "{% macro strftime_now(format) %}{% set said = namespace(text=format) %}"
    "{% for name, value in lilicorr_clock %}{% set said.text = said.text.replace(name, value) %}{% endfor %}"
    "{{ said.text }}{% endmacro %}\n"
)


@dataclass
class Turn:
    """One answer in the context it was given in: `prompt_ids` end with the generation prompt, then come `answer_ids`.

    `supervised` says of each of `answer_ids` whether the target said it; the rest was put in by the template.
    """

    prompt_ids: list[int]
    answer_ids: list[int]
    supervised: list[bool]


class Chat:
    """The chat template of `tokenizer` with all fixed that it reads beside the messages.

    Args:
        tokenizer: the target's.
        options: what the template is given, such as `enable_thinking`.
        now: what its clock shows, for templates that print the date.

    Raises:
        ValueError: if the tokenizer has no chat template, or an option is none of the template's.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        options: Mapping[str, Any] | None = None,
        now: datetime = UNSAID,
    ) -> None:
        self.tokenizer, self.options, self.now = tokenizer, dict(options or {}), now
        for name in inspect.signature(tokenizer.apply_chat_template).parameters:
            if name in self.options and name not in ("tools", "documents"):  # which the template is handed
                raise ValueError(
                    f"The template option {name!r} is an argument of Transformers' apply_chat_template and never "
                    "reaches the template; leave it out."
                )
        try:
            self.template = tokenizer.get_chat_template()
        except ValueError:
            raise ValueError(
                f"The tokenizer of {tokenizer.name_or_path} has no chat template; give an instruction-tuned target."
            ) from None
        self.marks_answers = re.search(r"\{%-?\s*generation\s*-?%\}", self.template) is not None
        self.reads_clock = "strftime_now" in self.template

    def at(self, now: datetime) -> "Chat":
        """The same template at another time."""
        other = copy.copy(self)
        other.now = now
        return other

    @property
    def digest(self) -> str:
        """SHA-256 of the template's text."""
        return hashlib.sha256(self.template.encode("utf-8")).hexdigest()

    def fit(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """`messages` as this template reads them: a developer is a system where it knows none, content is never null.

        Raises:
            Unusable: if they hold tool calls, of which it would print nothing.
        """
        fitting: list[dict[str, Any]] = []
        for message in messages:
            made = {key: value for key, value in message.items() if key != "weight"}
            made["content"] = made.get("content") or ""
            if made.get("tool_calls") and "tool_calls" not in self.template:
                raise Unusable(
                    "the chat template knows no tool calls",
                    "The chat template prints no tool calls, but an assistant's message holds some; leave the row out.",
                )
            if made["role"] == "developer" and "developer" not in self.template:
                made["role"] = "system"
                if fitting and fitting[-1]["role"] == "system":
                    fitting[-1]["content"] += "\n\n" + made["content"]
                    continue
            if "reasoning_content" in made:  # templates read it by one of these names
                made = {"reasoning": made["reasoning_content"], "thinking": made["reasoning_content"]} | made
            fitting.append(made)
        return fitting

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        answer_follows: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The text of `messages`, with the generation prompt where an answer is to follow.

        Raises:
            Unusable: if the template refuses the messages.
        """
        return self._applied(messages, tools, tokenize=False, add_generation_prompt=answer_follows)

    def _applied(self, messages: Sequence[Mapping[str, Any]], tools: Any, **settings: Any) -> Any:
        given: dict[str, Any] = {"tools": list(tools) if tools else None, **settings, **self.options}
        template = self.tokenizer.get_chat_template(tools=given["tools"])
        if self.reads_clock or "strftime_now" in template:
            given |= {"chat_template": CLOCK + template, "lilicorr_clock": _clock(self.now)}
        try:
            return self.tokenizer.apply_chat_template(self.fit(messages), **given)
        except (TemplateError, TypeError, ValueError) as error:  # what a template's own text can raise
            if isinstance(error, Unusable):
                raise
            roles = ", ".join(str(message.get("role")) for message in messages)
            said = f"The chat template refuses messages of {roles} with options {self.options}: {error}"
            raise Unusable("the chat template refuses it", said) from error

    def prompt_ids(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Token ids of `messages` with the generation prompt behind them."""
        return self._ids(self.render(messages, True, tools))

    def turn(
        self,
        messages: Sequence[Mapping[str, Any]],
        output_ids: list[int] | None = None,
        finished: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> Turn | None:
        """The last of `messages`, an assistant's, as an answer to those before it.

        With `output_ids`, the answer's exact ids, they are the answer. Without, it is what the template renders behind
        the generation prompt, up to the end-of-turn token; supervised are the tokens of the template's
        `{% generation %}` spans where it has them, else those of the message's own text (reasoning and tool calls
        too) and the end-of-turn token, which an answer that was not `finished` lacks.

        `None` if that cannot be told: the text does not go on from the prompt's, does not hold the message as it
        stands, or its ids do not begin with the prompt's.
        """
        prompt = self.render(messages[:-1], True, tools)
        prompt_ids = self._ids(prompt)
        if output_ids is not None:
            return Turn(prompt_ids, output_ids, [True] * len(output_ids))
        whole = self.render(messages, False, tools)
        if not whole.startswith(prompt):
            return None
        if self.marks_answers:
            found: tuple[list[int], list[bool]] | None = self._marked(messages, tools)
        else:
            found = self._found(whole, len(prompt), messages[-1], finished)
        if found is None:
            return None
        ids, said = found
        answer, said = ids[len(prompt_ids) :], said[len(prompt_ids) :]
        if ids[: len(prompt_ids)] != prompt_ids or True not in said:
            return None
        last = len(said) - said[::-1].index(True)
        if not finished and answer[last - 1] in self._specials():
            last -= 1
        return Turn(prompt_ids, answer[:last], said[:last])

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _marked(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> tuple[list[int], list[bool]]:
        """Ids of the conversation, and whether each lies in a `{% generation %}` span (not behind its end of turn)."""
        encoded = self._applied(messages, tools, return_dict=True, return_assistant_tokens_mask=True)
        ids, said = encoded["input_ids"], [bool(mark) for mark in encoded["assistant_masks"]]
        for place in range(len(ids) - 1, 0, -1):  # a line break behind the end of turn is the template's
            if (
                said[place]
                and ids[place] not in self._specials()
                and not str(self.tokenizer.decode(ids[place])).strip()
            ):
                said[place] = any(said[place + 1 :]) or ids[place - 1] not in self._specials()
        return ids, said

    def _found(
        self, whole: str, start: int, message: Mapping[str, Any], finished: bool
    ) -> tuple[list[int], list[bool]] | None:
        """Ids of `whole`, and whether each belongs to `message`, looked for from `start` on, or ends its turn."""
        reasoning = (message.get("reasoning_content") or message.get("reasoning") or "").strip()
        thought = whole.find(reasoning, start)
        content = message.get("content") or ""
        content = content if content in whole[start:] else content.strip()
        behind = thought + len(reasoning)
        begin = whole.find(content, behind)
        calls = message.get("tool_calls") or []
        if thought < 0 or begin < 0 or not (content or reasoning or calls):
            return None
        if any(call["function"]["name"] not in whole[begin:] for call in calls):
            return None
        try:
            encoded = self.tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
        except NotImplementedError:
            raise ValueError(
                "Answers without output_ids need a fast tokenizer; regenerate them with `lilicorr regenerate`."
            ) from None
        ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
        end = begin + len(content) if content else behind
        specials = [place for place, (left, _) in enumerate(offsets) if left >= end and ids[place] in self._specials()]
        if calls or (finished and not content):
            # Calls have no text of their own, and after thoughts alone comes the target's own mark of their end: all
            # that the template makes of the message is the target's, up to its end of turn.
            last = specials[-1] if specials else -1
            return (ids, [right > start and place <= last for place, (_, right) in enumerate(offsets)])
        said = [left < end and right > (start if reasoning else begin) for left, right in offsets]
        for place in specials[:1]:
            said[place] = True
        return ids, said

    def _specials(self) -> set[int]:
        return {token for token, added in self.tokenizer.added_tokens_decoder.items() if added.special}


def _clock(now: datetime) -> list[tuple[str, str]]:
    """What each directive of `strftime` stands for at `now`."""
    said = {"%%": "\0"} | {f"%{letter}": now.strftime(f"%{letter}") for letter in DIRECTIVES}
    said |= {f"%-{letter}": said[f"%{letter}"].lstrip("0") or "0" for letter in "dmyHIMSj"}
    said |= {"%e": f"{now.day:2}", "%F": now.strftime("%Y-%m-%d"), "%T": now.strftime("%H:%M:%S")}
    said |= {"%R": now.strftime("%H:%M"), "%D": now.strftime("%m/%d/%y"), "\0": "%"}
    return list(said.items())


def hash_of(prompt_ids: list[int]) -> str:
    """What tells one prompt's token ids from another's, in a row."""
    return hashlib.sha256(repr(prompt_ids).encode()).hexdigest()[:16]
