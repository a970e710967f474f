"""Checks of what outlives a cluster.

- The storage tier: whether pages can be written there, and whether there is room for as many as it may hold.
- The controller's ledger: there, writable, and kept as safely as the controller needs it.
- What earlier runs left behind: run files of dead clusters, temporary folders, memory in /dev/shm without a user.
- Certificates and keys: valid, belonging together, for a while yet, and for their owner's eyes alone.
"""

from __future__ import annotations

import os
import re
import shutil
import sqlite3
import stat
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from importlib.metadata import entry_points
from itertools import islice
from pathlib import Path

from twinpool.cache.storage.backends.backend_factory import ENTRY_POINTS
from twinpool.cluster.controller.open_ledger import PASSWORD_VARIABLE, open_ledger
from twinpool.cluster.doctor.doctor_case import DoctorCase, Finding, error, fine, from_refusal, sized, warning
from twinpool.cluster.processes.process_ids import same_process
from twinpool.cluster.processes.reaper import ReapedRun
from twinpool.cluster.processes.run_folder import runs_folder
from twinpool.cluster.serve.security_check import check_security
from twinpool.contracts.config.cache_config import StorageConfig
from twinpool.contracts.config.ledger_place import on_server, without_password
from twinpool.contracts.credentials.certificate_check import read_certificates
from twinpool.contracts.errors import ConfigError, TwinpoolError
from twinpool.contracts.key_file import read_key_file
from twinpool.contracts.outside_data import read_json

ASK_S = 2.0
MAX_FILES = 20_000
"""Files of a folder that are looked at: the doctor is to be quick."""


def check_storage(case: DoctorCase) -> Iterator[Finding]:
    """The backend that `cache.storage.backend` names."""
    storage = case.config.cache.storage
    match storage.backend:
        case "none":
            yield fine("no storage tier (cache.storage.backend=none)")
        case "memory":
            yield fine("storage lies in the memory of one process")
        case "file":
            yield from _folder(storage)
        case "redis":
            yield from _server(storage)
        case other:
            if other in {point.name for point in entry_points(group=ENTRY_POINTS)}:
                yield fine(f"{other} is of another package, which looks after itself")
            else:
                yield error(f"cache.storage.backend={other} is unknown", "name none, memory, file or redis")


def _folder(storage: StorageConfig) -> Iterator[Finding]:
    folder = Path(storage.path).expanduser()
    there = next(one for one in (folder, *folder.parents) if one.exists())
    problem = probe_folder(there)
    if problem:
        yield error(f"cache.storage.path {folder} can't be written: {problem}", "name a folder that can be")
        return
    room = shutil.disk_usage(there).free
    files = list(islice(folder.glob("*/*"), MAX_FILES)) if folder.is_dir() else []
    held = sum(file.stat().st_size for file in files if file.is_file())
    if len(files) == MAX_FILES:
        yield fine(f"{folder} can be written, and holds many pages already; {sized(room)} free")
    elif room + held < storage.max_bytes:
        yield warning(
            f"{folder} has room for {sized(room + held)}, and cache.storage.max_bytes is {sized(storage.max_bytes)}",
            "lower cache.storage.max_bytes, or make room",
            "when the disk is full pages aren't stored any more, which counts as a failed write of each",
        )
    else:
        yield fine(f"{folder} can be written; {sized(room)} free")


def _server(storage: StorageConfig) -> Iterator[Finding]:
    shown = without_password(storage.url)
    try:
        import redis

        from twinpool.contracts.wire.redis_connection import open_redis
    except ModuleNotFoundError:
        yield error("cache.storage.backend=redis needs a package", "pip install 'twinpool[redis]'")
        return
    try:
        client = open_redis(storage.url, ASK_S, "cache.storage.url")
    except ConfigError as refused:
        yield error(str(refused), "set cache.storage.url, as redis://host:6379/0")
        return
    try:
        memory = client.info("memory")
    except (redis.RedisError, OSError) as problem:
        yield error(f"cache.storage.url {shown} doesn't answer: {' '.join(str(problem).split())}", "start the server")
        return
    finally:
        client.close()
    most, policy = int(memory.get("maxmemory", 0)), str(memory.get("maxmemory_policy", ""))
    if most and policy == "noeviction":
        yield warning(
            f"{shown} takes {sized(most)} and evicts nothing (noeviction): when it is full no page is stored any more",
            "config set maxmemory-policy allkeys-lru, or set cache.storage.ttl_s",
        )
    else:
        yield fine(f"{shown} answers; {sized(most) if most else 'no limit'} of memory, {policy or 'no policy'}")


