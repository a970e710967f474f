"""Limits of the frames by which workers renew their leases: a `StreamOpening`, then `Renewal`s and `LeaseGrant`s."""

from __future__ import annotations

SILENCE_S = 60.0
"""Seconds without a sign of life after which a stream counts as cut. Renewals are signs of life, and one that isn't
answered in time ends the stream much sooner; so neither end says anything else in between."""
RENEWAL_BYTES = 1024 * 1024
"""Bytes of the largest renewal: a status with its counters."""
UNREAD_BYTES = 64 * 1024
"""Bytes that may wait for a worker when it renews: it does so after its last grant has come, so more of them are of one
that reads none."""
GRANT_BYTES = 4 * 1024 * 1024
"""Bytes of the largest grant: it names the ended incarnations of all workers."""
