"""What frames between router and workers cost to encode and to decode, in one process without sockets.

    python -m bench frames

Each figure is the best of nine runs.
"""

from __future__ import annotations

import sys
import timeit
from collections.abc import Callable, Sequence

from rich.console import Console

from bench.common.bench_report import describe, figure_table, flag_parser, write_report
from twinpool.contracts.ids import Incarnation, RequestId, RoomId, WorkerName
from twinpool.contracts.messages.router_commands import PeerRef, Submit
from twinpool.contracts.messages.worker_events import Tokens
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.contracts.wire.stream_codec import FrameWriter, decode_commands, decode_events, encode_events

RUNS, CALLS = 9, 400
INCARNATION = Incarnation(3)


def best_us(call: Callable[[], object]) -> float:
    """Microseconds of one call."""
    return min(timeit.repeat(call, number=CALLS, repeat=RUNS)) / CALLS * 1e6


def steps(count: int) -> list[Tokens]:
    """The events of a step of `count` requests."""
    return [Tokens(RequestId(f"0123456789abcdef{n:04}-0"), 1, 500 + n, (n,)) for n in range(count)]


def submit(tokens: int) -> Submit:
    peer = PeerRef(WorkerName("decode-0"), INCARNATION, "tcp://10.0.0.7:40123")
    prompt = tuple(n * 37 % 150_000 for n in range(tokens))
    request = RequestId("0123456789abcdef0000-0")
    return Submit(request, 0, RoomId(f"{request}/7f"), prompt, tokens, SamplingParams(256, seed=2**63), peer)


def figures() -> dict[str, dict[str, float]]:
    """Bytes, and microseconds to encode and to decode, of each frame."""
    found = {}
    for count in (1, 32):
        events = steps(count)
        frame = encode_events(INCARNATION, events)
        assert decode_events(frame)[0].events == tuple(events)
        found[f"step of {count}"] = {
            "bytes": float(len(frame)),
            "encode_us": best_us(lambda events=events: encode_events(INCARNATION, events)),  # type: ignore[misc]
            "decode_us": best_us(lambda frame=frame: decode_events(frame)),  # type: ignore[misc]
        }
    command, writer = submit(1000), FrameWriter()
    (frame,) = writer.frames([command])
    assert decode_commands(frame) == ((command,), 0)
    found["submit of 1000 tokens"] = {
        "bytes": float(len(frame)),
        "encode_us": best_us(lambda: list(writer.frames([command]))),
        "decode_us": best_us(lambda: decode_commands(frame)),
    }
    return found


def main(argv: Sequence[str] | None = None) -> int:
    args = flag_parser(__doc__).parse_args(argv)
    found = figures()
    rows = [
        (name, f"{one['bytes']:.0f}", f"{one['encode_us']:.1f}", f"{one['decode_us']:.1f}")
        for name, one in found.items()
    ]
    Console().print(figure_table(str(describe()), ("frame", "bytes", "encode, µs", "decode, µs"), rows))
    write_report(args, frames=found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
