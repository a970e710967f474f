"""Commands: the messages from a router to workers, as frozen values.

Each leg of a request gets one `Submit`; both are alike but for `peer`. How they travel between processes is said by
`contracts.message_types` and `contracts.messages.stream_frames`; in one process they are passed as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, structs

from twinpool.contracts.block_hash import in_vocabulary
from twinpool.contracts.ids import Incarnation, RequestId, RoomId, WorkerName
from twinpool.contracts.key_file import TENANT_CHARS
from twinpool.contracts.message_types import SOME, UNSIGNED, Finite, Int64, Message, TokenIds, Uint32
from twinpool.contracts.messages.kept_answers import AnswerName, Attach, Detach
from twinpool.contracts.sampling_params import SamplingParams


class PeerRef(Message, frozen=True):
    """The other leg's worker, as the router knows it."""

    name: WorkerName
    incarnation: Annotated[Incarnation, UNSIGNED]
    control: str
    """Endpoint of its control socket (``tcp://host:port`` or ``inproc://name``)."""


# ---------------------------------------------------------------- router -> worker


class Picture(Message, frozen=True):
    """A picture of a prompt, in whose tokens its positions have keys (`contracts.block_hash.picture_keys`)."""

    token: Uint32
    """The placeholder of the vocabulary that stands at its positions."""
    height: Uint32
    width: Uint32
    """In pixels, as it was resized for the model."""
    count: Uint32
    """How many positions it has."""
    pixels: bytes = b""
    """[height, width, 3] uint8, red, green, blue; empty for who computes no prompt."""
    across: Uint32 = 0
    """How many positions a row has, where positions are turned by rows and columns; 0: they aren't."""
    whole: bool = False
    """Whether its positions see each other, those behind them too, so that one step computes all of them."""


BACKGROUND = -1_000_000
"""Requests of this priority and below are background: they take what others leave."""


class Submit(Message, frozen=True, tag="submit"):
    """One leg of one attempt at one request."""

    request_id: RequestId
    attempt: Uint32
    """0 at first; a replay after a failure carries the next number, and the router drops events of older attempts."""
    room: RoomId
    tokens: TokenIds
    """The prompt, then the tokens that earlier attempts have already emitted."""
    prompt_len: Uint32
    """How many of `tokens` are the client's prompt; the rest are emitted tokens."""
    sampling: SamplingParams
    peer: PeerRef | None
    """The worker of the other leg; None when prefill alone can answer (``max_tokens`` leaves at most one token to
    draw)."""
    salt: str = ""
    """Part of the prefix key: requests with different salts share nothing."""
    deadline_s: Finite = 600.0
    """Seconds from the arrival at the worker after which the worker fails the request."""
    priority: Int64 = 0
    """Requests with a higher number are admitted first and retracted last; under ``cache.eviction=priority`` their
    state stays longer."""
    first_token_s: Finite = 0.0
    """Seconds from the arrival at the worker after which the prompt isn't begun any more; 0: it may always be."""
    migrating: bool = False
    """The request is paused on another decode worker until this one grants it: without room for it now it is
    refused."""
    tenant: Annotated[str, Meta(max_length=TENANT_CHARS)] = ""
    """Whose request it is; tenants have fair shares of a worker that not all can have at once. Empty: nobody's, where
    nobody needs a key."""
    weight: Uint32 = 1
    """The share that the tenant's requests have beside those of others."""
    name: AnswerName | None = None
    """The name under which its decode worker keeps it when its router is gone; None: it is cancelled then."""
    pictures: Annotated[tuple[Picture, ...], SOME] = ()
    """Those of `tokens`, in order."""

    def begin_by(self, now: float) -> float:
        """When the prompt of a request that arrives `now` isn't begun any more; infinite: it may always be."""
        return now + self.first_token_s if self.first_token_s else math.inf

    @property
    def background(self) -> bool:
        """Whether it gives way to every request that isn't."""
        return self.priority <= BACKGROUND

    @property
    def late(self) -> str:
        """Why the request ends where its prompt wasn't begun in time."""
        return f"its prompt could not be begun within {self.first_token_s:g} s, in which its first token was due"

    @property
    def emitted(self) -> tuple[int, ...]:
        return self.tokens[self.prompt_len :]

    @property
    def inputs(self) -> Sequence[int]:
        """`tokens` as the model takes them: with placeholders for keys of pictures."""
        return in_vocabulary(self.tokens, self.pictures[0].token) if self.pictures else self.tokens

    @property
    def max_len(self) -> int:
        """Positions that prompt and answer may take at most."""
        return self.prompt_len + self.sampling.max_tokens


