"""The KV index as a child process of `serve`, which starts it beside the router and restarts it.

Without it routers go by what they have sent, so its end is told and nothing else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from cluster.processes.process_ids import TIED, start_time
from cluster.processes.restart_policy import RestartHistory
from contracts.clock import Clock
from contracts.config.cluster_config import Config

COMMAND = (sys.executable, "-m", "router.index_main")
STOP_S = 1.5
LOOPBACK = "tcp://127.0.0.1:0"


def index_wanted(config: Config) -> bool:
    """Whether a KV index is to run: something goes by it, and workers publish."""
    return _asked_for(config) and bool(config.cache.events.endpoint)


def _asked_for(config: Config) -> bool:
    return config.router.kv_index == "auto" and config.router.policy == "cache_aware"


def with_kv_events(config: Config, folder: Path) -> Config:
    """`config` with KV events published on this host's loopback, where an index is to follow them and none are
    published yet. All workers must be on this host.

    Events carry prompts' tokens, and any user of the machine may connect to its loopback: readers need a key, which is
    made in `folder` unless there is one. Nobody but this user can read it.
    """
    if not _asked_for(config) or config.cache.events.endpoint:
        return config
    events = dataclasses.replace(config.cache.events, endpoint=LOOPBACK, replay_endpoint=LOOPBACK)
    security = config.security
    if not security.curve_key:
        import zmq.auth  # Where there are keys alone.

        own = folder / "kv-events"
        own.mkdir(0o700)
        _, secret = zmq.auth.create_certificates(own, "curve")
        security = dataclasses.replace(security, curve_key=str(secret))
    return dataclasses.replace(config, cache=dataclasses.replace(config.cache, events=events), security=security)


class KvIndexProcess:
    """The index's process, across its restarts. Use it from the main thread only: the kernel kills the child when the
    thread that started it ends."""

    def __init__(
        self,
        config: Config,
        controller: str,
        folder: Path,
        logs: Path,
        environment: Mapping[str, str],
        clock: Clock,
        command: tuple[str, ...] = COMMAND,
    ) -> None:
        """`folder`: of this run's temporary files."""
        self._config, self._controller, self._clock, self._command = config, controller, clock, command
        self.table = folder / "kv-index"
        """Where routers find the table."""
        self._config_file, self._log = logs / ".kv-index-config.json", logs / "kv-index.log"
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None
        self._restarts = RestartHistory(config.cluster)
        self._since = clock.now()
        self._restart_at: float | None = None

    def start(self) -> tuple[int, int]:
        """Start the process; returns its pid and start time (`process_ids.start_time`)."""
        self._config_file.write_text(json.dumps(self._config.to_dict()))
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *(*TIED, *self._command, "--controller", self._controller),
                    *("--table", str(self.table), "--config-json", str(self._config_file)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment,
                start_new_session=True,
            )
        self._since, self._restart_at = self._clock.now(), None
        return self._process.pid, start_time(self._process.pid) or 0

    def poll(self) -> tuple[list[str], list[tuple[int, int]]]:
        """Restart the process where it has ended; returns lines for the operator, and the pid and start time of a new
        process."""
        if self._restart_at is not None and self._clock.now() >= self._restart_at:
            return [], [self.start()]
        code = self._process.poll() if self._process is not None else None
        if code is None:
            return [], []
        how, self._process = f"signal {-code}" if code < 0 else f"exit code {code}", None
        wait_s = self._restarts.died(self._clock.now(), self._since)
        if self._restarts.too_many:
            return [f"the KV index died ({how}) too often: from now on the router goes by what it has sent"], []
        self._restart_at = self._clock.now() + wait_s
        return [f"the KV index died ({how}); restarting, and the router goes by what it has sent meanwhile"], []

    def stop(self) -> None:
        """Send SIGTERM, wait up to `STOP_S`, then kill the process. Idempotent."""
        process, self._process, self._restart_at = self._process, None, None
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
