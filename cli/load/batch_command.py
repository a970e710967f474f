"""The command `batch`: a file of requests is submitted, waited for, and its answers written."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinpool.cli.admin_client import ClusterNotFound, CommandRefused, choose, to_stderr
from twinpool.cli.command_parser import FINE, REFUSED, print_line
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.outside_data import read_json

if TYPE_CHECKING:
    import httpx

POLL_S, AWAY_S = 1.0, 120.0
"""Seconds between two looks at a batch, and for which a router may be away meanwhile."""
ENDED = ("completed", "failed", "expired", "cancelled")


def batch(args: argparse.Namespace) -> int:
    """Submit a file of requests, wait for the batch, and write its answers. Asked again it goes on with the batch that
    it has submitted, which it keeps beside the output."""
    output = args.output or args.file.with_name(f"{args.file.stem}.answers.jsonl")
    begun = output.with_name(f"{output.name}.batch")
    if output.is_dir() or not output.parent.is_dir():
        raise ConfigError(f"can't write {output}: it is a folder, or in none that there is")
    try:
        digest = hashlib.sha256(args.file.read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(f"can't read {args.file}: {error.strerror}") from None
    with _client(args.url, args.ca) as client:
        known = _begun(begun)
        if known.get("file") != digest or _ask(client, "GET", f"/v1/batches/{known['batch']}", may_lack=True) is None:
            known = {"file": digest, "batch": _submit(client, args.file, args.window)}
            begun.write_text(json.dumps(known))
        to_stderr(f"batch {known['batch']}; ended here it goes on, and the same command waits for it again")
        ended = _wait(client, known["batch"])
        for kind, path in (("output_file_id", output), ("error_file_id", output.with_name(f"{output.name}.errors"))):
            if ended[kind] is not None:
                _fetch(client, f"/v1/files/{ended[kind]}/content", path)
            else:
                path.unlink(missing_ok=True)
    begun.unlink()
    counts = ended["request_counts"]
    for problem in (ended["errors"] or {"data": []})["data"]:
        place = f"line {problem['line']}: " if problem["line"] else ""
        to_stderr(f"{place}{problem['message']} ({problem['code']})")
    print_line(
        f"{ended['status']}: {counts['completed']} of {counts['total']} answered, {counts['failed']} failed: {output}"
    )
    return FINE if ended["status"] == "completed" and not counts["failed"] else REFUSED


@contextmanager
def _client(url: str | None, ca: str) -> Iterator[httpx.Client]:
    import httpx

    chosen = choose(url, changes=False)
    to_stderr(chosen.line)
    key, verify = os.environ.get("TWINPOOL_API_KEY", ""), ca or os.environ.get("TWINPOOL_CA", "")
    verify = verify or (chosen.run.ca if chosen.run is not None else "")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(
        base_url=chosen.url.rstrip("/").removesuffix("/v1"),
        headers=headers,
        timeout=60.0,
        trust_env=False,
        verify=verify or True,
    ) as client:
        yield client


def _begun(path: Path) -> dict[str, str]:
    """What an earlier call has submitted; empty where there is none."""
    try:
        found = read_json(path.read_text())
    except (OSError, ValueError):
        return {}
    fits = isinstance(found, dict) and {"file", "batch"} <= found.keys() and str(found["batch"]).startswith("batch_")
    return found if fits else {}


def _ask(client: httpx.Client, method: str, path: str, *, may_lack: bool = False, **content: Any) -> Any:
    """Call the endpoint; `may_lack`: None where it has no such thing. Raises `CommandRefused`, `ClusterNotFound`."""
    import httpx

    try:
        answer = client.request(method, path, **content)
    except httpx.TransportError as error:
        raise ClusterNotFound(
            f"no router answers at {client.base_url} ({str(error) or type(error).__name__})"
        ) from None
    if answer.status_code == 404 and may_lack:
        return None
    if answer.status_code != 200:
        try:
            text = str(answer.json()["error"]["message"])
        except (ValueError, LookupError, TypeError):
            text = f"{method} {path} answered {answer.status_code}"
        away = answer.status_code >= 500 and answer.status_code != 507
        raise ClusterNotFound(text) if away else CommandRefused(text)
    return answer.json()


def _submit(client: httpx.Client, file: Path, window: str) -> str:
    """Upload the requests and make a batch of them; returns its id. Its endpoint is the first request's."""
    with file.open("rb") as source:
        first = next((line for line in source if line.strip()), b"")
        try:
            endpoint = read_json(first)["url"]
        except (ValueError, LookupError, TypeError):
            raise ConfigError(
                f"{file}: the first line must be a JSON object with custom_id, method, url and body"
            ) from None
        source.seek(0)
        form = {"file": (file.name, source, "application/jsonl")}
        uploaded = _ask(client, "POST", "/v1/files", files=form, data={"purpose": "batch"})
    body = {"input_file_id": uploaded["id"], "endpoint": endpoint, "completion_window": window}
    return str(_ask(client, "POST", "/v1/batches", json=body)["id"])


def _wait(client: httpx.Client, batch_id: str) -> dict[str, Any]:
    """Return the batch once it has ended. Raises `ClusterNotFound` where no router answers for `AWAY_S`."""
    heard_at = time.monotonic()
    with _progress() as show:
        while True:
            try:
                found: dict[str, Any] = _ask(client, "GET", f"/v1/batches/{batch_id}")
                heard_at = time.monotonic()
            except ClusterNotFound:
                if time.monotonic() - heard_at > AWAY_S:
                    raise
            else:
                counts = found["request_counts"]
                show(found["status"], counts["completed"] + counts["failed"], counts["total"])
                if found["status"] in ENDED:
                    return found
            time.sleep(POLL_S)


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], object]]:
    """Yield what shows a status, and how many requests of how many have an answer: as a bar on a terminal, else as a
    line for each tenth."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(file=sys.stderr)
    if not console.is_terminal:
        said: list[tuple[str, int]] = []

        def line(status: str, done: int, total: int) -> None:
            if (step := (status, 10 * done // max(1, total))) not in said:
                said.append(step)
                to_stderr(f"{status}: {done} of {total}")

        yield line
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("validating", total=None)
        yield lambda status, done, total: bar.update(task, description=status, completed=done, total=total or None)


def _fetch(client: httpx.Client, path: str, target: Path) -> None:
    """Write a file's content to `target`, as a whole or not at all. Raises `CommandRefused`, `ClusterNotFound`."""
    import httpx

    beside = target.with_name(f"{target.name}.part")
    try:
        with client.stream("GET", path) as answer, beside.open("wb") as out:
            if answer.status_code != 200:
                raise CommandRefused(f"GET {path} answered {answer.status_code}")
            for piece in answer.iter_bytes():
                out.write(piece)
        beside.rename(target)
    except httpx.TransportError as error:
        text = f"{client.base_url} went away while it sent {path} ({str(error) or type(error).__name__})"
        raise ClusterNotFound(f"{text}: the same command fetches it again") from None
    except OSError as error:
        raise CommandRefused(f"can't write {target}: {error.strerror}; the same command fetches it again") from None
    finally:
        beside.unlink(missing_ok=True)
