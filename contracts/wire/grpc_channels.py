"""How this cluster's processes call each other: the options of their gRPC channels and servers.

An environment's proxy knows nothing of loopback or of a cluster's hosts, so none is asked. A connection that was cut is
tried again within a second at most: gRPC's own back-off grows to two minutes, longer than any lease. Messages are
bounded on both sides by what the largest of each service needs.
"""

from __future__ import annotations

ChannelOptions = list[tuple[str, int]]

RECONNECT_FIRST_MS = 100
RECONNECT_MOST_MS = 1000
CONTROL_BYTES = 1024 * 1024
"""The largest call to the controller: a registration, or a heartbeat with its counters."""
TABLE_BYTES = 64 * 1024 * 1024
"""The largest table that the controller sends: a worker takes a few kilobytes of it."""
COMMANDS_BYTES = 64 * 1024 * 1024
"""The largest frame of commands to a worker: `shared_frames.FRAME_BYTES`, or one prompt of a whole context."""


EVENTS_BYTES = 256 * 1024 * 1024
"""The largest frame of events from a worker: long prompts have long scores."""
CONCURRENT_CALLS = 4096
"""Calls that one connection may have open at a server."""
METADATA_BYTES = 16 * 1024


def channel_options(send_bytes: int, receive_bytes: int, silence_s: float | None = None) -> ChannelOptions:
    """Options of a channel to a process of this cluster, with the largest messages it may carry.

    `silence_s`: a peer that says nothing for so long is gone.
    """
    options = [
        ("grpc.max_receive_message_length", receive_bytes),
        ("grpc.max_send_message_length", send_bytes),
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


def server_options(receive_bytes: int, send_bytes: int, silence_s: float) -> ChannelOptions:
    """Options of a server. A client that vanishes says nothing: it is gone after `silence_s`."""
    return [
        ("grpc.max_receive_message_length", receive_bytes),
        ("grpc.max_send_message_length", send_bytes),
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
        # What gRPC really waits for an answer is this, of which the one above is only the least: a minute by default.
        ("grpc.http2.ping_timeout_ms", half_ms),
        ("grpc.http2.max_pings_without_data", 0),
    ]
