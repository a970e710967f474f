"""The choices of a request with a key: made anew, or restored from what a decode worker has kept."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from twinpool.contracts.errors import RequestError
from twinpool.contracts.ids import RequestId
from twinpool.contracts.messages.kept_answers import AnswerName
from twinpool.router.core.answer_lookups import FoundAnswer
from twinpool.router.openai.parse_request import GenerateRequest
from twinpool.router.openai.resume_headers import MAX_RESUMED_CHOICES, SEEN_HEADER, ResumeHeaders
from twinpool.router.security.answer_identity import AnswerIdentity
from twinpool.router.service.answer_claims import AnswerClaim
from twinpool.router.state.routed_request import RoutedRequest
from twinpool.router.tokenizer_pool.prepare_request import PreparedPrompt

HASHED_INLINE_BYTES = 1024**2
"""Bodies up to this size are hashed on the loop."""


@dataclass(frozen=True, slots=True)
class KeyedRequest:
    """A request with a key, once it is known what workers have kept of it."""

    identity: AnswerIdentity
    headers: ResumeHeaders
    claim: AnswerClaim
    created: int
    """When the answer was created, in seconds since 1970: as the worker or the client says, or now."""

    def new(self, routed: Sequence[RoutedRequest]) -> list[RoutedRequest]:
        """Return the choices of which nothing was found."""
        return [one for index, one in enumerate(routed) if index not in self.claim.found]

    def named(self, index: int, choice: RoutedRequest) -> RoutedRequest:
        """Return a choice as workers are to keep it: under a name and, where it was found, an id that they know."""
        name = None
        # What prefill says of a prompt's log-probabilities is nowhere kept: such an answer is computed again.
        if choice.sampling.prompt_logprobs is None:
            name = AnswerName(self.identity.key, self.identity.body, index, self.created)
        found, sampling, request_id = self.claim.found.get(index), choice.sampling, choice.id
        if found is not None:
            request_id, sampling = found.answer.request_id, replace(sampling, max_tokens=found.answer.max_tokens)
        made = RoutedRequest(
            request_id,
            choice.prompt,
            sampling,
            now=choice.arrived,
            deadline=choice.deadline if found is None else choice.arrived + found.answer.left_s,
            hashes=choice.hashes,
            salt=choice.salt,
            priority=choice.priority,
            first_token_by=choice.first_token_by if found is None else None,
            share=choice.share,
            session=choice.session,
            name=name,
        )
        if found is not None:
            made.arrived -= max(0.0, time.time() - self.created)
            made.restore(found.answer, found.last_attempt)
        return made


def check_headers(request: GenerateRequest, headers: ResumeHeaders) -> None:
    """Raise `RequestError` where the headers don't fit the request."""
    if headers.seen is not None and not request.stream:
        raise RequestError(f"{SEEN_HEADER} is for streams; without it the whole answer comes")
    if request.stream and request.choices > MAX_RESUMED_CHOICES:
        raise RequestError(
            f"a stream with an Idempotency-Key may have {MAX_RESUMED_CHOICES} choices; this has {request.choices}"
        )
    if headers.seen is not None and len(headers.seen.counts) != request.choices:
        raise RequestError(f"{SEEN_HEADER} must be the id of an event of this answer")


def usable(claim: AnswerClaim, request: GenerateRequest, prompts: Sequence[PreparedPrompt]) -> dict[int, FoundAnswer]:
    """Return what was found that fits the request; what doesn't is of another build, and of no use."""
    return {
        index: found
        for index, found in claim.found.items()
        if index < request.choices and found.answer.prompt_len == len(prompts[index // request.n].tokens)
    }


def request_ids(answer_id: str, nonce: str, index: int) -> RequestId:
    """The id of a choice among workers, which no other request has, whoever asks for the same answer elsewhere."""
    return RequestId(f"{answer_id}.{nonce}-{index}")
