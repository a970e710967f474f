"""A cluster of one's own for the time of a bench."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from twinpool.cli.own_cluster import own_cluster


@contextmanager
def serving(model: str, settings: Sequence[str] = (), flags: Sequence[str] = ()) -> Iterator[str]:
    """`twinpool serve` on a free port, one worker of each role unless `flags` say more; yields its URL, and ends it.

    `settings` are ``section.key=value``. Raises `ClusterFailed` with what it said when it doesn't become ready.
    """
    with own_cluster(["--model", model, *flags, *(part for one in settings for part in ("--set", one))]) as url:
        yield url
