"""The upgrade of a detached cluster's supervisor, and with it of its services, to another build on this machine.

A supervisor of the other build is started by the keeper in the place of the one that runs. It takes the cluster over as
after a death, replaces what is of another build than its own on this machine (`cluster.serve.cluster_services`), and
starts workers with its own interpreter from then on; those that run go on until they are restarted.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from twinpool.cluster.processes.keeper import FAILED, TAKEN_OVER, TRIAL_S, NextSupervisor
from twinpool.cluster.processes.run_folder import RunFile, indented
from twinpool.contracts.errors import ConfigError, TwinpoolError
from twinpool.contracts.outside_data import read_json
from twinpool.contracts.python_command import module_command

CHECK_S = 180.0
"""How long an interpreter may take to check a cluster."""
POLL_S = 0.2
LAST_LINES = 8
"""Lines of the supervisor's output that are shown where it fails."""
LEFT_OUT = {"PYTHONPATH": None, "PYTHONHOME": None, "VIRTUAL_ENV": None, "__PYVENV_LAUNCHER__": None}
"""Variables that would make an interpreter find another one's packages."""


class UpgradeRefused(TwinpoolError):
    """Raised where a build can't take a cluster over, or didn't; the cluster goes on as it was."""


@dataclass(frozen=True, slots=True)
class CheckedBuild:
    """A build that can take the cluster over."""

    python: Path
    """Its interpreter."""
    build: str


def interpreter_of(path: Path) -> Path:
    """The interpreter that `path` names: itself, or that of a virtual environment. Raises `ConfigError`."""
    # Not resolved: an environment's interpreter is a link, and knows its environment by its own path.
    found = path.expanduser().absolute()
    found = found / "bin" / "python" if found.is_dir() else found
    if not (found.is_file() and os.access(found, os.X_OK)):
        raise ConfigError(f"{path} is neither an interpreter nor a virtual environment: there is no {found}")
    return found


def check_build(python: Path, run: RunFile) -> CheckedBuild:
    """Ask the build of `python` whether it can take a cluster over. Raises `UpgradeRefused`."""
    if not run.folder:
        raise UpgradeRefused(
            "this cluster ends with its terminal: only one that was started with serve --detach is upgraded while it "
            "serves. End it and start it with the new build"
        )
    environment = {name: value for name, value in os.environ.items() if name not in LEFT_OUT}
    try:
        done = subprocess.run(
            module_command("twinpool.cluster.serve.build_check", run.folder, python=str(python)),
            env=environment,
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=CHECK_S,
            check=False,
        )
        answer = read_json(done.stdout.strip().splitlines()[-1]) if done.returncode == 0 else None
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError) as error:
        raise UpgradeRefused(f"{python} can't check this cluster: {error}") from None
    if answer is None:
        words = done.stderr.strip().splitlines()
        raise UpgradeRefused(
            f"{python} has no Twinpool that can check this cluster: {words[-1] if words else done.returncode}"
        )
    if answer["refusal"]:
        raise UpgradeRefused(answer["refusal"])
    return CheckedBuild(python, answer["build"])


def services_build(run: RunFile) -> str:
    """The build of a detached cluster's controller, which is its supervisor's, or of the routers of several models;
    empty while that isn't known."""
    from twinpool.cluster.serve.detached_state import STATE_FILE

    try:
        services = read_json((Path(run.folder) / STATE_FILE).read_text())["services"]
        return str(next(services[name] for name in ("controller", "router", "router-0") if name in services)[2])
    except (OSError, ValueError, LookupError, StopIteration):
        return ""


def replace_supervisor(build: CheckedBuild, run: RunFile, wait: Callable[[float], object]) -> None:
    """Have the keeper replace the supervisor, and wait until the new one has taken the cluster over; `wait` sleeps.

    Raises `UpgradeRefused` where it doesn't; the one of before has the cluster again then.
    """
    from twinpool.cluster.serve.detached_cluster import OUTPUT, supervisor_command

    folder, output = Path(run.folder), Path(run.logs) / OUTPUT
    shown = output.stat().st_size if output.exists() else 0
    command = [*supervisor_command(folder, str(build.python)), str(build.python)]
    NextSupervisor(command, dict(LEFT_OUT), str(folder)).write(folder)
    waited = 0.0
    while not (folder / TAKEN_OVER).exists():
        if (folder / FAILED).exists():
            how = (folder / FAILED).read_text()
            said = output.read_bytes()[shown:].decode(errors="replace").strip().splitlines()[-LAST_LINES:]
            raise UpgradeRefused(
                f"the supervisor of build {build.build} did not take the cluster over ({how}), and the one before has "
                f"it again; see {run.logs}{indented(said)}"
            )
        if not folder.exists() or waited > TRIAL_S + 30.0:
            raise UpgradeRefused(f"the cluster's keeper does not replace the supervisor; see {run.logs}")
        wait(POLL_S)
        waited += POLL_S
