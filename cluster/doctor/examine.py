"""The examination: the table of checks, and the run through them; and the checks of the configuration and the model.

- The configuration's file and flags, as `serve` itself checks them.
- The model: all files there, whole, and of a kind that can be served; and room on the disks that a run writes to.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Protocol

from twinpool.cluster.doctor import device_checks, machine_checks, network_checks, storage_checks
from twinpool.cluster.doctor.doctor_case import DoctorCase, Finding, Severity, error, fine, from_refusal, sized, warning
from twinpool.cluster.serve.preflight import check_flags, check_settings
from twinpool.contracts import cpu_levels
from twinpool.contracts.checkpoint.gguf.gguf_header import is_gguf
from twinpool.contracts.checkpoint.safetensors_headers import INDEX, read_file_headers, read_json
from twinpool.contracts.clock import Clock, SystemClock
from twinpool.contracts.errors import CheckpointError, TwinpoolError
from twinpool.router.text.tokenizer import read_model_tokenizer


def check_configuration(case: DoctorCase) -> Iterator[Finding]:
    """The file, each `--set`, the flags, and what they are together."""
    if case.refused is not None:
        yield from_refusal(case.refused)
        return
    try:
        check_flags(case.options)
        check_settings(case.config, case.options)
    except TwinpoolError as refused:
        yield from_refusal(refused)
        return
    sizes = ", ".join(f"{count} {role}" for role, count in case.options.workers.items())
    yield fine(f"{case.options.file or 'defaults and flags'}: {sizes}")


def check_numerics(case: DoctorCase) -> Iterator[Finding]:
    """Whether this machine's processor can run the level that the cluster is pinned to."""
    level, can = case.config.engine.numerics_class, cpu_levels.levels()
    if level not in ("auto", *can):
        yield error(
            f"engine.numerics_class={level}, and this processor runs {', '.join(can) or 'none of the levels'}",
            "set a level that every machine of the cluster runs",
        )
    elif level == "auto" and case.several_hosts and not case.wants_gpus:
        yield warning(
            "engine.numerics_class=auto with several machines: processors that aren't alike compute other bits",
            f"set engine.numerics_class to a level that all of them run (this one: {', '.join(can) or 'none'})",
            "workers whose bits differ refuse each other's state, so an answer can't go on elsewhere",
        )
    else:
        yield fine(f"{cpu_levels.described(level if level != 'auto' else '')}, engine.numerics_class={level}")


MIN_FREE = 1 << 30
"""Bytes that a disk should have for a run's logs and Ray's files."""
MAX_PROMPT_CHARS = 1 << 20
"""For the chat template, which renders nothing here."""


def check_model(case: DoctorCase) -> Iterator[Finding]:
    """Every shard against its own header and the index, and the architecture against those that are supported."""
    model = case.model
    if model.path is None:
        there = _free(model.kept_in) if model.kept_in is not None else None
        room = f"; {sized(there)} free in {model.kept_in}" if there is not None else ""
        yield fine(f"{model.fetched_by} isn't on this machine: serve fetches it{room}")
        return
    broken = list(_broken_shards(model.path))
    yield from broken
    if broken:
        return
    if model.refused is not None or model.spec is None:
        yield from_refusal(model.refused or CheckpointError(f"{model.path} can't be read"))
        return
    try:
        from twinpool.engine.models.registry import model_for

        model_for(model.spec, case.config.engine)
    except TwinpoolError as refused:
        yield from_refusal(refused)
        return
    yield fine(f"{model.spec.architecture} in {model.path}, {len(model.spec.headers)} tensors, all there")


def _broken_shards(path: Path) -> Iterator[Finding]:
    """An error for each weight file that is missing, cut off, unreadable, or lacks a tensor that the index says it
    has."""
    if is_gguf(path) or not (path / INDEX).exists():
        return  # One file, which reading the model's description has looked at.
    try:
        table = read_json(path / INDEX).get("weight_map")
    except CheckpointError as refused:
        yield from_refusal(refused)
        return
    if not isinstance(table, dict):
        return
    for name in sorted({str(file) for file in table.values()}):
        advice = f"fetch {name} again"
        if not (path / name).exists():
            yield error(f"{path / name} is missing; the index names it", advice)
            continue
        try:
            there = read_file_headers(path / name)
        except CheckpointError as refused:
            yield error(str(refused), advice)
            continue
        lacking = [tensor for tensor, file in table.items() if file == name and tensor not in there]
        if lacking:
            yield error(
                f"{path / name} lacks {len(lacking)} tensors that the index says it has, {lacking[0]} among them",
                advice,
            )


def check_tokenizer(case: DoctorCase) -> Iterator[Finding]:
    """Tokenizer and chat template, read as the router reads them."""
    path = case.model.path
    if path is None or case.model.spec is None:
        yield fine("not looked at: the model isn't here, or can't be read")
        return
    try:
        tokenizer = read_model_tokenizer(path, MAX_PROMPT_CHARS)
    except TwinpoolError as refused:
        yield from_refusal(refused)
        return
    if not tokenizer.has_text:
        yield warning(
            f"{path} has no tokenizer.json: prompts can be token ids alone, and answers have no text",
            "put the model's tokenizer.json there",
        )
    elif not tokenizer.template_source:
        yield warning(
            f"{path} has no chat template: /v1/chat/completions will refuse everything",
            "put the model's tokenizer_config.json or chat_template.jinja there",
        )
    else:
        yield fine("tokenizer and chat template are there")


def check_disks(case: DoctorCase) -> Iterator[Finding]:
    """Room for logs and for Ray's files."""
    state = case.host.environment.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    short = False
    for what, folder in (("logs", Path(state)), ("Ray's files", case.host.temporary)):
        free = _free(folder)
        if free is not None and free < MIN_FREE:
            short = True
            yield warning(f"{sized(free)} are free for {what} ({folder})", f"make room: {sized(MIN_FREE)} at least")
    if not os.access(case.host.temporary, os.W_OK | os.X_OK):
        short = True
        yield error(f"{case.host.temporary} can't be written", "set TMPDIR to a folder that can be")
    if not short:
        yield fine("there is room for logs and temporary files")


def _free(folder: Path) -> int | None:
    """Bytes free on the disk of a folder that may not be there yet; None where that can't be said."""
    there = next((one for one in (folder, *folder.parents) if one.exists()), None)
    try:
        return shutil.disk_usage(there).free if there is not None else None
    except OSError:
        return None


Check = Callable[[DoctorCase], Iterator[Finding]]
"""Yields what it sees: one finding at least, all of them fine where there is nothing to do."""

CHECKS: dict[str, Check] = {
    "configuration": check_configuration,
    "versions": machine_checks.check_versions,
    "ports": network_checks.check_ports,
    "model": check_model,
    "tokenizer": check_tokenizer,
    "memory": device_checks.check_memory,
    "shared memory": device_checks.check_shared_memory,
    "swap": device_checks.check_swap,
    "disks": check_disks,
    "open files": machine_checks.check_descriptors,
    "processes": machine_checks.check_processes,
    "locked memory": machine_checks.check_locked_memory,
    "processors": machine_checks.check_processors,
    "numerics": check_numerics,
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
