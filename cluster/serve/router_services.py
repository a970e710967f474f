"""The routers' processes on the machine of `serve`.

A router's successor takes its port over (`router.api.listeners`), so no connection is refused, and the old process
ends once its answers have. The sockets for that, and for the probe whether a router lives, are named by router and
mark.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from twinpool.cluster.processes.process_ids import kill_process, same_process, terminate_process
from twinpool.cluster.serve.detached_state import ServiceProcess
from twinpool.cluster.serve.preflight import ServePlan
from twinpool.cluster.serve.rolling_services import RollingServices
from twinpool.cluster.serve.service import PartFailed, Service, ServiceContext
from twinpool.contracts.build_id import build_id
from twinpool.contracts.clock import Clock
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.config.setting_effects import routers_digest
from twinpool.contracts.messages.router_report import RoutedModel

EVERY_S = 1.0
PATIENCE_S = 5.0
"""Timeout of one request to ``/live``; several of them fit into `router.stall_s`."""


class UnixConnection(http.client.HTTPConnection):
    """An HTTP connection to a Unix socket."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class RouterProbe:
    """Asks ``/live`` every `every_s` seconds on a thread of its own. It never acts: `serve` reads `silent_s`."""

    def __init__(self, path: Path, clock: Clock, every_s: float = EVERY_S) -> None:
        """`path`: the Unix socket of the one router that is asked; the endpoint's port may be shared by several."""
        self._path, self._clock, self._every_s = path, clock, every_s
        self._heard_at = clock.now()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="router-probe", daemon=True)

    def start(self) -> None:
        self.started_again()
        self._thread.start()

    def started_again(self) -> None:
        """Count the silence from now on, because another router has been started."""
        self._heard_at = self._clock.now()

    @property
    def silent_s(self) -> float:
        """Seconds since the router last answered."""
        return self._clock.now() - self._heard_at

    def stop(self) -> None:
        """Stop asking. Idempotent; a request that is under way isn't waited for."""
        self._stop.set()

    def healthy(self) -> bool:
        """Whether the router says now that it can serve requests."""
        return self._answers("/health")

    def lives(self, within_s: float) -> bool:
        """Whether the router answers, asked again and again for so long."""
        deadline = self._clock.now() + within_s
        while not self._answers("/live"):
            if self._clock.now() >= deadline or self._stop.wait(self._every_s):
                return False
        return True

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            if self._answers("/live"):
                self._heard_at = self._clock.now()

    def _answers(self, path: str) -> bool:
        connection = UnixConnection(self._path, PATIENCE_S)
        try:
            connection.request("GET", path)
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()


@dataclass(frozen=True, slots=True)
class RouterCommand:
    """What the routers of a cluster are started with."""

    command: Sequence[str]
    environment: Mapping[str, str]
    serves: Sequence[str]
    """The arguments that say what they serve, and over which cluster; the files that they name are written before."""


@dataclass(frozen=True, slots=True)
class RoutersPlan:
    """How many routers there are, and where they listen."""

    count: int
    host: str
    port: int
    config: Config
    """Of the endpoint."""
    digest: str
    """Of the settings that they read."""

    @classmethod
    def of(cls, prepared: ServePlan) -> RoutersPlan:
        options, config = prepared.options, prepared.config
        return cls(options.routers, options.host, prepared.port, config, routers_digest(config))


@dataclass(frozen=True, slots=True)
class SharedRouters:
    """What the routers of several models are told of one of them, and which of it they have: files beside each other,
    the first written by the model's cluster, the other by who keeps the routers."""

    report: Path

    def tell(self, routed: RoutedModel) -> None:
        """Write what routers are to know, at once: a reader finds all of it, or what was there before."""
        _write(self.report, msgspec.json.encode(routed))

    def told(self) -> RoutedModel | None:
        """What the cluster has written; None before it has served."""
        with contextlib.suppress(OSError):
            return msgspec.json.decode(self.report.read_bytes(), type=RoutedModel)
        return None

    def confirm(self, digest: str, behind: int, obstacle: str) -> None:
        """Note how many routers read other settings than those of `digest`, and why that stays so, if it does."""
        _write(self._confirmed, msgspec.json.encode((digest, behind, obstacle)))

    def behind(self, digest: str) -> tuple[int, str]:
        """The number of routers that have other settings than those of `digest`, one where that isn't known yet, and
        the obstacle to replacing them, if any."""
        with contextlib.suppress(OSError):
            found, behind, obstacle = msgspec.json.decode(self._confirmed.read_bytes(), type=tuple[str, int, str])
            if found == digest:
                return behind, obstacle
        return 1, ""

    def clear(self) -> None:
        """Remove both files."""
        for file in (self.report, self._confirmed):
            file.unlink(missing_ok=True)

    @property
    def _confirmed(self) -> Path:
        return self.report.with_suffix(".confirmed")


def _write(path: Path, content: bytes) -> None:
    fresh = path.with_suffix(f"{path.suffix}.new")
    fresh.write_bytes(content)
    fresh.replace(path)


class Router(Service):
    """A router's service, and the probe that asks its process whether it lives."""

    probe: RouterProbe


@dataclass(frozen=True, slots=True)
class _LeavingRouter:
    """A router that was replaced, and that finishes its answers."""

    process: ServiceProcess
    probe: RouterProbe
    service: Service | None
    """Its service where this process has started or adopted it."""

    @property
    def running(self) -> bool:
        if self.service is not None:
            return self.service.ended() is None
        return same_process(self.process.pid, self.process.started)


