"""The frames of a router's stream to a worker, in the order in which they come.

The router opens with a `StreamOpening`. The worker answers with a `WorkerFrame` without events, or with one that has an
`end`, which says why not. Then `RouterFrame`s go one way, and a `WorkerFrame` for each step with events the other.

**The version of the messages** (`STREAM_PROTOCOL`). Most changes need none: fields and kinds of messages that the other
side doesn't know are skipped (`contracts.wire.message_codec`). A change that makes an older side do something else than
it was asked raises `STREAM_PROTOCOL`; a build that can't talk to sides before a version raises `OLDEST`. Each side says
its version when a stream is opened, and refuses one that is too old for it, before anything is asked. Version 1 was
protobuf, 2 is msgpack, and 3 has pictures, which are sent to no worker of an older build;
4 has adapters, 5 embeddings, 6 pictures whose positions are turned by axes or see each other, and 7 judgements of
pairs, of which the same is so; with 8 the weights of a cluster change; 9 has classes, and poolings besides the last
token's, and 10 the experts that tokens go to.
"""

from __future__ import annotations

from typing import Annotated, Generic, TypeVar

from twinpool.contracts.ids import Incarnation
from twinpool.contracts.message_types import SOME, UNSIGNED, Message, Uint32

MessageT = TypeVar("MessageT")
"""A `Command` or an `Event`; `msgspec.Raw` where each is encoded or decoded by itself."""


class StreamOpening(Message, frozen=True):
    """The first frame of a router, or of a worker that renews its lease; no later version moves `protocol`."""

    protocol: Uint32
    """The version of its messages: `stream_protocol` of a router's, `CALLS_VERSION` of a lease's."""
    incarnation: Annotated[Incarnation, UNSIGNED]
    """The incarnation of the worker that is meant."""
    access: str = ""
    """The cluster's token, where there is a secret."""


class RouterFrame(Message, Generic[MessageT], frozen=True):
    """Commands, in order."""

    commands: Annotated[tuple[MessageT, ...], SOME]


class StreamEnd(Message, frozen=True):
    """Why a stream has ended."""

    reason: str
    left: bool = False
    """Whether the worker has left in order: all that it had begun is done and handed over."""


class WorkerFrame(Message, Generic[MessageT], frozen=True):
    """The events of one step, in order."""

    incarnation: Annotated[Incarnation, UNSIGNED]
    """The worker's own."""
    events: Annotated[tuple[MessageT, ...], SOME] = ()
    end: StreamEnd | None = None
    """Why the worker ends the stream; in its last frame alone."""


STREAM_PROTOCOL = 10
PICTURES_SINCE, ADAPTERS_SINCE, EMBEDDINGS_SINCE, PLACES_SINCE, JUDGED_SINCE, WEIGHTS_SINCE = 3, 4, 5, 6, 7, 8
POOLINGS_SINCE, ROUTED_SINCE = 9, 10
"""The versions from which on a worker sees pictures, computes with `SamplingParams.adapter`, makes embeddings, heeds
`Picture.across` and `Picture.whole`, judges pairs, changes its weights, or says that it can't, pools otherwise than by
the last token, or tells the experts that tokens go to. An older one skips the field, and would answer without it, or
refuses the request. A router before `WEIGHTS_SINCE` would go on with an answer on other weights than those it began
with, so workers whose weights were changed refuse it."""
OLDEST = 2
"""The oldest version that this build can talk with."""
UNTOLD = 1
"""The version of builds that don't tell theirs."""


def refusal(who: str, told: int, build: str = "", oldest: int = OLDEST) -> str:
    """Why this build can't talk with `who`, which tells the version `told` (0: none), in words that say what to do;
    empty where it can. `build`: of the other side, where that is known. `oldest`: the oldest version that will do."""
    version = told or UNTOLD
    if version >= oldest:
        return ""
    of = f" of build {build}" if build else ""
    return (
        f"{who}{of} speaks version {version} of the messages between routers and workers, and this build "
        f"{oldest} to {STREAM_PROTOCOL}: replace it by one of this build or of one that knows version {oldest}"
    )
