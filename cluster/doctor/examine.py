"""The examination: the table of checks, and the run through them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from cluster.doctor.checks import (
    clocks,
    containers,
    credential_files,
    devices,
    free_ports,
    host_memory,
    hosts,
    ledger_access,
    leftovers,
    model_files,
    process_limits,
    ray_head,
    settings,
    storage_tier,
    versions,
)
from cluster.doctor.doctor_case import DoctorCase
from cluster.doctor.finding import Finding, Severity, error

Check = Callable[[DoctorCase], Iterator[Finding]]
"""Yields what it sees: one finding at least, all of them fine where there is nothing to do."""

CHECKS: dict[str, Check] = {
    "configuration": settings.check_configuration,
    "versions": versions.check_versions,
    "ports": free_ports.check_ports,
    "model": model_files.check_model,
    "tokenizer": model_files.check_tokenizer,
    "memory": host_memory.check_memory,
    "shared memory": host_memory.check_shared_memory,
    "swap": host_memory.check_swap,
    "disks": model_files.check_disks,
    "open files": process_limits.check_descriptors,
    "processes": process_limits.check_processes,
    "locked memory": process_limits.check_locked_memory,
    "processors": process_limits.check_processors,
    "numerics": settings.check_numerics,
    "GPUs": devices.check_gpus,
    "RDMA": devices.check_rdma,
    "container": containers.check_container,
    "Ray": ray_head.check_ray,
    "hosts": hosts.check_hosts,
    "ledger": ledger_access.check_ledger_access,
    "storage": storage_tier.check_storage,
    "credentials": credential_files.check_credentials,
    "clock": clocks.check_clock,
    "leftovers": leftovers.check_leftovers,
}
"""All checks by name, in the order in which they are made."""


def examine(case: DoctorCase) -> list[Finding]:
    """What all checks see. A check that fails is an error among them, and keeps no other from being made."""
    found = []
    for name, check in CHECKS.items():
        try:
            seen = list(check(case))
        except Exception as failed:  # A machine in a state that nobody thought of must not silence the other checks.
            seen = [error(f"the check itself failed: {type(failed).__name__}: {failed}", "report it; the others go on")]
        found += [replace(finding, check=name) for finding in seen]
    return found


def exit_code(findings: list[Finding]) -> int:
    """0: nothing to do, 1: warnings, 2: errors."""
    severities = {finding.severity for finding in findings}
    return 2 if Severity.ERROR in severities else 1 if Severity.WARNING in severities else 0
