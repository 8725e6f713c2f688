"""An OpenAI-compatible chat server answering the prompts: vLLM, SGLang, `transformers serve` and their like."""

import json
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from .chat import Chat
from .decode import Answer, Decoding, Dialogue
from .messages import plain_call
from .prompts import Conversation
from .rows import is_text
from .tally import Unusable

REASONING = ("reasoning_content", "reasoning")  # where servers put their thinking


@dataclass(frozen=True)
class Endpoint:
    """Where the server is.

    Attributes:
        url: its base, up to `/v1`; model: the name it serves the target by. The key is read from `OPENAI_API_KEY`.
        concurrency: requests at a time; retries: of each, with growing pauses; timeout: of each, in seconds.
    """

    url: str
    model: str
    concurrency: int = 32
    retries: int = 8
    timeout: float = 600.0

    def validate(self) -> None:
        """Raise a `ValueError` of one sentence for a setting out of range."""
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"The endpoint is {self.url!r}, expected an address such as http://localhost:8000/v1.")
        if not self.model:
            raise ValueError("The endpoint needs the name of the model that it serves; add --model.")
        if self.concurrency < 1 or self.retries < 0 or self.timeout <= 0:
            raise ValueError("An endpoint needs a concurrency of 1 or more, retries of 0 or more, a timeout above 0.")


class EndpointAnswers:
    """Conversations answered by `endpoint`, several at a time, each turn by turn.

    Args:
        endpoint: the server; chat: the target's template, whose options the server is given too.
        decoding: how; `max_context` bounds what is asked for, otherwise the server's own limit holds.

    Raises:
        ValueError: without the `openai` package.
    """

    def __init__(self, endpoint: Endpoint, chat: Chat, decoding: Decoding) -> None:
        try:
            import openai
        except ModuleNotFoundError:
            raise ValueError("An endpoint needs the openai package: pip install 'lilicorr[data]'.") from None
        self.endpoint, self.chat, self.decoding, self.openai = endpoint, chat, decoding, openai
        self.reasoning_name = REASONING[0]
        self.client = openai.OpenAI(
            base_url=endpoint.url,
            api_key=os.environ.get("OPENAI_API_KEY") or "none",
            max_retries=endpoint.retries,
            timeout=endpoint.timeout,
        )

    def __call__(self, conversations: Iterable[Conversation]) -> Iterator[Dialogue]:
        """Every conversation once it is over, in the order in which the server gets done.

        Raises:
            ValueError: if the server cannot be reached, or refuses for another reason than what one prompt holds.
        """
        source, under_way = iter(conversations), set[Future[Dialogue]]()
        with ThreadPoolExecutor(self.endpoint.concurrency) as pool:
            try:
                while True:
                    while len(under_way) < 2 * self.endpoint.concurrency:
                        following = next(source, None)
                        if following is None:
                            break
                        under_way.add(pool.submit(self._converse, following))
                    if not under_way:
                        return
                    done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
                    for future in done:
                        yield future.result()
            finally:
                for future in under_way:
                    future.cancel()

    def _converse(self, conversation: Conversation) -> Dialogue:
        # A server's template reads the server's clock, so each conversation has its own time.
        now = datetime.now().replace(microsecond=0) if self.chat.reads_clock else None
        dialogue, chat = Dialogue(conversation, now=now), self.chat.at(now) if now else self.chat
        while dialogue.open:
            try:
                prompt = chat.prompt_ids(dialogue.context, conversation.tools)
                cap = self.decoding.max_new_tokens
                if self.decoding.max_context:
                    cap = min(cap, self.decoding.max_context - len(prompt))
                if cap < 1:
                    told = f"its prompt leaves no room in {self.decoding.max_context} tokens"
                    dialogue.give_up("a prompt that leaves no room for an answer", told)
                    break
                dialogue.add(self._ask(dialogue, sendable(chat, dialogue, self.reasoning_name), cap), prompt)
            except Unusable as problem:
                dialogue.give_up(problem.reason, str(problem))
            except (self.openai.BadRequestError, self.openai.UnprocessableEntityError) as error:
                dialogue.give_up("refused by the server", f"the server refuses it: {_said(error)}")
            except self.openai.OpenAIError as error:
                raise ValueError(
                    f"The endpoint {self.endpoint.url} failed on {conversation.id!r}: {_said(error)}; see to the "
                    "server and give the same command again."
                ) from error
        return dialogue

    def _ask(self, dialogue: Dialogue, messages: Any, cap: int) -> Answer:
        decoding, tools = self.decoding, dialogue.conversation.tools
        further: dict[str, Any] = {"chat_template_kwargs": self.chat.options} if self.chat.options else {}
        if decoding.top_k:
            further["top_k"] = decoding.top_k
        given: dict[str, Any] = {"tools": tools} if tools else {}
        reply = self.client.chat.completions.create(
            model=self.endpoint.model,
            messages=messages,
            max_tokens=cap,
            temperature=decoding.temperature,
            top_p=decoding.top_p,
            seed=decoding.seed_of(dialogue.conversation.id, len(dialogue.answers)) >> 32,
            extra_body=further,
            **given,
        )
        if not reply.choices:
            raise self.openai.OpenAIError("it replied without any choice")
        choice = reply.choices[0]
        thoughts = {name: getattr(choice.message, name, None) for name in REASONING}
        name = next((name for name, thought in thoughts.items() if is_text(thought) and thought), None)
        self.reasoning_name = name or self.reasoning_name
        calls = [plain_call("the server's answer", call.model_dump()) for call in choice.message.tool_calls or []]
        return Answer(
            (choice.message.content or "").encode("utf-8", "replace").decode("utf-8"),
            choice.finish_reason or "none",
            reply.usage.completion_tokens if reply.usage else 0,
            None,
            thoughts[name] if name else None,
            calls or None,
        )


