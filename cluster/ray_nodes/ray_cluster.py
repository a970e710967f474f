"""Joining a Ray cluster, or starting one of our own: on loopback, on free ports, small, without output.

Ray reads its environment when it is imported, so this module imports Ray only after the environment is set. A Ray of
our own has neither dashboard (unless asked for) nor prestarted workers, and an object store of the smallest size: no
token and no page travels through it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import platform
import secrets
import socket
import subprocess
import sys
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from twinpool.cluster.assembly.node_shares import NodeFacts, by_machine, measured
from twinpool.cluster.processes.priority import exit_deadline
from twinpool.cluster.processes.process_ids import kill_process, same_process, start_time
from twinpool.cluster.processes.restart_policy import RestartHistory
from twinpool.cluster.ray_nodes.control_store import (
    RECONNECT_S,
    KeptControlStore,
    StoredTables,
    outlives_its_store,
    write_down,
)
from twinpool.cluster.ray_nodes.ray_facts import RESOURCES, has_places
from twinpool.contracts.build_id import import_root
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.ids import Role
from twinpool.contracts.python_command import module_command

OBJECT_STORE_BYTES = 80 * 1024 * 1024
OWN_SLOTS = 10_000
"""Number of places for each role on a Ray of our own: flags decide the number of workers, not Ray."""
LOOPBACK = "127.0.0.1"
REACH_TIMEOUT_S = 3.0
JOIN_S = 180.0
"""How long a Ray that runs may take to let this process in."""
KEPT_START_S = 180.0
"""How long a Ray that outlives this process may take to start."""
MEASURE_TIMEOUT_S = 60.0
"""How long a node may take to start a process that measures it."""

log = logging.getLogger("twinpool.ray")

_WITH_DASHBOARD = "--include-dashboard=true"
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
    # GPUs stay visible to actors that ask Ray for none.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # Ray's own Python processes import nothing from the folder that they are started in (`contracts.python_command`).
    "PYTHONSAFEPATH": "1",
}
_AUTH_HINT = (
    "; give this process the cluster's token (RAY_AUTH_TOKEN_PATH, or ~/.ray/auth_token), or RAY_AUTH_MODE=disabled "
    "where the cluster was started without authentication"
)
_OWN = {
    # A client of a Ray can run code as its owner, and loopback is open to every user of the machine.
    "RAY_AUTH_MODE": "token",
    # Keeps every port of Ray on loopback; the variable is named after the systems where Ray does so by default.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    # Pools are taken at the start and never grow, so Ray has no reason to kill a worker for its memory.
    "RAY_memory_monitor_refresh_ms": "0",
    # Ray runs its workers at niceness 15, where any other process of the machine would come first; here clients wait
    # for them.
    "RAY_worker_niceness": "0",
    # Their metrics ports are fixed numbers unless told otherwise.
    "AUTOSCALER_METRIC_PORT": "0",
    "DASHBOARD_METRIC_PORT": "0",
    "RAY_gcs_rpc_server_reconnect_timeout_s": str(RECONNECT_S),
    # Of one machine: that its daemon is dead `OwnRay` sees by the process. One that is late because the machine is
    # overloaded must not be taken for dead, since all workers would go with it.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "10000",
    "RAY_health_check_failure_threshold": "30",
}


class OwnRay:
    """The processes of a Ray of our own, by which `serve` sees that Ray has died."""

    def __init__(
        self, processes: dict[str, tuple[int, int]], dashboard: str, store: KeptControlStore | None = None
    ) -> None:
        """`store`: the control store, where that is started again when it dies."""
        self._processes, self._store = processes, store
        self.dashboard = dashboard
        """The dashboard's URL; empty without a dashboard."""

    def lost(self) -> str:
        """The name of a vital process (raylet, gcs_server) that is gone for good; empty while all run."""
        gone = (name for name, (pid, started) in self._processes.items() if not same_process(pid, started))
        store_lost = self._store is not None and self._store.failed
        return next(gone, "its control store" if store_lost else "")

    def news(self) -> list[str]:
        """Lines for the operator since the last call."""
        return self._store.news() if self._store is not None else []

    def store_restarted_at(self) -> float | None:
        """When the control store was started again last; None while it never was."""
        return self._store.restarted_at if self._store is not None else None

    def close(self) -> None:
        """Leave Ray's processes to themselves. Idempotent."""
        if self._store is not None:
            self._store.close()


