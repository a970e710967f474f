"""A detached cluster: launched by a command that ends, kept by its keeper, ended by another command.

Processes: the *keeper* (`cluster.processes.keeper`) starts this module as the supervisor, and again when it dies;
controller, routers, Ray and workers belong to neither and go on meanwhile.

A run of several models has a keeper and a supervisor of its own (`cluster.serve.serve_models`), whose services are the
routers and, for each model, the keeper of a detached cluster. That one ends with its run: its supervisor dies with its
keeper, and another keeper takes what runs over.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

from twinpool.cluster.processes import keeper, reaper
from twinpool.cluster.processes.process_ids import die_with_parent, same_process
from twinpool.cluster.processes.run_folder import START_REPORT, KeptFolder, RunFile, new_folder, new_log_folder
from twinpool.cluster.serve.detached_state import READY_FILE, DetachedState, ModelsState, ServicesState, models_in
from twinpool.cluster.serve.preflight import ServePlan
from twinpool.cluster.serve.router_services import SharedRouters
from twinpool.cluster.serve.serve_cluster import SECRETS, ServeCluster
from twinpool.cluster.serve.shutdown_signal import handled_signals
from twinpool.cluster.serve.terminal import exit_code, take_over_output, urls_of
from twinpool.contracts.errors import ConfigError, TwinpoolError
from twinpool.contracts.json_logs import log_to_stream
from twinpool.contracts.python_command import module_command, script_command

OUTPUT = "serve.out"
"""The file of the logs folder that has what `serve` shows in a terminal."""
KEEPER = "keeper"
"""The file of a model's cluster that has its keeper's pid."""
DOWN_S = 15.0
"""How long a cluster may take to end beyond what its supervisor has."""


def supervisor_command(folder: Path, python: str = "") -> list[str]:
    """The command of a supervisor that runs in the interpreter `python`; empty: this process's."""
    return module_command("twinpool.cluster.serve.detached_cluster", str(folder), python=python)


def launch(prepared: ServePlan, out: TextIO, wait: Callable[[float], object]) -> int:
    """Start a detached cluster, and return the exit code once it serves, or has failed (`keep`)."""
    if prepared.config.transfer.plane == "local":
        raise ConfigError("transfer.plane=local runs everything in this process: leave out --detach or the plane")
    state = DetachedState(new_folder(), new_log_folder(), prepared, secrets=given_secrets())
    return keep(state, urls_of(prepared)[1], out, wait, verbose=prepared.options.verbose)


def given_secrets() -> dict[str, str]:
    """The secrets that this process's environment has, by variable."""
    return {name: os.environ[name] for name in SECRETS if name in os.environ}


def keeper_command(folder: Path) -> list[str]:
    """The command of the keeper of the detached run of `folder`; the folder's name is the run's mark."""
    return [*script_command(str(keeper.__file__), str(folder), folder.name), *supervisor_command(folder)]


def keeper_environment(folder: Path) -> dict[str, str]:
    """The environment of that keeper: secrets are in the run's file."""
    return {key: value for key, value in os.environ.items() if key not in SECRETS} | {reaper.MARK: folder.name}


def keep(
    state: ServicesState, operators: str, out: TextIO, wait: Callable[[float], object], *, verbose: bool = False
) -> int:
    """Start the keeper of a detached run, show how the run starts on `out`, and return the exit code once it serves, or
    has failed. `operators`: the URL at which commands find it.

    `wait` sleeps. Main thread only: a Ctrl-C, SIGTERM or SIGHUP meanwhile ends the run, and raises
    `KeyboardInterrupt`.
    """
    folder, logs = state.folder, state.logs
    state.save()
    (logs / OUTPUT).touch()
    process = subprocess.Popen(
        keeper_command(folder),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=keeper_environment(folder),
        start_new_session=True,
    )
    with _signals_noted() as noted, (logs / OUTPUT).open(encoding="utf-8", errors="replace") as shown:
        while process.poll() is None and not (folder / READY_FILE).exists() and not noted:
            out.write(shown.read())
            out.flush()
            wait(0.1)
        out.write(shown.read())
        if noted:
            process.send_signal(signal.SIGTERM)
            process.wait(keeper.end_seconds(folder) + DOWN_S)
            raise KeyboardInterrupt
    if verbose and (logs / START_REPORT).exists():
        out.write((logs / START_REPORT).read_text(encoding="utf-8", errors="replace"))
    if process.poll() is not None:
        return 1
    out.write(f"it goes on without this command; end it with: twinpool down --url {operators}\n")
    out.flush()
    return 0


@contextlib.contextmanager
def _signals_noted() -> Iterator[list[int]]:
    """Yield the numbers of the signals to end that have come since; none of them ends this process meanwhile."""
    noted: list[int] = []
    before = {number: signal.signal(number, lambda number, frame: noted.append(number)) for number in handled_signals()}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def take_down(run: RunFile, wait: Callable[[float], object]) -> None:
    """End a cluster of this machine, and wait until it has ended. Raises `TwinpoolError` where it doesn't."""
    # One in a terminal keeps its deadline itself.
    max_s = keeper.end_seconds(Path(run.folder)) + DOWN_S if run.folder else math.inf
    os.kill(run.pid, signal.SIGTERM)
    waited = 0.0
    while same_process(run.pid, run.started):
        if waited > max_s:
            raise TwinpoolError(f"the cluster has not ended after {max_s:g} s; see {run.logs}")
        wait(0.1)
        waited += 0.1


def supervise(folder: Path, python: str = "") -> int:
    """Be the supervisor of the detached run whose files are in `folder`; returns the exit code: 0 where it has ended in
    order. `python` as of `ServeCluster`."""
    if models_in(folder):
        from twinpool.cluster.serve.serve_models import supervise_models

        models = ModelsState.load(folder)
        out = _take_over_output(models)
        return exit_code(lambda: supervise_models(models, out), out, models.logs)
    state = DetachedState.load(folder)
    if state.report:
        _end_with_keeper(folder)
    out = _take_over_output(state)
    kept = KeptFolder(folder, state.logs, os.getppid(), found=not state.report)
    shared = SharedRouters(Path(state.report)) if state.report else None
    cluster = ServeCluster(state.prepared, kept, out, state=state, python=python, shared=shared)
    return exit_code(cluster.run, out, state.logs)


def _end_with_keeper(folder: Path) -> None:
    """Have this process end with its keeper: another keeper is started then, with a supervisor of its own."""
    die_with_parent()
    if str(os.getppid()) != (folder / KEEPER).read_text():
        sys.exit("the keeper has ended")


def _take_over_output(state: ServicesState) -> TextIO:
    own = os.open(state.logs / OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(own, 1)
    os.close(own)
    out = take_over_output(state.logs / "serve.log")
    log_to_stream("serve")
    return out


if __name__ == "__main__":
    sys.exit(supervise(Path(sys.argv[1]), *sys.argv[2:]))
