"""Metadata slots: everything prefill computed that is not a page, one slot a hand-over.

A slot is `SLOT_BYTES` of registered memory: a length and a CRC-32 of 4 bytes each, then msgpack. The reader takes a
*copy* out and returns the slot; nothing keeps a view into it. Room and epoch are inside, so that metadata of another
room is refused. Values that come after those of `HandoverMetadata` are left out: builds before this one had a seventh,
the state of a draft model, which they read and write, so that a nil stands in its place.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import msgpack
import torch

from twinpool.contracts.errors import WireError
from twinpool.contracts.ids import RoomId
from twinpool.contracts.sampling_params import ROUTED_BYTES, ChosenExperts, TokenLogprob
from twinpool.transfer.planes.data_plane import SLOT_BYTES

_HEADER = 8
_NO_DRAFT_STATE = None


@dataclass(frozen=True, slots=True)
class HandoverMetadata:
    """The metadata of a hand-over: what decode needs besides pages to go on from prefill's last position."""

    room: RoomId
    slot_epoch: int
    """Epoch of the metadata slot, from the grant: `KVSender.seal` fills it in."""
    token: int
    """The first token, drawn by prefill."""
    logprob: TokenLogprob | None
    cached_tokens: int
    """Prompt tokens whose state prefill found in its tree."""
    computed_tokens: int


def pack(metadata: HandoverMetadata) -> bytes:
    """Return the bytes of a slot with this metadata. Raises `ValueError` when they don't fit into a slot."""
    told = metadata.logprob
    logprob: tuple[object, ...] | None = None
    if told is not None:
        experts = () if told.experts is None else (told.experts.top_k, told.experts.ids)
        logprob = (told.token, told.logprob, told.top, *experts)
    body: bytes = msgpack.packb(
        (
            metadata.room,
            metadata.slot_epoch,
            metadata.token,
            logprob,
            metadata.cached_tokens,
            metadata.computed_tokens,
            _NO_DRAFT_STATE,
        )
    )
    if len(body) + _HEADER > SLOT_BYTES:
        raise ValueError(f"metadata of {len(body)} bytes doesn't fit into a slot of {SLOT_BYTES}")
    return len(body).to_bytes(4, "little") + zlib.crc32(body).to_bytes(4, "little") + body


def copy_out(slots: torch.Tensor, slot: int, room: RoomId, epoch: int) -> HandoverMetadata:
    """Copy slot `slot` of `slots` (uint8 [slots, SLOT_BYTES]) out and check that it is this room's.

    Raises `WireError` when the bytes are damaged or belong to another room or epoch.
    """
    header = bytes(slots[slot, :_HEADER].numpy())
    size = int.from_bytes(header[:4], "little")
    body = bytes(slots[slot, _HEADER : _HEADER + size].numpy())
    if len(body) != size or zlib.crc32(body) != int.from_bytes(header[4:8], "little"):
        raise WireError(f"metadata slot {slot} is damaged")
    try:
        found, slot_epoch, token, logprob, cached, computed, *_ = msgpack.unpackb(body, use_list=False)
        score = None if logprob is None else _logprob(*logprob)
        _whole(token, cached, computed)
    except (ValueError, TypeError, IndexError, msgpack.UnpackException) as error:
        raise WireError(f"metadata slot {slot} can't be read: {error}") from None
    if found != room or slot_epoch != epoch:
        raise WireError(f"metadata slot {slot} holds room {found} epoch {slot_epoch}, wanted {room} epoch {epoch}")
    return HandoverMetadata(room, epoch, token, score, cached, computed)


def _whole(*numbers: object) -> None:
    """Check token ids and counts. Raises `TypeError` for anything else."""
    if not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
        raise TypeError(f"these must be whole numbers from 0 on: {numbers!r:.80}")


def _logprob(
    token: int, logprob: float, top: tuple[tuple[int, float], ...], top_k: int | None = None, ids: bytes = b""
) -> TokenLogprob:
    """What a slot has of the first token's; `top_k` and `ids`: its experts, where asked for."""
    if not all(type(value) in (float, int) for value in (logprob, *(value for _, value in top))):
        raise TypeError(f"log-probabilities must be numbers: {logprob!r:.80}")
    _whole(token, *(other for other, _ in top), top_k or 0)
    if type(ids) is not bytes or len(ids) > ROUTED_BYTES:
        raise TypeError(f"experts must be bytes, {ROUTED_BYTES} at most: {ids!r:.80}")
    return TokenLogprob(token, logprob, top, None if top_k is None else ChosenExperts(top_k, ids))
