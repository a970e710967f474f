"""The choices of a client request, as the router core takes them and as the client is answered."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from twinpool.contracts.ids import RequestId
from twinpool.router.anthropic.messages_writer import MessagesWriter
from twinpool.router.openai.choice_output import ChoiceOutput
from twinpool.router.openai.parse_request import GenerateRequest
from twinpool.router.openai.response_stream import AnswerWriter, NumberedEvents, ResponseStream
from twinpool.router.openai.response_writer import ResponseWriter
from twinpool.router.openai_responses.responses_writer import ResponsesWriter
from twinpool.router.service.restored_choice import KeyedRequest, request_ids
from twinpool.router.state.prefill_queue import TenantWeight
from twinpool.router.state.routed_request import RoutedRequest
from twinpool.router.state.trace_context import NO_TRACE, TraceContext
from twinpool.router.text.tokenizer import ModelTokenizer
from twinpool.router.tokenizer_pool.prepare_request import PreparedPrompt


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """When a request came and until when it is of use, in seconds of the router's clock."""

    began: float
    timeout_s: float
    first_token_by: float | None
    """After which its prompt isn't begun any more; None: it may always be."""


@dataclass(frozen=True, slots=True)
class OpenedRequest:
    """A client request that was read, and that its tenant may ask."""

    id: str
    """Of its answer."""
    request: GenerateRequest
    prompts: Sequence[PreparedPrompt]
    limits: Sequence[int]
    """The most tokens of an answer, by prompt."""
    times: RequestTimes
    share: TenantWeight
    client_id: str
    keyed: KeyedRequest | None
    """What is known of its answer, where its client may come back; else None."""
    trace: TraceContext = NO_TRACE

    def routed(self, now: float, nonce: str) -> list[RoutedRequest]:
        """The choices, of which nothing is booked yet, as far as workers have kept those of a request with a key.
        `nonce`: what makes the ids of these unlike those at other routers."""
        choices, request = [], self.request
        for index in range(request.choices):
            prompt, limit = self.prompts[index // request.n], self.limits[index // request.n]
            sampling, number = request.sampling, index % request.n
            if (sampling.max_tokens, sampling.choice) != (limit, number):
                sampling = replace(sampling, max_tokens=limit, choice=number)
            if len(prompt.tokens) < 2 and sampling.prompt_logprobs is not None:
                sampling = replace(sampling, prompt_logprobs=None)  # A prompt's first token has no log-probability.
            routed = RoutedRequest(
                RequestId(f"{self.id}-{index}") if self.keyed is None else request_ids(self.id, nonce, index),
                prompt.tokens,
                sampling,
                now=now,
                deadline=self.times.began + self.times.timeout_s,
                hashes=prompt.hashes,
                salt=request.salt,
                priority=request.priority,
                first_token_by=self.times.first_token_by,
                share=self.share,
                session=request.session,
            )
            choices.append(routed if self.keyed is None else self.keyed.named(index, routed))
        return choices

    def stream(
        self, routed: Sequence[RoutedRequest], model: str, tokenizer: ModelTokenizer, buffered_events: int
    ) -> ResponseStream:
        """The answer to the client, and of each choice what turns its tokens into text."""
        request, keyed = self.request, self.keyed
        created = int(time.time()) if keyed is None else keyed.created
        numbered, key = None, ""
        if keyed is not None:
            numbered, key = NumberedEvents(created, request.choices, keyed.headers.seen), keyed.identity.key
        stream = ResponseStream(
            self.id,
            request,
            self._writer(created, model, tokenizer),
            buffered_events,
            self.client_id,
            self.times.timeout_s,
            self.share.tenant,
            numbered,
            key,
            self.trace,
        )
        choices = []
        for index, one in enumerate(routed):
            choice = ChoiceOutput(index, one, request, tokenizer, self.prompts[index // request.n].text)
            choice.tokenise_s = one.arrived - self.times.began
            choices.append(choice)
        stream.bind(choices)
        return stream

    def _writer(self, created: int, model: str, tokenizer: ModelTokenizer) -> AnswerWriter:
        match self.request.shape:
            case "anthropic":
                return MessagesWriter(self.id, model)
            case "responses":
                return ResponsesWriter(self.request, self.id, created, model)
            case _:
                return ResponseWriter(self.request, self.id, created, model, tokenizer)
