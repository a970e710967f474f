"""Fingerprints: what two workers must have in common before one hands state to the other.

Every hello between workers and every registration with the controller carries a `Fingerprint`. Two workers whose
fingerprints don't match (`mismatch`) refuse each other before a byte is written; the reason names both sides.
"""

from __future__ import annotations

from twinpool.contracts.message_types import Message, Uint32

PROTOCOL = 4
"""Version of the messages between workers. A build that can't talk to the one before it has a larger one; fields and
messages that the other side may skip don't change it."""


class Fingerprint(Message, frozen=True):
    """Protocol, state layout, numerics class and weights of one worker."""

    protocol: Uint32
    """Version of the messages between workers: `PROTOCOL` of its build."""
    layout: str
    """Digest of the pools, their buffers, shapes and dtypes."""
    numerics: str
    """As `numerics_class` makes it: the mode of ``engine.numerics``, and all that the bits of a result depend on in
    it."""
    weights: str
    """Digest of the checkpoint: the numbers of its `config.json`, its tensors' headers, and samples of their bytes; of
    weights that were changed while the cluster served, also that of their files, and `WeightsVersion.serial`."""


REMEDIES = {
    "protocol": "run builds that speak the same protocol",
    "layout": "give both the same cache settings and model",
    "weights": "give both the same checkpoint",
    "numerics": (
        "under engine.numerics=invariant both must be of one class: set engine.numerics_class to a level that both "
        "machines run, and install the same build and libraries"
    ),
}
"""What makes two workers alike in each part of their fingerprints."""


def numerics_class(mode: str, computed_by: str) -> str:
    """The numerics class of a worker that computes in `mode` (``invariant`` or ``fast``); `computed_by` names kernels,
    instruction set and libraries."""
    return f"{mode}:{computed_by}"


def differing(ours: Fingerprint, theirs: Fingerprint) -> tuple[str, ...]:
    """The parts by which two workers can't hand over to each other; none where they can.

    Protocol, layout and weights must be equal. So must the numerics classes, unless both workers compute under
    ``fast``, whose results may differ by rounding.
    """
    free = "numerics" if _fast(ours) and _fast(theirs) else ""
    return tuple(part for part in REMEDIES if part != free and getattr(ours, part) != getattr(theirs, part))


def mismatch(ours: Fingerprint, theirs: Fingerprint, our_name: str, their_name: str) -> str | None:
    """Why the two workers can't hand over to each other, in one sentence that names both sides; None where they can."""
    for part in differing(ours, theirs):
        verb = "computes as" if part == "numerics" else "has"
        mine, its = getattr(ours, part), getattr(theirs, part)
        return f"{part}: {our_name} {verb} {mine}, {their_name} {verb} {its}; {REMEDIES[part]}"
    return None


def _fast(fingerprint: Fingerprint) -> bool:
    return fingerprint.numerics.partition(":")[0] == "fast"


def binding_class(fingerprint: Fingerprint | None) -> str:
    """The numerics class and the weights of all workers that may continue an answer which a worker with this
    fingerprint began, so that its bits are those of one run; under ``fast`` the weights alone. Empty while the worker
    hasn't registered."""
    if fingerprint is None:
        return ""
    return fingerprint.weights if _fast(fingerprint) else f"{fingerprint.numerics} {fingerprint.weights}"


def handover_class(fingerprint: Fingerprint | None) -> str:
    """The class of all workers that can hand over to a worker with this fingerprint: two are of one class where
    `mismatch` finds nothing. Empty while the worker hasn't registered."""
    if fingerprint is None:
        return ""
    return f"{fingerprint.protocol} {fingerprint.layout} {binding_class(fingerprint)}"
