"""An HTTP worker without a model, for benches of other projects' routers: a token every so often.

    python -m tests.support.stand_in_http --token-ms 20

It prints its port and serves `/v1/completions` until its standard input ends. Streams have one server-sent event a
token, as workers that such routers stand in front of send them.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import ClassVar, cast

import httptools
import uvloop

from bench.common.bench_report import flag_parser

_EVENT = (
    b'data: {"id":"c","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":" the",'
    b'"logprobs":null,"finish_reason":null}],"usage":null}\n\n'
)
_ANSWER = {
    "id": "c", "object": "text_completion", "created": 1, "model": "m",
    "choices": [{"index": 0, "text": " the", "logprobs": None, "finish_reason": "length"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
}  # fmt: skip
_OTHER = {
    "/v1/models": {"object": "list", "data": [{"id": "m", "object": "model", "owned_by": "x", "max_model_len": 4096}]},
    "/get_model_info": {"model_path": "m", "is_generation": True},
    "/model_info": {"model_path": "m", "is_generation": True},
    "/get_server_info": {"model_path": "m", "served_model_name": "m", "dp_size": 1, "tp_size": 1},
    "/server_info": {"model_path": "m", "served_model_name": "m", "dp_size": 1, "tp_size": 1},
}


class StandIn(asyncio.Protocol):
    """One connection."""

    streams: ClassVar[set[StandIn]] = set()
    """Connections with a stream under way; each gets its next token from `run`."""

    def __init__(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._path, self._body, self.left = b"", b"", 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are none by inheritance

    def connection_lost(self, exc: Exception | None) -> None:
        self.streams.discard(self)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self._path, self._body = url, b""

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        path = self._path.decode().partition("?")[0]
        if path != "/v1/completions":
            self._answer(_OTHER.get(path, {"status": "ok"}))
            return
        asked = json.loads(self._body)
        if not asked.get("stream"):
            self._answer(_ANSWER)
            return
        self.left = asked["max_tokens"]
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        self._transport.write(head)
        self.streams.add(self)

    def _answer(self, value: object) -> None:
        body = json.dumps(value).encode()
        head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
        self._transport.write(head + body)

    def token(self) -> None:
        """Send the next token, and the end after the last."""
        self.left -= 1
        self._transport.write(b"%x\r\n%b\r\n" % (len(_EVENT), _EVENT))
        if not self.left:
            self._transport.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
            self.streams.discard(self)


async def serve(token_s: float) -> None:
    server = await asyncio.get_running_loop().create_server(StandIn, "127.0.0.1", 0, backlog=2048)
    print(server.sockets[0].getsockname()[1], flush=True)
    reading = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    while not reading.done():
        await asyncio.sleep(token_s)
        for stream in list(StandIn.streams):
            stream.token()
    os._exit(0)


def main() -> None:
    parser = flag_parser(__doc__, json_file=False)
    parser.add_argument("--token-ms", type=float, default=20.0, help="between two tokens of a stream")
    uvloop.run(serve(parser.parse_args().token_ms / 1000))


if __name__ == "__main__":
    main()
