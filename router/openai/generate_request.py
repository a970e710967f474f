"""A checked generation request, as `router.openai.parse_request` makes it of a client's JSON body."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from twinpool.contracts.errors import RequestError
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.router.openai.chat_format import AnswerFormat
from twinpool.router.openai.tools import ToolUse

Prompt = str | tuple[int, ...]
ChatMessages = tuple[dict[str, Any], ...]
AnswerShape = Literal["openai", "anthropic", "responses"]
"""Whose answers an answer looks like: those of OpenAI's completions and chats, of Anthropic's Messages API, or of
OpenAI's Responses API."""


class UnknownModel(RequestError):
    """Raised when a request names a model that isn't served."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One HTTP request for text: a chat, or one or more prompts with `n` choices each.

    Without `max_tokens` a chat takes what is left of the context, a completion `router.default_max_tokens` of it.
    """

    chat: bool
    shape: AnswerShape
    repeated: str
    """The fields of the body that an answer in the shape ``responses`` repeats, as JSON; empty for others."""
    prompts: tuple[Prompt, ...]
    messages: ChatMessages
    template_args: dict[str, Any]
    tool_use: ToolUse | None
    """The tools that a chat may use."""
    tool_named: bool
    """Whether the request names the tool that a chat is to call."""
    answer_format: AnswerFormat | None
    """What is to be found in a chat's answers; known once its prompt is rendered."""
    separate_reasoning: bool
    add_generation_prompt: bool
    continue_final_message: bool
    truncate_prompt_tokens: int | None
    """How many tokens of a prompt are kept, the last; -1: as many as leave room for the answer; None: all."""
    n: int
    echo: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    tokens_as_ids: bool
    """Whether log-probabilities name tokens by their ids."""
    add_special_tokens: bool
    skip_special_tokens: bool
    stops: tuple[str, ...]
    include_stop: bool
    max_tokens: int | None
    logprobs: int | None
    sampling: SamplingParams
    """The sampling parameters of all choices; `max_tokens` and `choice` are set for each choice at admission."""
    seeded: bool
    """Whether the client gave the seed; else it is random."""
    grammar_field: str
    """The field that asks for `sampling.grammar`; empty where none does."""
    eos: frozenset[int]
    salt: str
    session: str
    """What the client names the conversation; empty where it doesn't."""
    priority: int
    timeout_s: float | None
    """Seconds from the request's arrival to its deadline; None takes the server's default."""
    ignored: tuple[str, ...] = ()
    """The fields of the body that have no effect, as `router.openai.request_fields` writes them."""

    @property
    def choices(self) -> int:
        """The number of answers; choice `i` is of prompt ``i // n``."""
        return len(self.prompts) * self.n if not self.chat else self.n
