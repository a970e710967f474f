"""The controller's ledger: there, writable, and kept as safely as the controller needs it."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from twinpool.cluster.controller.open_ledger import PASSWORD_VARIABLE, open_ledger
from twinpool.cluster.doctor.checks.storage_tier import probe_folder
from twinpool.cluster.doctor.doctor_case import DoctorCase
from twinpool.cluster.doctor.finding import Finding, error, fine, from_refusal, warning
from twinpool.contracts.config.ledger_place import on_server, without_password
from twinpool.contracts.errors import ConfigError, TwinpoolError

BUSY_S = 1.0


def check_ledger_access(case: DoctorCase) -> Iterator[Finding]:
    """Open the ledger as a controller would, write nothing that stays."""
    cluster = case.config.cluster
    if not cluster.ledger:
        yield fine("the table goes with the run (cluster.ledger is empty)")
    elif on_server(cluster.ledger):
        yield from _server(case)
    else:
        yield from _file(Path(cluster.ledger).expanduser())


def _server(case: DoctorCase) -> Iterator[Finding]:
    cluster, shown = case.config.cluster, without_password(case.config.cluster.ledger)
    try:
        ledger = open_ledger(
            cluster.ledger, cluster.name, cluster.ledger_replicas, case.host.environment, case.config.security
        )
    except TwinpoolError as refused:
        yield from_refusal(refused)
        return
    try:
        losses = ledger.check()
    except ConfigError as refused:
        yield from_refusal(refused)
    except OSError as problem:
        yield error(
            f"cluster.ledger {shown}: {' '.join(str(problem).split())}",
            "start the server, or name another; its password may be in the file of security.ledger_password_file or in "
            f"{PASSWORD_VARIABLE}",
            "no controller leads, and no worker is granted anything, until it answers",
        )
    else:
        for loss in losses:
            yield warning(f"cluster.ledger: {loss}", "set appendonly yes and appendfsync always on that server")
        if not losses:
            yield fine(f"{shown} answers, and keeps what is written")
    finally:
        ledger.close()


def _file(path: Path) -> Iterator[Finding]:
    if not path.exists():
        problem = probe_folder(path.parent) if path.parent.is_dir() else f"{path.parent} isn't there"
        if problem:
            yield error(
                f"cluster.ledger {path} can't be made: {problem}", "name a file in a folder that can be written"
            )
        else:
            yield fine(f"{path} will be made")
        return
    try:
        store = sqlite3.connect(f"{path.absolute().as_uri()}?mode=rw", uri=True, timeout=BUSY_S, isolation_level=None)
        try:
            store.execute("BEGIN IMMEDIATE")
            store.execute("ROLLBACK")
        finally:
            store.close()
    except sqlite3.Error as problem:
        yield error(
            f"cluster.ledger {path} can't be written: {problem}",
            "give it to this user, name another file, or end who keeps it locked",
        )
        return
    if not os.access(path.parent, os.W_OK):
        yield error(
            f"{path.parent} can't be written, and the ledger's log lies beside it", "give the folder to this user"
        )
        return
    yield fine(f"{path} can be written")