def start_own_ray(folder: Path, dashboard: bool) -> OwnRay:
    """Start a Ray of our own with its files below `folder`, and join it. Ray must not have been imported before.

    Changes this process's environment (`RAY_*`, `PYTHONPATH`), which children inherit.
    """
    _own_environment(folder)
    import ray

    with _parts_of_one_machine(), _dashboard_if(dashboard), apart_from_terminal():
        context = ray.init(
            address="local",
            _node_ip_address=LOOPBACK,
            _temp_dir=str(folder),
            include_dashboard=dashboard,
            object_store_memory=OBJECT_STORE_BYTES,
            num_gpus=0,
            resources=dict.fromkeys(RESOURCES.values(), OWN_SLOTS),
            **driver_options(),
        )
    url = context.dashboard_url
    return OwnRay(_vital_processes(), f"http://{url}" if dashboard and url else "")


def start_kept_ray(
    folder: Path, port: int, dashboard: bool, storage: str = "", restarts: RestartHistory | None = None
) -> tuple[str, OwnRay]:
    """Start a Ray of our own that outlives this process, with its files below `folder`, and join it; what an earlier
    one has left there is killed first. Returns its address too. Ray must not have been imported before.

    `port`: where its control store listens. `storage`: the server where that has its tables, empty: in memory.
    `restarts` as of `join_kept_ray`. Changes this process's environment (`RAY_*`, `PYTHONPATH`). Raises `ConfigError`
    where it doesn't start.
    """
    for pid, started in _processes_below(folder).values():
        kill_process(pid, started)
    _own_environment(folder)
    tables = StoredTables(storage, folder.name) if storage else None
    if tables is not None:
        tables.forget()  # Those of one that died have nothing that runs.
    command = [
        *module_command(__name__, "start", "--head", f"--port={port}"),
        *(f"--node-ip-address={LOOPBACK}", f"--temp-dir={folder}", "--dashboard-agent-listen-port=0"),
        *("--no-monitor", "--include-log-monitor=false"),  # As in `_parts_of_one_machine`.
        *(f"--object-store-memory={OBJECT_STORE_BYTES}", "--num-gpus=0", "--disable-usage-stats"),
        f"--resources={json.dumps(dict.fromkeys(RESOURCES.values(), OWN_SLOTS))}",
        _WITH_DASHBOARD if dashboard else "--include-dashboard=false",
        *(tables.options if tables is not None else ()),
    ]
    ended = subprocess.run(
        command,
        env={**os.environ, **(tables.environment if tables is not None else {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=KEPT_START_S,
        check=False,
        start_new_session=True,
    )
    if tables is not None and (store := _processes_below(folder).get("gcs_server")) is not None:
        write_down(folder, store[0])
    address = f"{LOOPBACK}:{port}"
    ray = join_kept_ray(folder, address, restarts=restarts) if ended.returncode == 0 else None
    if ray is None:
        words = (ended.stderr or ended.stdout).strip().splitlines()
        raise ConfigError(f"Ray doesn't start: {words[-1] if words else 'it says nothing'}")
    return address, ray


def join_kept_ray(
    folder: Path, address: str, python: str = "", restarts: RestartHistory | None = None
) -> OwnRay | None:
    """Join the Ray that `start_kept_ray` has started, in the namespace that is `folder`'s name; None where it is
    gone. `python` as of `join_ray`; `restarts`: of its control store, which is started again from now on where its
    tables outlive it. Raises `ConfigError` where Ray runs and can't be joined."""
    processes = _processes_below(folder)
    kept = restarts is not None and outlives_its_store(folder)
    if "raylet" not in processes or not (kept or "gcs_server" in processes):
        return None
    _own_environment(folder)
    # Before it is joined: the store may have died while nobody was there to start it again, and may die meanwhile.
    store = KeptControlStore(folder, processes.pop("gcs_server", None), restarts) if restarts and kept else None
    try:
        if store is not None:
            store.await_listening(address)
        url = _init_kept_ray(folder, address, python)
    except BaseException:
        if store is not None:
            store.close()
        raise
    return OwnRay(processes, f"http://{url}" if url else "", store)


def _init_kept_ray(folder: Path, address: str, python: str) -> str:
    """Join Ray; returns its dashboard's address, empty where there is none. Raises `ConfigError`."""
    import ray

    try:
        with exit_deadline(JOIN_S, f"Ray at {address} doesn't let this process in"):
            context = ray.init(
                address=address, namespace=folder.name, _node_ip_address=LOOPBACK, **driver_options(python)
            )
    except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"can't join the cluster's Ray at {address}: {reason}") from None
    return str(context.dashboard_url or "")


def end_kept_ray(folder: Path, storage: str) -> None:
    """End the Ray that `start_kept_ray` has started, and remove its tables from their server. Raises `ConfigError`."""
    for pid, started in _processes_below(folder).values():
        kill_process(pid, started)
    StoredTables(storage, folder.name).forget()


def _processes_below(folder: Path) -> dict[str, tuple[int, int]]:
    """The vital processes of a Ray whose files are below `folder`, by name: pid and start time."""
    import psutil

    found = {}
    for process in psutil.process_iter(["name", "cmdline"]):
        name, words = process.info["name"], process.info["cmdline"] or ()
        if name in ("raylet", "gcs_server") and any(str(folder) in word for word in words):
            found[name] = (process.pid, start_time(process.pid) or 0)
    return found


def _own_environment(folder: Path) -> None:
    """Set this process's environment, which children inherit, for a Ray of our own with its files below `folder`."""
    assert "ray" not in sys.modules, "Ray was imported before its environment was set"
    os.environ.update(_QUIET | _OWN)
    token = folder / "ray-token"
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(token if token.exists() else _new_token(folder))
    for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN"):
        os.environ.pop(name, None)
    _importable_by_workers()


def _new_token(folder: Path) -> Path:
    """Make a token for this run's Ray, in a file that only this user can read; returns its path."""
    path = folder / "ray-token"
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(secrets.token_hex(32))
    return path


def _vital_processes() -> dict[str, tuple[int, int]]:
    import psutil

    vital = [child for child in psutil.Process().children() if child.name() in ("raylet", "gcs_server")]
    return {child.name(): (child.pid, start_time(child.pid) or 0) for child in vital}


@contextlib.contextmanager
def _parts_of_one_machine() -> Iterator[None]:
    """Make `ray.init` start what a Ray of one machine needs, within this context; it has no arguments for it, as
    `ray start` has.

    The node agent gets a free port: for Ray's default, one fixed port, a second Ray on the machine waits seconds in
    vain. There is no process that would start machines of a cloud (`monitor`), nor one that sends what workers print to
    drivers (`log_monitor`), which ours don't ask for: a second of a processor at the start, and 100 MB.
    """
    from ray._private.parameter import RayParams  # noqa: PLC2701  (Ray has no public name for it)

    plain = RayParams.__init__
    RayParams.__init__ = functools.partialmethod(
        plain, dashboard_agent_listen_port=0, no_monitor=True, include_log_monitor=False
    )
    try:
        yield
    finally:
        RayParams.__init__ = plain


@contextlib.contextmanager
def _dashboard_if(wanted: bool) -> Iterator[None]:
    """Have Ray start its dashboard's server within this context only if it is `wanted`.

    Ray starts one all the same, to count its users, and looks for the dashboard's packages before: two seconds of a
    processor. Its node agent serves nothing then, as where Ray is installed without its dashboard.
    """
    from ray._private import utils  # noqa: PLC2701  (Ray has no public names for these)
    from ray._private.node import Node  # noqa: PLC2701

    plain = Node.start_api_server, utils.get_dashboard_dependency_error
    if not wanted:
        Node.start_api_server = lambda *_, **__: None
        utils.get_dashboard_dependency_error = lambda: ImportError("not wanted")
    try:
        yield
    finally:
        Node.start_api_server, utils.get_dashboard_dependency_error = plain


@contextlib.contextmanager
def apart_from_terminal() -> Iterator[None]:
    """Have `ray.init` start Ray's processes in sessions of their own, within this context.

    A signal to the whole process group of `serve`, such as that of ``timeout`` or of a terminal, would end the workers
    before the answers that they compute have ended.
    """
    from ray._private import services  # noqa: PLC2701  (Ray has no public name for it)

    plain = services.ConsolePopen
    services.ConsolePopen = functools.partial(plain, start_new_session=True)
    try:
        yield
    finally:
        services.ConsolePopen = plain


def join_ray(address: str, namespace: str, python: str = "") -> str:
    """Join the Ray at `address`; returns this node's address. Raises `ConfigError` when it can't be joined.

    `namespace`: where this cluster's actors have their names, which are other clusters' too; the next supervisor of a
    detached cluster finds them there. `python`: the interpreter that workers and agents are started with on every node,
    which imports these packages from where this process does; empty: Ray's own, by which the node was started.

    The cluster's owner decides on authentication: Ray looks for a token (`RAY_AUTH_TOKEN`, `RAY_AUTH_TOKEN_PATH`,
    ~/.ray/auth_token), and `RAY_AUTH_MODE` is left as it is.
    """
    os.environ.update(_QUIET)
    check_reachable(address if address != "auto" else os.environ.get("RAY_ADDRESS", ""))
    import ray

    try:
        ray.init(address=address, namespace=namespace, **driver_options(python))
    except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        hint = "" if "auth" not in str(error).lower() and "token" not in str(error).lower() else _AUTH_HINT
        raise ConfigError(f"can't join Ray at {address}: {reason}{hint}") from None
    return str(ray.util.get_node_ip_address())


def missing_places(needed: Mapping[Role, int]) -> str:
    """The places for processes of each role that the nodes that have joined so far lack, in words; empty where there
    are enough. `needed`: places by role, one for each rank of each worker."""
    import ray

    places = ray.cluster_resources()
    wanted = {RESOURCES[role]: count for role, count in needed.items()}
    return ", ".join(
        f"{places.get(name, 0):g} of {count} {name}" for name, count in wanted.items() if places.get(name, 0) < count
    )


def measure_nodes(known: Container[str], device: str) -> list[NodeFacts]:
    """Measure the nodes that take workers and whose Ray node ids are not `known` yet, each by a task on the node, with
    the GPUs that `device` (`engine.device`) names.

    A node that doesn't answer within `MEASURE_TIMEOUT_S` is left out. Where several new nodes share a machine, as
    logical nodes do, each gets its part of the machine.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    asked = []
    for node in ray.nodes():
        if node["Alive"] and has_places(node["Resources"]) and node["NodeID"] not in known:
            places = {role: int(node["Resources"].get(RESOURCES[role], 0)) for role in Role}
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            look = ray.remote(measured).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
            asked.append(look.remote(places, node["NodeID"], device))
    done, late = ray.wait(asked, num_returns=len(asked), timeout=MEASURE_TIMEOUT_S) if asked else ([], [])
    facts: list[NodeFacts] = []
    for answer in done:
        try:
            facts.append(ray.get(answer, timeout=MEASURE_TIMEOUT_S))
        except ray.exceptions.RayError as error:
            log.warning("a node could not be measured: %s", error)
    for answer in late:
        log.warning("a node has not answered in %g s and gets no worker yet", MEASURE_TIMEOUT_S)
        ray.cancel(answer, force=True)
    return by_machine(facts)


def check_reachable(address: str) -> None:
    """Check that something listens at `address`, for which Ray itself would take a minute. Raises `ConfigError`.

    An address that isn't ``host:port`` is not checked.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), REACH_TIMEOUT_S).close()
    except OSError as error:
        raise ConfigError(f"can't reach Ray at {address}: {error.strerror or error}") from None


def leave_ray() -> None:
    """Leave Ray, which ends a Ray of our own. Idempotent."""
    if "ray" in sys.modules:
        import ray

        ray.shutdown()


class _DriverPaths(list[str]):
    """The folders of this process that Ray's workers import from before all others: none but the source tree's.

    Ray puts the working directory and the script's folder there, where a user's ``cluster/`` or ``cache.py`` may lie.
    """

    def extend(self, paths: Iterable[str]) -> None:
        super().extend(path for path in paths if Path(path) == import_root())


def driver_options(python: str = "") -> dict[str, Any]:
    """The options of `ray.init`; `python` as of `join_ray`."""
    import ray

    job = ray.job_config.JobConfig()
    job._py_driver_sys_path = _DriverPaths()
    quiet = {"log_to_driver": False, "configure_logging": False, "logging_level": logging.ERROR, "job_config": job}
    if not python:
        return quiet
    # The raylet's workers have its environment, with the packages of the build that it was started by.
    return {**quiet, "runtime_env": {"py_executable": python, "env_vars": {"PYTHONPATH": str(import_root())}}}


def ray_build() -> str:
    """The Ray and the Python of this process, both of which must be those of the Ray that it joins."""
    import ray

    return f"Ray {ray.__version__}, Python {platform.python_version()}"


def authenticated() -> bool:
    """Whether the Ray that this process has joined asks for a token, by this process's environment."""
    return os.environ.get("RAY_AUTH_MODE", "").lower() == "token"


def _importable_by_workers() -> None:
    """Put the folder of these packages on `PYTHONPATH`, so that Ray's workers import them from there too."""
    root = str(import_root())
    paths = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    if root not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([root, *paths])


def _start_kept() -> None:
    """``ray start`` with this process's arguments (`start_kept_ray`)."""
    from ray.scripts.scripts import main

    with _dashboard_if(_WITH_DASHBOARD in sys.argv):
        main()


if __name__ == "__main__":
    _start_kept()