def sendable(chat: Chat, dialogue: Dialogue, reasoning_name: str) -> list[dict[str, Any]]:
    """The context of the next answer as any OpenAI-compatible server takes it.

    Earlier thinking goes along only where the template prints it: inside the text if that renders alike, for strict
    servers refuse fields they do not know, else by `reasoning_name`.
    """
    tools = dialogue.conversation.tools

    def rendered(these: list[dict[str, Any]]) -> str:
        return chat.render(these, True, tools)

    bare = [{key: part for key, part in message.items() if key != "reasoning_content"} for message in dialogue.context]
    if rendered(bare) == rendered(dialogue.context):
        return [_wire(message) for message in chat.fit(bare)]
    inside = []
    for message, without in zip(dialogue.context, bare, strict=True):
        thought = message.get("reasoning_content")
        inside.append(
            without | ({"content": f"<think>\n{thought}\n</think>\n\n{message['content']}"} if thought else {})
        )
    if rendered(inside) == rendered(dialogue.context):
        return [_wire(message) for message in chat.fit(inside)]
    return [
        _wire(message) | ({reasoning_name: message["reasoning_content"]} if "reasoning_content" in message else {})
        for message in chat.fit(dialogue.context)
    ]


def _wire(message: dict[str, Any]) -> dict[str, Any]:
    """A message with the fields of OpenAI's protocol alone: of calls, `arguments` as a string."""
    made: dict[str, Any] = {key: message[key] for key in ("role", "content", "tool_call_id") if key in message}
    if "tool_calls" in message:
        calls = [(call, call["function"]) for call in message["tool_calls"]]
        made["content"] = message["content"] or None
        made["tool_calls"] = [
            {**call, "function": {**function, "arguments": _as_text(function)}} for call, function in calls
        ]
    return made


def _as_text(function: dict[str, Any]) -> str:
    arguments = function["arguments"]
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _said(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
