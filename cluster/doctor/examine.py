"""The examination: the table of checks, and the run through them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Lock
from typing import Protocol

from twinpool.cluster.doctor import device_checks, machine_checks, network_checks, settings_checks, storage_checks
from twinpool.cluster.doctor.doctor_case import DoctorCase, Finding, Severity, error
from twinpool.contracts.clock import Clock, SystemClock

Check = Callable[[DoctorCase], Iterator[Finding]]
"""Yields what it sees: one finding at least, all of them fine where there is nothing to do."""

CHECKS: dict[str, Check] = {
    "configuration": settings_checks.check_configuration,
    "versions": machine_checks.check_versions,
    "ports": network_checks.check_ports,
    "model": settings_checks.check_model,
    "tokenizer": settings_checks.check_tokenizer,
    "memory": device_checks.check_memory,
    "shared memory": device_checks.check_shared_memory,
    "swap": device_checks.check_swap,
    "disks": settings_checks.check_disks,
    "open files": machine_checks.check_descriptors,
    "processes": machine_checks.check_processes,
    "locked memory": machine_checks.check_locked_memory,
    "processors": machine_checks.check_processors,
    "numerics": settings_checks.check_numerics,
    "GPUs": device_checks.check_gpus,
    "RDMA": device_checks.check_rdma,
    "container": machine_checks.check_container,
    "Ray": network_checks.check_ray,
    "hosts": network_checks.check_hosts,
    "ledger": storage_checks.check_ledger_access,
    "storage": storage_checks.check_storage,
    "credentials": storage_checks.check_credentials,
    "clock": machine_checks.check_clock,
    "leftovers": storage_checks.check_leftovers,
}
"""All checks by name, in the order in which they are shown."""


BESIDE = (
    (
        "versions", "open files", "processes", "locked memory", "processors", "container",
        "credentials", "leftovers",
    ),
    ("ledger", "storage", "clock"),
)  # fmt: skip
"""Checks that are made beside the others, each group by a thread of its own: those that import nothing as they run, and
those that wait for servers. All others load parts of the engine or Ray, which import each other in circles: two threads
that load them meanwhile would find modules half made."""


class Progress(Protocol):
    """Is told how the examination goes on; by one thread at a time."""

    def begins(self, check: str) -> None: ...

    def ended(self, check: str, seconds: float) -> None: ...


def examine(case: DoctorCase, progress: Progress | None = None, clock: Clock | None = None) -> list[Finding]:
    """What all checks see, in the order of the table; independent ones are made at a time. A check that fails is an
    error among them, and keeps no other from being made."""
    run = _Examination(case, progress, clock or SystemClock())
    with ThreadPoolExecutor(len(BESIDE)) as pool:
        beside = [pool.submit(run.made, [name for name in group if name in CHECKS]) for group in BESIDE]
        found = run.made([name for name in CHECKS if not any(name in group for group in BESIDE)])
        for group in beside:
            found |= group.result()
    return [finding for name in CHECKS for finding in found[name]]


class _Examination:
    """One examination under way."""

    def __init__(self, case: DoctorCase, progress: Progress | None, clock: Clock) -> None:
        self._case, self._progress, self._clock = case, progress, clock
        self._lock = Lock()

    def made(self, names: Iterable[str]) -> dict[str, list[Finding]]:
        """Make checks one after the other; returns what each saw."""
        return {name: self._seen(name) for name in names}

    def _seen(self, name: str) -> list[Finding]:
        began = self._clock.now()
        if self._progress is not None:
            with self._lock:
                self._progress.begins(name)
        try:
            seen = list(CHECKS[name](self._case))
        except Exception as failed:  # A machine in a state that nobody thought of must not silence the other checks.
            seen = [error(f"the check itself failed: {type(failed).__name__}: {failed}", "report it; the others go on")]
        if self._progress is not None:
            with self._lock:
                self._progress.ended(name, self._clock.now() - began)
        return [replace(finding, check=name) for finding in seen]


def exit_code(findings: list[Finding]) -> int:
    """0: nothing to do, 1: warnings, 2: errors."""
    severities = {finding.severity for finding in findings}
    return 2 if Severity.ERROR in severities else 1 if Severity.WARNING in severities else 0
