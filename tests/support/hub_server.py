"""A Hugging Face Hub of one repository on loopback: the parts of its HTTP API that fetching a model takes."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class HubServer:
    """What the server has, and what it was asked for."""

    repository: str
    files: dict[str, bytes]
    url: str = ""
    revisions: tuple[str, ...] = ("main", "v1")
    gated: bool = False
    cut_at: int = 0
    """Bytes after which the next large file breaks off, once; 0: none does."""
    fetched: list[tuple[str, int]] = field(default_factory=list)
    """Files whose content was sent, each with the byte that it began at."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer

    def log_message(self, format: str, *args: object) -> None:
        """Nothing goes to the terminal."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        api, files = f"/api/models/{hub.repository}/", f"/{hub.repository}/resolve/"
        if path.startswith((api, files)) and hub.gated:
            return self._refuse(403, "GatedRepo")
        if path.startswith(api):
            kind, _, revision = path.removeprefix(api).partition("/")
            if revision not in (*hub.revisions, COMMIT):
                return self._refuse(404, "RevisionNotFound")
            if kind == "revision":
                return self._json({"id": hub.repository, "sha": COMMIT, "siblings": []})
            names = sorted(hub.files)
            return self._json(
                [{"type": "file", "path": n, "size": len(hub.files[n]), "oid": _tag(hub.files[n])} for n in names]
            )
        if path.startswith(files):
            _, _, name = path.removeprefix(files).partition("/")
            return self._file(name) if name in hub.files else self._refuse(404, "EntryNotFound")
        return self._refuse(404, "RepoNotFound")

    def _json(self, value: object) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def _refuse(self, code: int, reason: str) -> None:
        self.send_response(code)
        self.send_header("X-Error-Code", reason)
        self.send_header("X-Error-Message", reason)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _file(self, name: str) -> None:
        content = self.hub.files[name]
        begin = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
        self.send_response(206 if begin else 200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{_tag(content)}"')
        self.send_header("Content-Length", str(len(content) - begin))
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        self.hub.fetched.append((name, begin))
        cut = self.hub.cut_at
        if cut and len(content) > cut and not begin:
            self.wfile.write(content[:cut])
            self.close_connection = True
            return
        self.wfile.write(content[begin:])


def _tag(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@contextmanager
def hub_of(repository: str, folder: Path, *, more: dict[str, bytes] | None = None) -> Iterator[HubServer]:
    """Serve the files of `folder`, and `more`, as one repository."""
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    hub = HubServer(repository, files | (more or {}))
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(60)
