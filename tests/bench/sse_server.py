"""A server that answers as an OpenAI endpoint does, token by token, and misbehaves on request."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

WAYS = (
    "fine", "in one piece", "no done", "cut", "error event", "refused", "short", "not json", "reset", "plain", "silent",
)  # fmt: skip


class SseServer:
    """Serves on a free port of 127.0.0.1; `ways` are taken in turn, one a streamed request."""

    def __init__(self, *ways: str, begins: threading.Event | None = None, begins_at: int = 0) -> None:
        """`begins`: what streamed answers wait for; none: nothing, or with `begins_at` that so many are under way."""
        assert all(way in WAYS for way in ways)
        self.begins_at = begins_at
        if begins_at:
            begins = threading.Event()
        self.ways, self.begins = ways or ("fine",), begins
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[str] = []
        """Of streamed requests, as `bodies`."""
        self.other_heads: list[str] = []
        """Of all other requests."""
        self.port = 0
        self.running = 0
        self.max_running = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @contextmanager
    def serving(self) -> Iterator[SseServer]:
        """In a thread of its own, until the block ends."""
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        server = asyncio.run_coroutine_threadsafe(asyncio.start_server(self._connected, "127.0.0.1", 0), loop).result(
            60
        )
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            asyncio.run_coroutine_threadsafe(self._stop(server), loop).result(60)
            loop.call_soon_threadsafe(loop.stop)
            thread.join(60)
            loop.close()

    async def _stop(self, server: asyncio.Server) -> None:
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = next(
                (int(x.split(":")[1]) for x in head.split("\r\n") if x.lower().startswith("content-length")), 0
            )
            body = json.loads(await reader.readexactly(length)) if length else {}
            self.running += 1
            self.max_running = max(self.max_running, self.running)
            (self.heads if body.get("stream") else self.other_heads).append(head)
            await self._answer(head.split(" ")[1], body, reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self.running -= 1
            self._tasks.discard(task)
            writer.close()

    async def _answer(
        self, path: str, body: dict[str, Any], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        if path == "/v1/models":
            return self._plain(writer, 200, {"data": [{"id": "tiny", "max_model_len": 512}]})
        if not body.get("stream"):
            words = len(json.dumps(body).split())
            return self._plain(writer, 200, {"usage": {"prompt_tokens": 2 * words}})
        way = self.ways[len(self.bodies) % len(self.ways)]
        self.bodies.append(body)
        if self.begins is not None:
            if self.running == self.begins_at:
                self.begins.set()
            await asyncio.to_thread(self.begins.wait, 60)
        if way == "refused":
            return self._plain(writer, 429, {"error": {"message": "full"}})
        if way == "plain":
            return self._plain(writer, 200, {"choices": []})
        if way == "silent":
            await reader.read()  # until the client leaves
            return None
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        events = list(self._events(path, body, way))
        if way == "in one piece":
            # Chunk borders fall anywhere: in the middle of lines too.
            whole = "".join(events).encode()
            for at in range(0, len(whole), 37):
                self._chunk(writer, whole[at : at + 37])
        else:
            for event in events:
                self._chunk(writer, event.encode())
                await writer.drain()
        if way == "reset":
            writer.transport.abort()
            return None
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return None

    def _events(self, path: str, body: dict[str, Any], way: str) -> Iterator[str]:
        wanted = body.get("max_tokens") or body["max_completion_tokens"]
        chat = "chat" in path
        count = wanted - 1 if way == "short" else wanted
        if chat:
            yield _event({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
        for number in range(count):
            if number == count // 2 and way in ("cut", "reset"):
                return
            if number == count // 2 and way == "error event":
                yield _event({"error": {"type": "worker_died", "message": "gone"}})
                return
            if number == count // 2 and way == "not json":
                yield "data: {oops\n\n"
            choice: dict[str, Any] = {"delta": {"content": "é "}} if chat else {"text": "é "}
            if body.get("return_token_ids"):
                choice["token_ids"] = [number]
            reason = "length" if number == count - 1 else None
            yield _event({"choices": [{**choice, "finish_reason": reason}]})
        prompt = body.get("prompt") or body["messages"][0]["content"]
        tokens = len(prompt) if isinstance(prompt, list) else 2 * len(prompt.split())
        usage = {"prompt_tokens": tokens, "completion_tokens": count, "prompt_tokens_details": {"cached_tokens": 4}}
        yield ": a comment\n\n"
        yield _event({"choices": [], "usage": usage})
        if way != "no done":
            yield "data: [DONE]\n\n"

    @staticmethod
    def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    @staticmethod
    def _plain(writer: asyncio.StreamWriter, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
