"""An OpenAI-compatible chat server answering the prompts: vLLM, SGLang, `transformers serve` and their like."""

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from .chat import Chat
from .decode import Answer, Decoding, Dialogue
from .prompts import Conversation


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
        dialogue = Dialogue(conversation)
        while dialogue.open:
            cap = self.decoding.max_new_tokens
            if self.decoding.max_context:
                cap = min(cap, self.decoding.max_context - len(self.chat.prompt_ids(dialogue.context)))
            if cap < 1:
                dialogue.skipped = f"its prompt leaves no room in {self.decoding.max_context} tokens"
                break
            try:
                dialogue.add(self._ask(dialogue, cap))
            except (self.openai.BadRequestError, self.openai.UnprocessableEntityError) as error:
                dialogue.skipped = f"the server refuses it: {_said(error)}"
            except self.openai.OpenAIError as error:
                raise ValueError(
                    f"The endpoint {self.endpoint.url} failed on {conversation.id!r}: {_said(error)}; see to the "
                    "server and give the same command again."
                ) from error
        return dialogue

    def _ask(self, dialogue: Dialogue, cap: int) -> Answer:
        decoding = self.decoding
        further: dict[str, Any] = {"chat_template_kwargs": self.chat.options} if self.chat.options else {}
        if decoding.top_k:
            further["top_k"] = decoding.top_k
        messages: Any = dialogue.context
        reply = self.client.chat.completions.create(
            model=self.endpoint.model,
            messages=messages,
            max_tokens=cap,
            temperature=decoding.temperature,
            top_p=decoding.top_p,
            seed=decoding.seed_of(dialogue.conversation.id, len(dialogue.answers)) >> 32,
            extra_body=further,
        )
        if not reply.choices:
            raise self.openai.OpenAIError("it replied without any choice")
        choice = reply.choices[0]
        reasoning = getattr(choice.message, "reasoning_content", None) or getattr(choice.message, "reasoning", None)
        tokens = reply.usage.completion_tokens if reply.usage else 0
        return Answer(choice.message.content or "", choice.finish_reason or "none", tokens, None, reasoning)


def _said(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
