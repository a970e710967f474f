"""The version of the messages between routers and workers, and whether two builds can talk by it.

Most changes need none: fields and kinds of messages that the other side doesn't know are skipped
(`contracts.wire.stream_codec`). A change that makes an older side do something else than it was asked raises
`STREAM_PROTOCOL`; a build that can't talk to sides before a version raises `OLDEST`. Each side says its version when a
stream is opened, and refuses one that is too old for it, before anything is asked.

Version 1 was protobuf, 2 is msgpack.
"""

from __future__ import annotations

STREAM_PROTOCOL = 2
OLDEST = 2
"""The oldest version that this build can talk with."""
UNTOLD = 1
"""The version of builds that don't tell theirs."""


def refusal(who: str, told: int, build: str = "") -> str:
    """Why this build can't talk with `who`, which tells the version `told` (0: none), in words that say what to do;
    empty where it can. `build`: of the other side, where that is known."""
    version = told or UNTOLD
    if version >= OLDEST:
        return ""
    of = f" of build {build}" if build else ""
    return (
        f"{who}{of} speaks version {version} of the messages between routers and workers, and this build "
        f"{OLDEST} to {STREAM_PROTOCOL}: replace it by one of this build or of one that knows version {OLDEST}"
    )