def probe_folder(folder: Path) -> str:
    """Why no file can be made in a folder, in words; empty where one was made, written and removed."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".twinpool-doctor-") as probe:
            probe.write(b"probe")
            probe.flush()
    except OSError as problem:
        return problem.strerror or str(problem)
    return ""


BUSY_S = 1.0


def check_ledger_access(case: DoctorCase) -> Iterator[Finding]:
    """Open the ledger as a controller would, write nothing that stays."""
    cluster = case.config.cluster
    if not cluster.ledger:
        yield fine("the table goes with the run (cluster.ledger is empty)")
    elif on_server(cluster.ledger):
        yield from _server_findings(case)
    else:
        yield from _file(Path(cluster.ledger).expanduser())


def _server_findings(case: DoctorCase) -> Iterator[Finding]:
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


_RUN = re.compile(r"twinpool-\w{8}")
"""The name of a run's temporary folder."""
MAX_RUNS = 32
"""Folders that are looked at: each costs a look at all processes."""
YOUNG_S = 120.0
"""A run that began so lately may have no processes yet."""
MIN_SEGMENT = 1 << 20
"""Bytes of a file in /dev/shm that are worth a word."""


def check_leftovers(case: DoctorCase) -> Iterator[Finding]:
    """Of this user alone; nothing is removed."""
    found = [*_run_files(), *_folders(case), *_segments(case)]
    yield from found or [fine("nothing is left of earlier runs")]


def _run_files() -> Iterator[Finding]:
    dead = []
    for path in sorted(runs_folder().glob("run-*.json")):
        try:
            tree = read_json(path.read_text())
            if not same_process(int(tree["pid"]), int(tree["started"])):
                dead.append(path)
        except (OSError, ValueError, LookupError, TypeError):
            dead.append(path)
    if dead:
        yield warning(
            f"{len(dead)} run files of clusters that are gone, {dead[0]} among them",
            f"rm {' '.join(map(str, dead[:4]))}{' ...' if len(dead) > 4 else ''}",
            "a cluster that was killed with its reaper leaves them; commands skip them",
        )


def _folders(case: DoctorCase) -> Iterator[Finding]:
    """Temporary folders of runs of which no process is left."""
    now, dead = case.host.now().timestamp(), list[Path]()
    runs = sorted(one for one in case.host.temporary.glob("twinpool-*") if _RUN.fullmatch(one.name))
    for folder in runs[:MAX_RUNS]:
        try:
            there = folder.stat()
        except OSError:
            continue
        ours = folder.is_dir() and not folder.is_symlink() and there.st_uid == os.getuid()
        old = now - there.st_mtime > YOUNG_S
        if ours and old and not ReapedRun(folder.name, str(folder)).members():
            dead.append(folder)
    if dead:
        yield warning(
            f"{len(dead)} temporary folders of runs that are gone, {dead[0]} among them",
            f"rm -r {' '.join(map(str, dead[:4]))}{' ...' if len(dead) > 4 else ''}",
        )


