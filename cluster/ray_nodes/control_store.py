"""Ray's control store (its GCS), kept alive for a Ray of our own whose tables are on a Valkey or Redis server.

With its tables in memory the store takes all of Ray with it when it dies. With them on a server it can be started again
as it was, and node daemon, actors and driver go on: they reconnect within `RECONNECT_S`. Calls of Ray wait meanwhile,
the supervisor's too, so that a thread starts the store again. Whoever starts Ray writes down what the store was started
with; a supervisor that comes later goes by that.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import subprocess
import threading
from collections import deque
from pathlib import Path
from urllib.parse import unquote, urlsplit

from twinpool.cluster.processes.process_ids import same_process, start_time
from twinpool.cluster.processes.restart_policy import RestartHistory
from twinpool.contracts.clock import Clock, SystemClock
from twinpool.contracts.config.ledger_place import check_ray_storage, without_password
from twinpool.contracts.errors import ConfigError

log = logging.getLogger("twinpool.ray")

RECONNECT_S = 600
"""Seconds for which node daemons, workers and drivers of a Ray wait for its control store before they end."""
STORE_FILE = "ray-control-store.json"
CLOSE_S = 5.0
"""Seconds that the thread has to end in: it may be starting the store."""
TIMEOUT_S = 5.0
"""Seconds for which the server may be silent when tables are removed."""
LOOK_S = 0.1
"""Seconds between two looks at the store's process."""
LISTENS_S = 30.0
"""How long a store that was started again may take to read its tables and listen."""


class StoredTables:
    """Where a Ray of our own keeps its tables (`cluster.ray_storage`): settings of `ray start`."""

    def __init__(self, url: str, namespace: str) -> None:
        """`namespace`: of this Ray among those that keep their tables there. Raises `ConfigError` for another URL."""
        check_ray_storage(url)
        parts = urlsplit(url)
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
        address = f"{host}:{parts.port or 6379}"
        self.environment = {
            "RAY_REDIS_ADDRESS": f"rediss://{address}" if parts.scheme == "rediss" else address,
            "RAY_external_storage_namespace": namespace,
        }
        self._url, self._keys = url, f"RAY{namespace}@*"
        user, password = unquote(parts.username or ""), unquote(parts.password or "")
        self.options = [
            *((f"--redis-username={user}",) if user else ()),
            *((f"--redis-password={password}",) if password else ()),
        ]

    def forget(self) -> None:
        """Remove this Ray's tables, because nothing of it runs. Raises `ConfigError` where the server can't be used."""
        try:
            import redis

            from twinpool.contracts.wire.redis_connection import open_redis
        except ImportError:
            raise ConfigError("cluster.ray_storage needs the package redis: pip install 'twinpool[redis]'") from None
        client = open_redis(self._url, TIMEOUT_S, "cluster.ray_storage")
        try:
            for key in list(client.scan_iter(self._keys, count=1000)):
                client.unlink(key)
        except redis.RedisError as error:
            raise ConfigError(f"cluster.ray_storage={without_password(self._url)} can't be used: {error}") from None
        finally:
            client.close()


def write_down(folder: Path, pid: int) -> None:
    """Keep what the store's process was started with, for its owner alone: it has the server's password."""
    import psutil

    process = psutil.Process(pid)
    tree = {"command": process.cmdline(), "environment": process.environ()}
    path = folder / STORE_FILE
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(tree, file)


def start_again(folder: Path) -> subprocess.Popen[bytes]:
    """Start the control store of the Ray below `folder` as it was started first. Raises `OSError`."""
    tree = json.loads((folder / STORE_FILE).read_text())
    return subprocess.Popen(
        tree["command"],
        env=tree["environment"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def outlives_its_store(folder: Path) -> bool:
    """Whether the store of the Ray below `folder` can be started again."""
    return (folder / STORE_FILE).exists()


class KeptControlStore:
    """The store's process, started again in a thread of its own whenever it ends."""

    def __init__(
        self, folder: Path, process: tuple[int, int] | None, restarts: RestartHistory, clock: Clock | None = None
    ) -> None:
        """`process`: pid and start time of the one that runs; None where none does, and it is started at once."""
        self._folder, self._clock, self._restarts = folder, clock or SystemClock(), restarts
        self._process, self._since = process, self._clock.now()
        self._child: subprocess.Popen[bytes] | None = None
        self._news: deque[str] = deque(maxlen=64)
        self._ended = threading.Event()
        self.restarted_at: float | None = None
        """When the store was started again last, by the clock; None while it never was."""
        self.failed = ""
        """Why the store isn't started any more; empty while it is."""
        self._thread = threading.Thread(target=self._keep, name="ray-control-store", daemon=True)
        self._thread.start()

    def await_listening(self, address: str) -> None:
        """Wait until the store listens at ``host:port``. Raises `ConfigError` where that takes longer than
        `LISTENS_S`, or it is given up."""
        host, _, port = address.rpartition(":")
        deadline = self._clock.now() + LISTENS_S
        while not self.failed and self._clock.now() < deadline:
            with contextlib.suppress(OSError):
                socket.create_connection((host, int(port)), LOOK_S).close()
                return
            self._ended.wait(LOOK_S)
        raise ConfigError("Ray's control store doesn't come back; is the server of cluster.ray_storage there?")

    def news(self) -> list[str]:
        """Lines for the operator since the last call."""
        found = []
        while self._news:
            found.append(self._news.popleft())
        return found

    def close(self) -> None:
        """Leave the store to itself. Idempotent."""
        self._ended.set()
        self._thread.join(CLOSE_S)

    def _keep(self) -> None:
        while not self._ended.wait(LOOK_S) and not self.failed:
            if self._child is not None:
                self._child.poll()  # Else it stays a zombie.
            if self._process is not None and same_process(*self._process):
                continue
            if not self._start():
                return

    def _start(self) -> bool:
        """Start the store again, once that is due; returns whether it was."""
        wait_s = self._restarts.died(self._clock.now(), self._since)
        if self._restarts.too_many:
            self._give_up("it died too often")
            return False
        self._news.append("Ray's control store died; it is started again, and workers serve on without it")
        if self._ended.wait(wait_s):
            return False
        try:
            self._child = start_again(self._folder)
        except (OSError, ValueError, KeyError) as error:
            self._give_up(str(error))
            return False
        self._process = self._child.pid, start_time(self._child.pid) or 0
        self._since = self.restarted_at = self._clock.now()
        return True

    def _give_up(self, why: str) -> None:
        log.error("Ray's control store is not started any more: %s", why)
        self.failed = why
