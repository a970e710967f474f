"""Whether two workers can hand over to each other: same model, same state, same numerics, same plane."""

from __future__ import annotations

import hashlib
import json

from twinpool.cache.memory.kv_cache_spec import PoolSetSpec
from twinpool.cache.memory.page_moves import describe_spec
from twinpool.contracts.errors import LayoutMismatch
from twinpool.contracts.ids import WorkerName
from twinpool.contracts.messages.fingerprint import PROTOCOL, Fingerprint, mismatch
from twinpool.transfer.rooms import room_messages as m


def fingerprint(weights: str, spec: PoolSetSpec, numerics: str) -> Fingerprint:
    """Return the fingerprint of a worker of this build. `spec`: its pool set, of which the layout over all its ranks
    counts."""
    described = json.dumps(describe_spec(spec.whole), sort_keys=True)
    return Fingerprint(PROTOCOL, hashlib.blake2b(described.encode(), digest_size=16).hexdigest(), numerics, weights)


def refuse_mismatch(name: WorkerName, mine: Fingerprint, layout: dict[str, object], plane: str, hello: m.Hello) -> None:
    """Check the hello of a peer. Raises `LayoutMismatch` that names the first difference, with both values."""
    if plane != hello.plane:
        raise LayoutMismatch(f"transfer.plane: {name} has {plane}, {hello.worker} has {hello.plane}")
    if mine.protocol == hello.fingerprint.protocol:
        for path, ours, theirs in _differences(layout, hello.layout, ""):
            raise LayoutMismatch(f"{path}: {name} has {ours}, {hello.worker} has {theirs}")
    reason = mismatch(mine, hello.fingerprint, name, hello.worker)
    if reason is not None:
        raise LayoutMismatch(reason)


def _differences(ours: object, theirs: object, path: str) -> list[tuple[str, object, object]]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        out = []
        for key in sorted({*ours, *theirs}):
            name = f"{path}.{key}" if path else str(key)
            out += _differences(ours.get(key), theirs.get(key), name)
        return out
    if isinstance(ours, list | tuple) and isinstance(theirs, list | tuple):
        return [] if list(ours) == list(theirs) else [(path, list(ours), list(theirs))]
    return [] if ours == theirs else [(path, ours, theirs)]
