"""A generation request, checked: what the client asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from contracts.errors import RequestError
from contracts.sampling_params import SamplingParams

Prompt = str | tuple[int, ...]
ChatMessages = tuple[dict[str, Any], ...]


class UnknownModel(RequestError):
    """Raised when a request names a model that isn't served."""


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One HTTP request for text. `max_tokens` None: the default, bounded by the context."""

    chat: bool
    prompts: tuple[Prompt, ...]
    messages: ChatMessages
    template_args: dict[str, Any]
    add_generation_prompt: bool
    n: int
    echo: bool
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    add_special_tokens: bool
    skip_special_tokens: bool
    stops: tuple[str, ...]
    include_stop: bool
    max_tokens: int | None
    logprobs: int | None
    sampling: SamplingParams
    """With `max_tokens` and `choice` still to be set."""
    eos: frozenset[int]
    salt: str
    priority: int
    timeout_s: float | None
    """From its arrival; None: the server's default."""

    @property
    def choices(self) -> int:
        return len(self.prompts) * self.n if not self.chat else self.n
