"""This machine's clock against the network's time and the ledger's server: certificates and keys end by it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from datetime import UTC, datetime

from twinpool.cluster.controller.open_ledger import ledger_access
from twinpool.cluster.doctor.doctor_case import DoctorCase
from twinpool.cluster.doctor.finding import Finding, fine, warning
from twinpool.contracts.config.ledger_place import on_server
from twinpool.contracts.errors import ConfigError

MAX_SKEW_S = 2.0
ASK_S = 1.0
_UNSYNCHRONISED = 5
"""What `adjtimex` returns where nothing keeps the clock (TIME_ERROR)."""
_TIMEX_BYTES = 512


def check_clock(case: DoctorCase) -> Iterator[Finding]:
    """Whether something keeps the clock, where others go by theirs; and how far the ledger's server is from it."""
    kept = _synchronised()
    skew = _skew(case)
    if skew is not None and abs(skew) > MAX_SKEW_S:
        yield warning(
            f"this clock is {abs(skew):.1f} s {'ahead of' if skew > 0 else 'behind'} that of the ledger's server",
            "have both kept by NTP (chronyd, systemd-timesyncd)",
            "leases go by durations and not by clocks; certificates, keys that end, and logs go by clocks",
        )
    elif case.several_hosts and kept is False:
        yield warning(
            "nothing keeps this machine's clock (the kernel says it isn't synchronised)",
            "run chronyd or systemd-timesyncd: certificates and keys end by each machine's own clock",
        )
    else:
        ledger = f"; {abs(skew):.2f} s from the ledger's server" if skew is not None else ""
        known = {True: "the clock is synchronised", False: "the clock is kept by nobody, and alone", None: "unknown"}
        yield fine(known[kept] + ledger)


def _synchronised() -> bool | None:
    """Whether the kernel says that the clock is synchronised; None where it doesn't say."""
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    return None if state < 0 else state != _UNSYNCHRONISED


def _skew(case: DoctorCase) -> float | None:
    """Seconds by which this clock is ahead of the ledger's server; None without one that answers."""
    place = case.config.cluster.ledger
    if not place or not on_server(place):
        return None
    try:
        import redis

        from twinpool.contracts.wire.redis_connection import open_redis

        client = open_redis(place, ASK_S, "cluster.ledger", ledger_access(case.config.security, case.host.environment))
    except (ImportError, ConfigError):
        return None
    try:
        before = case.host.now()
        seconds, micros = client.time()
        after = case.host.now()
    except (redis.RedisError, OSError):
        return None
    finally:
        client.close()
    there = datetime.fromtimestamp(int(seconds) + int(micros) / 1e6, UTC)
    return ((before - there) + (after - there)).total_seconds() / 2