def _segments(case: DoctorCase) -> Iterator[Finding]:
    """Files in /dev/shm that no process has open or mapped: they take memory until somebody removes them."""
    ours = {}
    try:
        entries = list(os.scandir(case.host.shm))
    except OSError:
        return  # Told of with shared memory.
    now = case.host.now().timestamp()
    for entry in entries:
        try:
            there = entry.stat(follow_symlinks=False)
        except OSError:
            continue
        big = entry.is_file(follow_symlinks=False) and there.st_blocks * 512 >= MIN_SEGMENT
        if big and there.st_uid == os.getuid() and now - there.st_mtime > YOUNG_S:
            ours[entry.path] = there.st_blocks * 512
    if not ours:
        return
    used = _in_use(case)
    dead = {path: size for path, size in ours.items() if path not in used}
    if dead:
        yield warning(
            f"{sized(sum(dead.values()))} of memory are held by {len(dead)} files of {case.host.shm} that no process "
            f"has open, {next(iter(dead))} among them",
            f"rm {' '.join(list(dead)[:4])}{' ...' if len(dead) > 4 else ''}",
        )


def _in_use(case: DoctorCase) -> set[str]:
    """Paths in /dev/shm that some process has open or mapped, as far as this user may see."""
    found, shm = set(), f"{case.host.shm}/"
    for process in case.host.proc.glob("[0-9]*"):
        for line in case.host.read(process / "maps").splitlines():
            if shm in line:
                found.add(line[line.index(shm) :].removesuffix(" (deleted)"))
        try:
            for link in os.scandir(process / "fd"):
                target = os.readlink(link.path)
                if target.startswith(shm):
                    found.add(target)
        except OSError:
            continue
    return found


SOON = timedelta(days=14)
"""A certificate that ends within this time is told of."""


_SECRETS = ("tls_key", "cluster_key", "curve_key", "keys_file", "admin_keys_file", "ledger_key", "ledger_password_file")
"""Keys of `security` whose files nobody else should read."""


def check_credentials(case: DoctorCase) -> Iterator[Finding]:
    """All that `security` names."""
    security, options, wrong = case.config.security, case.options, False
    try:
        check_security(security, options.host, 0, bind=False)
    except TwinpoolError as refused:
        wrong = True
        yield from_refusal(refused)
    for finding in (*_ends(case), *_modes(case), *_keys(case)):
        wrong = True
        yield finding
    if not wrong:
        named = [
            name
            for name in (*_SECRETS, "tls_cert", "cluster_cert", "cluster_ca", "ledger_ca")
            if getattr(security, name)
        ]
        yield fine(f"in order: {', '.join(named)}" if named else "no certificates or keys are configured")


def _ends(case: DoctorCase) -> Iterator[Finding]:
    for name in ("tls_cert", "cluster_cert", "cluster_ca", "ledger_cert", "ledger_ca"):
        path = getattr(case.config.security, name)
        if not path:
            continue
        try:
            ends = min(one.not_valid_after_utc for one in read_certificates(Path(path), f"security.{name}"))
        except ConfigError:
            continue  # Told of already.
        if timedelta() < ends - case.host.now() < SOON:
            yield warning(
                f"security.{name} {path} ends in {(ends - case.host.now()).days} days ({ends:%Y-%m-%d %H:%M} UTC)",
                "have a new one made in its place; new connections take it"
                if name.startswith("ledger")
                else "twinpool certs renew FOLDER; servers take the new one while they run",
            )


def _modes(case: DoctorCase) -> Iterator[Finding]:
    for name in _SECRETS:
        path = getattr(case.config.security, name)
        if not path:
            continue
        try:
            mode = stat.S_IMODE(Path(path).stat().st_mode)
        except OSError:
            continue  # Told of already.
        if mode & 0o077:
            yield warning(
                f"security.{name} {path} has mode {mode:o}: other users may read it",
                f"chmod 600 {path}",
            )


def _keys(case: DoctorCase) -> Iterator[Finding]:
    """API keys that have run out, where none is left."""
    for name in ("keys_file", "admin_keys_file"):
        path = getattr(case.config.security, name)
        try:
            keys = read_key_file(Path(path)).keys if path else ()
        except ConfigError:
            continue  # Told of already.
        if path and not any(not key.expired(case.host.now()) for key in keys):
            what = f"all {len(keys)} keys have run out" if keys else "it has no key"
            yield error(
                f"security.{name} {path}: {what}, so everybody is refused", "twinpool keys new NAME --file FILE"
            )
