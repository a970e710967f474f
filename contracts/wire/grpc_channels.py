"""The options of the gRPC channels and servers by which the processes of a cluster call each other.

HTTP proxies of the environment are ignored, since they can't reach loopback or a cluster's hosts. A connection that was
cut is tried again within a second: gRPC's own back-off grows to two minutes, longer than any lease. The size of
messages is bounded on both sides: what is asked for is short, answers may have the whole table of workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

import grpc.aio

ChannelOptions = list[tuple[str, int]]
T = TypeVar("T")

RECONNECT_FIRST_MS = 100
RECONNECT_MOST_MS = 1000
CONTROL_BYTES = 1024 * 1024
"""Bytes of the largest message to a server: a worker's registration, or a heartbeat with its counters."""
TABLE_BYTES = 64 * 1024 * 1024
"""Bytes of the largest answer: the controller's table, of which each worker takes a few kilobytes."""
CONCURRENT_CALLS = 4096
"""The most calls that one connection may have open at a server."""
METADATA_BYTES = 16 * 1024


def channel_options(silence_s: float | None = None) -> ChannelOptions:
    """Options of a channel to a process of this cluster.

    `silence_s`: seconds without a sign of life after which the peer counts as gone; None: the channel sends no pings.
    """
    options = [
        ("grpc.max_receive_message_length", TABLE_BYTES),
        ("grpc.max_send_message_length", CONTROL_BYTES),
        ("grpc.max_metadata_size", METADATA_BYTES),
        ("grpc.enable_http_proxy", 0),
        ("grpc.initial_reconnect_backoff_ms", RECONNECT_FIRST_MS),
        # Also how long one attempt to connect may take.
        ("grpc.min_reconnect_backoff_ms", RECONNECT_MOST_MS),
        ("grpc.max_reconnect_backoff_ms", RECONNECT_MOST_MS),
        # Else a channel that is opened anew inherits the back-off of the one before.
        ("grpc.use_local_subchannel_pool", 1),
    ]
    return options if silence_s is None else [*options, *_pings(silence_s)]


def server_options(silence_s: float) -> ChannelOptions:
    """Options of a server. A client that is silent for `silence_s` seconds, pings included, counts as gone."""
    return [
        ("grpc.max_receive_message_length", CONTROL_BYTES),
        ("grpc.max_send_message_length", TABLE_BYTES),
        ("grpc.max_metadata_size", METADATA_BYTES),
        ("grpc.max_concurrent_streams", CONCURRENT_CALLS),
        ("grpc.so_reuseport", 0),
        ("grpc.http2.max_ping_strikes", 0),
        *_pings(silence_s),
    ]


def _pings(silence_s: float) -> ChannelOptions:
    half_ms = max(1, int(500 * silence_s))
    return [
        ("grpc.keepalive_time_ms", half_ms),
        ("grpc.keepalive_timeout_ms", half_ms),
        # gRPC waits for an answer for the longer of this (a minute by default) and the timeout above.
        ("grpc.http2.ping_timeout_ms", half_ms),
        ("grpc.http2.max_pings_without_data", 0),
    ]


async def reached(call: Awaitable[T]) -> T:
    """Await a call. Raises `ConnectionError` where it failed, also where the connection was closed under it: then
    grpc.aio cancels the call, which isn't a cancellation of whoever awaits it."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise ConnectionError(f"{error.code().name}: {error.details()}") from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise ConnectionError("the connection was closed") from None
