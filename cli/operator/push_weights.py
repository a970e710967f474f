"""A push of weights to a cluster, by the process that has them: a trainer's tensors, without a checkpoint on a disk.

They go as one safetensors file, whose header is made of names, dtypes and shapes. On the cluster's machine it can be
written into memory that both share; from elsewhere it goes over HTTP, tensor by tensor, so that no more than one is
copied at a time. What becomes of it there is in `contracts.checkpoint.pushed_weights`.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import http.client
import json
import os
import select
import shutil
import ssl
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urlsplit

from twinpool.contracts.checkpoint.pushed_weights import PushedFile
from twinpool.contracts.checkpoint.safetensors_headers import file_header
from twinpool.contracts.errors import TwinpoolError
from twinpool.contracts.outside_data import read_json

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["PushRefused", "push_weights"]

_DTYPES = {
    **{"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"},
    **{"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0"},
    **{"int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL"},
}
"""Dtypes of torch by the format's names."""
_PIECE = 1 << 20
_ANSWER_BYTES = 1 << 20


class PushRefused(TwinpoolError):
    """Raised where a cluster doesn't take weights, with its reason. Nothing was changed."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status
        """Of the HTTP answer; 0 where nothing was sent."""


def push_weights(
    url: str,
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    version: str = "",
    *,
    root: str | Path = "",
    partial: bool = False,
    rolling: bool = False,
    wait_s: float | None = None,
    wait: bool = True,
    model: str = "",
    api_key: str = "",
    ca: str = "",
    timeout_s: float = 3600.0,
) -> dict[str, Any]:
    """Change the weights of the cluster at `url` to these tensors, as `POST /v1/weights` does; returns what is served
    and how far the change is, as `GET /v1/weights` tells it.

    `tensors`: in the checkpoint's names, shapes and dtypes, as of `state_dict()`; of several names of one tensor the
    first counts. They must not change meanwhile. `root`: the first of `engine.weight_roots`, where that is in this
    machine's memory (below `/dev/shm`): tensors are written there; empty: they are sent over HTTP. `partial`: tensors
    that are missing stay as they are. `version`, `rolling`, `wait_s` and `wait` are as in `POST /v1/weights`. `model`:
    where the endpoint serves several. `api_key`: an operator's. `ca`: a file of certificates that the endpoint's is
    checked by; empty: the system's. `timeout_s`: seconds in which the cluster must take what is sent, and answer.

    Raises `PushRefused`; `CheckpointError` where `root` takes no more; `OSError` where the connection fails: then the
    change may have been made.
    """
    given = list(tensors.items()) if isinstance(tensors, Mapping) else list(tensors)
    file = _File(given)
    asked = {"version": version, "partial": partial, "rolling": rolling, "wait": wait}
    said = {key: value for key, value in asked.items() if value or key == "wait"}
    said |= {} if wait_s is None else {"wait_s": wait_s}
    connection = _PushConnection(url, api_key, ca, timeout_s)
    try:
        if not root:
            return connection.send_file(file, said, model)
        return _share(connection, file, Path(root).resolve(), said, model)
    finally:
        connection.close()


class _File:
    """A safetensors file of tensors that isn't written anywhere. Raises `PushRefused` for what it can't have."""

    def __init__(self, tensors: list[tuple[str, Tensor]]) -> None:
        self._tensors: list[Tensor] = []
        entries, seen = [], set[object]()
        for name, tensor in tensors:
            dtype = _DTYPES.get(str(tensor.dtype).removeprefix("torch."))
            if dtype is None:
                raise PushRefused(f"the tensor {name} is {tensor.dtype}, which safetensors files can't have")
            memory = tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()), dtype
            if tensor.numel() and memory in seen:
                continue
            seen.add(memory)
            entries.append((name, dtype, tuple(tensor.shape), tensor.numel() * tensor.element_size()))
            self._tensors.append(tensor)
        self.head = file_header(entries)
        self.nbytes = len(self.head) + sum(nbytes for *_, nbytes in entries)

    def pieces(self) -> Iterator[memoryview]:
        """Its bytes, from the first to the last."""
        import torch

        yield memoryview(self.head)
        for tensor in self._tensors:
            flat = tensor.detach().to("cpu").contiguous().reshape(-1)
            whole = flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")
            for at in range(0, len(whole), _PIECE):
                yield whole[at : at + _PIECE]


class _PushConnection:
    """The connection to a router by which weights are pushed."""

    def __init__(self, url: str, api_key: str, ca: str, timeout_s: float) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise PushRefused(f"weights are pushed to http://HOST:PORT; got {url!r}")
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._http: http.client.HTTPConnection
        if parts.scheme == "https":
            tls = ssl.create_default_context(cafile=ca or None)
            self._http = http.client.HTTPSConnection(parts.hostname, parts.port, timeout=timeout_s, context=tls)
        else:
            self._http = http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout_s)
        self._http.connect()

    def close(self) -> None:
        self._http.close()

    def send_file(self, file: _File, said: Mapping[str, object], model: str) -> dict[str, Any]:
        """Push a file over this connection."""
        digest = hashlib.sha256()
        for piece in file.pieces():
            digest.update(piece)
        query = {key: str(value).lower() if isinstance(value, bool) else value for key, value in said.items()}
        self._http.putrequest("POST", f"{self._path}/v1/weights/push?{urlencode(query | _named(model))}")
        for name, value in {
            **self._headers,
            "Content-Type": "application/octet-stream",
            "Content-Length": str(file.nbytes),
            "Content-Digest": f"sha-256=:{base64.b64encode(digest.digest()).decode()}:",
        }.items():
            self._http.putheader(name, value)
        self._http.endheaders()
        try:
            for piece in file.pieces():
                if select.select([self._http.sock], [], [], 0)[0]:
                    break  # It has answered, so it takes no more.
                self._http.send(piece)
        except (BrokenPipeError, ConnectionResetError):
            pass  # Why, its answer says.
        return self._answer()

    def send_path(self, path: Path, said: Mapping[str, object], model: str) -> dict[str, Any]:
        """Have it change to the weights in a folder."""
        body = json.dumps({"path": str(path), **said})
        query = f"?{urlencode(_named(model))}" if model else ""
        headers = {**self._headers, "Content-Type": "application/json"}
        self._http.request("POST", f"{self._path}/v1/weights{query}", body, headers)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        answer = self._http.getresponse()
        raw = answer.read(_ANSWER_BYTES)
        try:
            told = read_json(raw)
        except ValueError:
            told = None
        if answer.status not in (200, 202) or not isinstance(told, dict):
            error = told.get("error") if isinstance(told, dict) else None
            reason = error.get("message") if isinstance(error, dict) else None
            raise PushRefused(str(reason or f"the router answers {answer.status} {answer.reason}"), answer.status)
        return told


def _named(model: str) -> dict[str, object]:
    return {"model": model} if model else {}


def _share(
    connection: _PushConnection, file: _File, root: Path, said: Mapping[str, object], model: str
) -> dict[str, Any]:
    """Write a file into memory that the cluster shares, and have it change to that."""
    with PushedFile(root) as written:
        written.reserve(file.nbytes)
        for piece in file.pieces():
            written.write(piece)
        folder, held = written.keep()
    try:
        return connection.send_path(folder, said, model)
    except PushRefused:
        _remove_unheld(folder, held)
        raise
    finally:
        os.close(held)


def _remove_unheld(folder: Path, held: int) -> None:
    """Remove a folder that no router has taken; `held`: the descriptor by which this process locks it."""
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return
    shutil.rmtree(folder, ignore_errors=True)