def without_pixels(submit: Submit) -> Submit:
    """What a worker is told that doesn't compute the prompt."""
    if not submit.pictures:
        return submit
    return structs.replace(submit, pictures=tuple(structs.replace(one, pixels=b"") for one in submit.pictures))


class Cancel(Message, frozen=True, tag="cancel"):
    """The router takes an attempt back: the client left, a stop string matched, or the other leg failed."""

    request_id: RequestId
    attempt: Uint32
    keep: bool = False
    """Whether decode keeps the tokens of an answer with a name: it is whole."""


class PauseForMigration(Message, frozen=True, tag="pause_for_migration"):
    """Stop this request at its next token and hold its state for `peer`, which will fetch it as `room`.

    Decode answers `MigrationPaused`, or `MigrationUndone` where it can't migrate the request.
    """

    request_id: RequestId
    attempt: Uint32
    room: RoomId
    peer: PeerRef
    """The decode worker that takes over. Its control endpoint isn't needed, as that worker connects to this one."""


class ResumeHere(Message, frozen=True, tag="resume_here"):
    """A migration is taken back: go on with the request where it was paused. A request that isn't held ends in an
    error."""

    request_id: RequestId
    attempt: Uint32


class PushPrefix(Message, frozen=True, tag="push_prefix"):
    """Write the finished pages that the prefix cache has of these tokens to `peer`, which will ask for them as `room`.

    Decode answers `PushReady`. Running requests go on meanwhile.
    """

    request_id: RequestId
    """The running request whose pages they are, or the name of a `PrefixOffered`."""
    attempt: Uint32
    room: RoomId
    peer: PeerRef
    tokens: TokenIds = ()
    """Empty: the tokens of the running request."""
    salt: str = ""


class PullPrefix(Message, frozen=True, tag="pull_prefix"):
    """Receive the finished pages of these tokens from `peer` as `room`, for the prefix cache. Decode answers
    `PullDone`."""

    request_id: RequestId
    attempt: Uint32
    room: RoomId
    peer: PeerRef
    tokens: TokenIds
    salt: str = ""
    spare: bool = False
    """Take only free pages for them: evict nothing."""


class Audit(Message, frozen=True, tag="audit"):
    """Compute a finished answer again from its tokens alone, while the worker is idle. The worker answers `Audited`.

    No page of it is taken from the prefix cache or a tier, and none is kept. Any request that comes ends the audit
    (`AuditEnd.PREEMPTED`).
    """

    request_id: RequestId
    """Names the audit itself, not the request that is audited."""
    attempt: Uint32
    tokens: TokenIds
    """The prompt, then the whole answer."""
    prompt_len: Uint32
    sampling: SamplingParams


class InvalidatePrefix(Message, frozen=True, tag="invalidate_prefix"):
    """Invalidate this prefix in the prefix cache: an audit has shown that some of its state is wrong."""

    request_id: RequestId
    """The request whose answer was audited."""
    tokens: TokenIds
    salt: str = ""


MigrationCommand = PauseForMigration | ResumeHere | PushPrefix | PullPrefix
"""Commands about state that goes between decode workers."""
Command = Submit | Cancel | Detach | Attach | MigrationCommand | Audit | InvalidatePrefix