class RouterServices(RollingServices[Router]):
    """The routers of one machine. Use it from the main thread only (`Service`)."""

    def __init__(self, context: ServiceContext, plan: RoutersPlan, folder: Path) -> None:
        """`folder`: where the routers' sockets are."""
        super().__init__(context)
        self._plan, self._folder = plan, folder
        self.leaving: dict[str, _LeavingRouter] = {}
        """By name and mark."""
        self._probes = False
        """Whether routers are asked if they live."""

    def start(self, how: RouterCommand) -> None:
        """Start all of them, or adopt those that run. Raises `PartFailed` where a stale one can't be replaced; it goes
        on then."""
        self._how = how
        self._context.stack.callback(self._end_leaving)
        if self._state is not None:
            for key, process in self._state.leaving.items():
                if key.startswith("router"):
                    self.leaving[key] = _LeavingRouter(process, self._probe(key), None)
        self._start(self._plan.count)

    def probe(self) -> None:
        """Ask the routers from now on whether they live, until the cluster ends."""
        self._probes = True
        for probe in [one.probe for one in self._services] + [one.probe for one in self.leaving.values()]:
            self._ask(probe)

    def change(self, plan: RoutersPlan) -> None:
        """Go by another plan; routers that read settings that differ are replaced one by one."""
        self._plan, self._obstacle = plan, ""

    def drain(self) -> None:
        """Have all of them end once their running answers have (`RouterServer`), replaced ones too."""
        if self._successor is not None:  # It would take a port over, and accept new requests.
            self._successor.service.kill()
        for router in self._services:
            router.terminate()
        for one in self.leaving.values():
            if one.running:
                terminate_process(one.process.pid, one.process.started)

    def drained(self) -> bool:
        """Whether all of them have ended."""
        ended = all(router.ended() is not None for router in self._services)
        return ended and not any(one.running for one in self.leaving.values())

    def tend(self) -> None:
        """Kill routers that hang, start again what has ended, and go on replacing. Raises `PartFailed` where one ends
        too often."""
        stall_s = self._plan.config.router.stall_s
        for router in self._services:
            before = router.process
            if not router.down and router.probe.silent_s >= stall_s:
                self._report(f"{router.name} hung: no answer for {router.probe.silent_s:.0f} s (router.stall_s)")
                router.kill()
            if failed := router.tend():
                raise PartFailed(failed)
            if router.process != before:  # It may have been started again at once.
                router.probe.started_again()
        self._tend_leaving(stall_s)
        self._replace_next()

    # ------------------------------------------------------------ this kind

    @property
    def mark(self) -> str:
        return f"{build_id()}.{self._plan.digest}"

    def _key(self, service: Router) -> str:
        return f"{service.name}.{service.mark}"

    def _begin(self, number: int) -> Router:
        """A router that hangs is killed, and a new one started."""
        name, state = self._name(number), self._state
        old = state.running(name) if state is not None else None
        if old is not None and state is not None:
            mark = state.marks.get(name, old.build)
            probe = self._probe(f"{name}.{mark}")
            if mark == self.mark or probe.lives(self._plan.config.router.stall_s):
                router = self._router(number)
                router.adopt(old, mark)
                router.probe = probe
                return router
            self._report(f"{name} hung: it is ended, not replaced in order")
            kill_process(old.pid, old.started)
        return self._started(self._router(number))

    def _make_successor(self, number: int, old: Router) -> Router:
        return self._router(number, takes_over=old.mark)

    def _retire(self, old: Router, new: Router) -> None:
        self.leaving[self._key(old)] = _LeavingRouter(old.process, old.probe, old)
        if self._probes:
            self._ask(new.probe)
        self._report(f"{old.name} is replaced; the one before finishes its answers")

    def _router(self, number: int, takes_over: str = "") -> Router:
        """A router of the plan, not started yet. `takes_over`: the mark of the one that it replaces."""
        plan, how = self._plan, self._how
        several, security = plan.count > 1, plan.config.security
        name = self._name(number)
        key = f"{name}.{self.mark}"
        arguments = [
            *how.serves,
            *("--host", plan.host, "--port", str(plan.port)),
            *("--name", name, "--live-socket", str(self._live(key))),
            *("--handover-socket", str(self._handover(key)), "--kept"),
            *(("--take-over", str(self._handover(f"{name}.{takes_over}"))) if takes_over else ()),
            *(("--reuse-port", "--admin-port", str(security.admin_port + number)) if several else ()),
        ]
        router = Router(self._context, name, how.command, arguments, how.environment, mark=self.mark)
        router.probe = self._probe(key)
        return router

    # ------------------------------------------------------------ probes, and routers that leave

    def _ask(self, probe: RouterProbe) -> None:
        self._context.stack.callback(probe.stop)
        probe.start()

    def _probe(self, key: str) -> RouterProbe:
        return RouterProbe(self._live(key), self._context.clock)

    def _name(self, number: int) -> str:
        return f"router-{number}" if self._plan.count > 1 else "router"

    def _live(self, key: str) -> Path:
        """The socket on which a router is asked whether it lives, by name and mark."""
        return self._folder / f"{key}.live"

    def _handover(self, key: str) -> Path:
        """The socket on which a router hands its port over."""
        return self._folder / f"{key}.handover"

    def _tend_leaving(self, stall_s: float) -> None:
        """Kill replaced routers that hang: their sockets still listen, so the kernel would give them connections."""
        for key, one in list(self.leaving.items()):
            if not one.running:
                one.probe.stop()
                del self.leaving[key]
            elif one.probe.silent_s >= stall_s:
                self._report(
                    f"{key}, which is replaced, hung: no answer for {one.probe.silent_s:.0f} s (router.stall_s)"
                )
                kill_process(one.process.pid, one.process.started)

    def _end_leaving(self) -> None:
        for one in self.leaving.values():
            one.probe.stop()
            if one.running:
                kill_process(one.process.pid, one.process.started)
