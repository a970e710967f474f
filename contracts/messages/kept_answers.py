"""Kept answers: what decode workers keep for clients that may come back to another router, and how it is asked for.

A request with an `AnswerName` isn't cancelled when its router's stream ends: its worker finishes it for nobody, within
`decode.kept_answer_s`, and keeps the tokens of answers that have ended. A router to which the client comes back sends
`Attach` to all decode workers. The requests that have the name are that router's from then on, and `Attached` says what
there is of them.
"""

from __future__ import annotations

from typing import Annotated

from twinpool.contracts.ids import RequestId
from twinpool.contracts.message_types import SOME, Finite, Message, TokenIds, Uint32, Uint64
from twinpool.contracts.sampling_params import TokenLogprobs


class AnswerName(Message, frozen=True):
    """The name under which one choice of an answer is kept."""

    key: str
    """Made from the client's key and its tenant (`router.service.idempotency_keys`)."""
    body: str
    """The hash of the endpoint and the body."""
    index: Uint32
    """The number of the choice among those of its HTTP request."""
    created: Uint64
    """When the answer was created, as its client was told: seconds since 1970."""
    cached_tokens: Uint32 | None = None
    """Prompt tokens that prefill found in its cache in an earlier attempt; None: no attempt has said so yet."""
    logprobs: TokenLogprobs = ()
    """Of the tokens that earlier attempts have emitted, where the client asked for them."""


class KeptAnswer(Message, frozen=True):
    """What a decode worker has of one choice."""

    request_id: RequestId
    attempt: Uint32
    index: Uint32
    created: Uint64
    prompt_len: Uint32
    max_tokens: Uint32
    left_s: Finite
    """Seconds until the request's deadline."""
    tokens: TokenIds = ()
    """The answer so far."""
    logprobs: TokenLogprobs = ()
    """One for each token where the client asked for them, else empty."""
    cached_tokens: Uint32 | None = None
    running: bool = False
    """Whether the worker goes on with it; all further tokens are sent to the router that asked."""
    started: bool = False
    """Whether its prompt's state is here. One that runs and hasn't started sends its first token itself."""
    reason: str = ""
    """Why the answer ended: ``stop`` or ``length``. Empty while it runs, and for one that was cut before its end, which
    can go on from its tokens."""
    stop_token: Uint32 | None = None
    adapter: str = ""
    """The digest of the adapter that it is computed with; empty: of none."""


class Detach(Message, frozen=True, tag="detach"):
    """The router gives up an attempt whose client is gone and may come back: its worker goes on with it for nobody. One
    without a name is cancelled."""

    request_id: RequestId
    attempt: Uint32


class Attach(Message, frozen=True, tag="attach"):
    """Hand over what is kept under this key to the router that asks. The worker answers `Attached`.

    What another router has is contested, and nothing is handed over before the router has asked again: so it has shown
    that it lives and that its client waits, after the other one got it. What a router asked before it died can come
    later than what its client asked of the next router.

    Routers that had one of the requests are told so by a `Done` with the error `ErrorKind.SUPERSEDED`.
    """

    request_id: RequestId
    """Names the question."""
    attempt: Uint32
    key: str
    body: str
    seen: Uint64 | None = None
    """The newest claim of another router of which the worker has told (`Attached.contested`); 0: of none. A claim that
    is newer isn't overruled. None: a router of a build that knows no contests overrules all."""


class Attached(Message, frozen=True, tag="attached"):
    """The answer to `Attach`."""

    request_id: RequestId
    """The name of the question."""
    attempt: Uint32
    other_body: bool = False
    """Whether the key belongs to another body; then nothing is handed over."""
    answers: Annotated[tuple[KeptAnswer, ...], SOME] = ()
    contested: Uint64 = 0
    """The newest claim of another router that has one of the requests; then nothing is handed over, and the question is
    open until it is asked again. 0: there is no such claim."""
