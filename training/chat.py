"""A tokenizer's chat template: prompts as token ids, and which tokens of a conversation its assistant said."""

import hashlib
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase


@dataclass
class Turn:
    """One answer in the context it was given in: `prompt_ids` end with the generation prompt, then come `answer_ids`.

    `supervised` says of each of `answer_ids` whether the target said it; the rest was put in by the template.
    """

    prompt_ids: list[int]
    answer_ids: list[int]
    supervised: list[bool]


class Chat:
    """The chat template of `tokenizer` with `options` (such as `enable_thinking`) fixed.

    Raises:
        ValueError: if the tokenizer has no chat template, or an option is none of the template's.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, options: Mapping[str, Any] | None = None) -> None:
        self.tokenizer, self.options = tokenizer, dict(options or {})
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

    @property
    def digest(self) -> str:
        """SHA-256 of the template's text."""
        return hashlib.sha256(self.template.encode("utf-8")).hexdigest()

    def render(self, messages: Sequence[Mapping[str, Any]], answer_follows: bool = False) -> str:
        """The text of `messages`, with the generation prompt where an answer is to follow.

        Raises:
            ValueError: if the template refuses the messages.
        """
        options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": answer_follows, **self.options}
        try:
            text: Any = self.tokenizer.apply_chat_template([dict(message) for message in messages], **options)
        except (TemplateError, TypeError) as error:
            roles = ", ".join(str(message.get("role")) for message in messages)
            raise ValueError(
                f"The chat template refuses messages of {roles} with options {self.options}: {error}"
            ) from error
        return text

    def prompt_ids(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of `messages` with the generation prompt behind them."""
        return self._ids(self.render(messages, answer_follows=True))

    def turn(
        self, messages: Sequence[Mapping[str, Any]], output_ids: list[int] | None = None, finished: bool = True
    ) -> Turn | None:
        """The last of `messages`, an assistant's, as an answer to those before it.

        With `output_ids`, the answer's exact ids, they are the answer. Without, it is what the template renders behind
        the generation prompt, up to the end-of-turn token; supervised are the tokens of the template's
        `{% generation %}` spans where it has them, else those of the message's own text (and reasoning) and the
        end-of-turn token, which an answer that was not `finished` lacks.

        `None` if that cannot be told: the text does not go on from the prompt's, does not hold the message as it
        stands, or its ids do not begin with the prompt's.
        """
        prompt = self.render(messages[:-1], answer_follows=True)
        prompt_ids = self._ids(prompt)
        if output_ids is not None:
            return Turn(prompt_ids, output_ids, [True] * len(output_ids))
        whole = self.render(messages)
        if not whole.startswith(prompt):
            return None
        found = self._marked(messages) if self.marks_answers else self._found(whole, len(prompt), messages[-1])
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

    def _marked(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[int], list[bool]]:
        """Ids of the conversation, and whether each lies in a `{% generation %}` span (not behind its end of turn)."""
        options: dict[str, Any] = {"return_dict": True, "return_assistant_tokens_mask": True, **self.options}
        encoded: Any = self.tokenizer.apply_chat_template([dict(message) for message in messages], **options)
        ids, said = encoded["input_ids"], [bool(mark) for mark in encoded["assistant_masks"]]
        for place in range(len(ids) - 1, 0, -1):  # a line break behind the end of turn is the template's
            if (
                said[place]
                and ids[place] not in self._specials()
                and not str(self.tokenizer.decode(ids[place])).strip()
            ):
                said[place] = any(said[place + 1 :]) or ids[place - 1] not in self._specials()
        return ids, said

    def _found(self, whole: str, start: int, message: Mapping[str, Any]) -> tuple[list[int], list[bool]] | None:
        """Ids of `whole`, and whether each belongs to `message`, looked for from `start` on, or ends its turn."""
        reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
        thought = whole.find(reasoning.strip(), start)
        content = message["content"] if message["content"] in whole[start:] else message["content"].strip()
        begin = whole.find(content, thought + len(reasoning.strip()))
        if thought < 0 or begin < 0 or not content:
            return None
        end = begin + len(content)
        try:
            encoded = self.tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
        except NotImplementedError:
            raise ValueError(
                "Answers without output_ids need a fast tokenizer; regenerate them with `lilicorr regenerate`."
            ) from None
        ids, offsets = encoded["input_ids"], encoded["offset_mapping"]
        said = [left < end and right > (start if reasoning else begin) for left, right in offsets]
        for place, (left, _) in enumerate(offsets):
            if left >= end and ids[place] in self._specials():
                said[place] = True
                break
        return ids, said

    def _specials(self) -> set[int]:
        return {token for token, added in self.tokenizer.added_tokens_decoder.items() if added.special}
