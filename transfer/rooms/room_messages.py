"""What rooms say: messages between prefill and decode, and the metadata slot that comes with the last page.

*Messages* are frozen values, an explicit tag for each, msgpack on the wire. Control messages go over the control
socket. Notices go through the data plane, ordered after the writes they tell of. Each has a checksum behind it: a
notice says which pages are right, and one with a bit flipped on its way could still be read, as something else. Nothing
but the types in `TAGS` can come out of bytes; anything else raises `WireError`.

*Metadata slots* have everything prefill computed that is not a page, one slot a hand-over. A slot is `SLOT_BYTES` of
registered memory: a length and a CRC-32 of 4 bytes each, then msgpack. The reader takes a *copy* out and returns the
slot; nothing keeps a view into it. Room and epoch are inside, so that metadata of another room is refused. Values that
come after those of `HandoverMetadata` are left out: builds before this one had a seventh, the state of a draft model,
which they read and write, so that a nil stands in its place.
"""

from __future__ import annotations

import typing
import zlib
from dataclasses import dataclass
from typing import Any

import msgpack
import torch

from twinpool.contracts.errors import ErrorKind, WireError
from twinpool.contracts.ids import RoomId
from twinpool.contracts.messages.fingerprint import Fingerprint
from twinpool.contracts.sampling_params import ROUTED_BYTES, ChosenExperts, TokenLogprob
from twinpool.transfer.planes.data_plane import SLOT_BYTES

# ------------------------------------------------------------ messages


_REASON_CHARS = 500


def reason_of(error: Exception | str) -> str:
    """Return the reason that a message carries: cut short, since it may quote what a peer sent."""
    return str(error)[:_REASON_CHARS]


# ---------------------------------------------------------------- control: decode -> prefill


@dataclass(frozen=True, slots=True)
class Hello:
    """The first message of a connection: the reader's identity, the layout of its state, and where to write it."""

    worker: str
    incarnation: int
    expects: int
    """The writer's incarnation that this hello is for."""
    fingerprint: Fingerprint
    layout: dict[str, Any]
    """The layout of the pools, of which the fingerprint has only a digest, so that a difference can be named."""
    plane: str
    descriptor: dict[str, Any]
    pid: int
    started: int
    """Start time of the process in clock ticks since boot, so that a reused pid isn't taken for it."""
    boot: str
    """Name of the running kernel and pid namespace that `pid` belongs to."""


@dataclass(frozen=True, slots=True)
class GrantedPages:
    """The places of pages `first ..` of a sequence in one pool: pages or slots of the reader, with their epochs."""

    pool: str
    first: int
    indices: tuple[int, ...]
    epochs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PageGrant:
    """Gives the writer these places and this metadata slot to write. Of a pool that isn't named nothing is wanted."""

    room: RoomId
    places: tuple[GrantedPages, ...]
    slot: int
    slot_epoch: int
    ticket: int
    """A random number above 0, drawn for this grant and told to nobody else. Notices of its writes, and last words
    about them, carry it: so only the writer that was granted the places can give them back."""


@dataclass(frozen=True, slots=True)
class AbortRoom:
    """Decode gives the room up: the writer must write no more, then answer `WriterQuiesced`."""

    room: RoomId
    reason: str
    damaged: bool
    """Whether pages or metadata arrived that did not match their tags."""
    ticket: int
    """The grant's ticket, for the answer; 0 where there was no grant."""


@dataclass(frozen=True, slots=True)
class HandoverReceived:
    """Decode has everything: all pages arrived and were verified, and the metadata was copied out."""

    room: RoomId


# ---------------------------------------------------------------- control: prefill -> decode


@dataclass(frozen=True, slots=True)
class RankProcess:
    """The process of one of a worker's other ranks; fields as in `Welcome`."""

    pid: int
    started: int
    boot: str


@dataclass(frozen=True, slots=True)
class Welcome:
    """The writer's answer to a hello that fits: its identity, and the processes that will write."""

    worker: str
    incarnation: int
    fingerprint: Fingerprint
    pid: int
    started: int
    """Start time of the process in clock ticks since boot, so that a reused pid isn't taken for it."""
    boot: str
    """Name of the running kernel and pid namespace that `pid` belongs to."""
    others: tuple[RankProcess, ...]
    """Processes of the worker's other ranks, which will write, too."""


@dataclass(frozen=True, slots=True)
class PeerRefused:
    """The reader is no peer of this writer, which writes nothing to it: its hello is missing, or doesn't fit.

    This proves nothing about rooms that the writer was granted before: their places come back by last words about them.
    """

    reason: str


@dataclass(frozen=True, slots=True)
class MessageRejected:
    """One message of the reader could not be used and has changed nothing. Everything else goes on."""

    reason: str
    room: str
    """The room that the message was about; empty where that isn't known."""


# ---------------------------------------------------------------- notices: prefill -> decode, after the writes


@dataclass(frozen=True, slots=True)
class PageTags:
    """Content tags (block hash, digest) of pages `first ..` of one pool, which are finished and in their places."""

    pool: str
    first: int
    keys: tuple[bytes, ...]
    digests: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PagesWritten:
    """One write is in place, in every pool that it names."""

    room: RoomId
    ticket: int
    """The grant's ticket, in all notices."""
    parts: tuple[PageTags, ...]


@dataclass(frozen=True, slots=True)
class SlotWritten:
    """The metadata slot is written, as the last of all that the room hands over."""

    room: RoomId
    ticket: int
    hidden_us: int = 0
    """Microseconds for which pages of the room were being written before the last of them was computed."""
    exposed_us: int = 0
    """Microseconds from then until everything was written."""


@dataclass(frozen=True, slots=True)
class WriterQuiesced:
    """Answer to `AbortRoom`: nothing of this room will be written any more."""

    room: RoomId
    ticket: int
    torn: bool = False
    """Whether a write of the room has failed, so that bytes of it may still be on their way. Where access is by peer,
    the reader ends it before it uses the places again."""


@dataclass(frozen=True, slots=True)
class RoomFailed:
    """Prefill gives the request up; nothing of this room will be written any more."""

    room: RoomId
    ticket: int
    """The grant's; 0 where the room ended before its grant came, which is then answered once more, with its ticket."""
    kind: ErrorKind
    message: str
    torn: bool = False
    """As in `WriterQuiesced`."""


@dataclass(frozen=True, slots=True)
class NothingToDecode:
    """The request ended with its first token; nothing of this room will be written any more."""

    room: RoomId
    ticket: int
    """As in `RoomFailed`."""
    torn: bool = False
    """As in `WriterQuiesced`."""


ControlMessage = Hello | PageGrant | AbortRoom | HandoverReceived | Welcome | PeerRefused | MessageRejected
Notice = PagesWritten | SlotWritten | WriterQuiesced | RoomFailed | NothingToDecode
RoomMessage = ControlMessage | Notice

TAGS: dict[int, type[Any]] = {
    1: Hello,
    2: Welcome,
    3: PeerRefused,
    4: PageGrant,
    5: AbortRoom,
    6: HandoverReceived,
    7: MessageRejected,
    16: PagesWritten,
    17: SlotWritten,
    18: WriterQuiesced,
    19: RoomFailed,
    20: NothingToDecode,
}
"""The number on the wire of each message type; a number that was used is never given to another type."""
_TAG_OF = {cls: tag for tag, cls in TAGS.items()}
_OF_ROOMS = (4, 5, 6)
_SUM_BYTES = 4
MAX_NAME = 256
"""Most characters of a room's name."""
_HINTS = {cls: typing.get_type_hints(cls) for cls in (*TAGS.values(), GrantedPages, PageTags, RankProcess, Fingerprint)}


def encode(message: RoomMessage) -> bytes:
    packed: bytes = msgpack.packb([_TAG_OF[type(message)], *_values(message)], default=_values)
    return packed


def encode_notice(notice: Notice) -> bytes:
    """Return a notice as the data plane carries it: packed, with its checksum behind it."""
    return summed(encode(notice))


def summed(packed: bytes) -> bytes:
    """Return a packed notice with its checksum behind it: CRC-32, 4 bytes, little-endian."""
    return packed + zlib.crc32(packed).to_bytes(_SUM_BYTES, "little")


def decode_notice(data: bytes | memoryview) -> Notice:
    """Return the notice in `data`. Raises `WireError` for bytes that were changed on their way, for a message of
    another kind, and as `decode` does."""
    packed = data[:-_SUM_BYTES]
    if data[-_SUM_BYTES:] != zlib.crc32(packed).to_bytes(_SUM_BYTES, "little"):
        raise WireError("a notice's checksum is that of something else")
    message = decode(packed)
    if not isinstance(message, Notice):
        raise WireError(f"{type(message).__name__} is no notice")
    return message


def _values(value: Any) -> list[Any]:
    return [getattr(value, name) for name in _HINTS[type(value)]]


def decode(data: bytes | memoryview) -> RoomMessage:
    """Return the message in `data`. Raises `WireError` for all but a message of `TAGS` with fields of its types."""
    try:
        parts = msgpack.unpackb(data, use_list=False)
    except (ValueError, msgpack.UnpackException) as error:
        raise WireError(f"not msgpack: {error}") from None
    if not isinstance(parts, tuple) or not parts or not isinstance(parts[0], int) or parts[0] not in TAGS:
        raise WireError(f"no message has the tag {parts[0] if isinstance(parts, tuple) and parts else parts!r:.80}")
    message: RoomMessage = _build(TAGS[parts[0]], parts[1:])
    return message


def room_of(data: bytes) -> str:
    """Return the room of a message that can't be decoded, as far as it can be told; else empty. Never raises."""
    try:
        parts = msgpack.unpackb(data, use_list=False)
    except (ValueError, msgpack.UnpackException):
        return ""
    if not isinstance(parts, tuple) or len(parts) < 2 or type(parts[0]) is not int or parts[0] not in _OF_ROOMS:
        return ""
    return parts[1] if isinstance(parts[1], str) and len(parts[1]) <= MAX_NAME else ""


def _build(cls: type[Any], values: tuple[Any, ...]) -> Any:
    """Build a message of `cls`. Values beyond its fields come from a newer build, and are skipped."""
    hints = _HINTS[cls]
    if len(values) < len(hints):
        raise WireError(f"{cls.__name__} has {len(hints)} fields, got {len(values)}")
    return cls(*(_field(cls, name, kind, v) for (name, kind), v in zip(hints.items(), values, strict=False)))


def _field(cls: type, name: str, kind: Any, value: Any) -> Any:
    origin = typing.get_origin(kind)
    if kind is ErrorKind:
        if type(value) is not str:
            raise WireError(f"{cls.__name__}.{name} is no error kind: {value!r:.80}")
        return ErrorKind(value)
    if kind in _HINTS:
        if not isinstance(value, tuple):
            raise WireError(f"{cls.__name__}.{name} must be {kind.__name__}, got {value!r:.80}")
        return _build(kind, value)
    if origin is tuple:
        inner = typing.get_args(kind)[0]
        if inner in _HINTS and isinstance(value, tuple) and all(isinstance(v, tuple) for v in value):
            return tuple(_build(inner, v) for v in value)
        good = isinstance(value, tuple) and all(type(v) is inner for v in value)
    else:
        plain = origin or getattr(kind, "__supertype__", kind)
        good = type(value) is plain and not (kind is RoomId and len(value) > MAX_NAME)
    if not good:
        raise WireError(f"{cls.__name__}.{name} must be {kind}, got {value!r:.80}")
    return value


# ------------------------------------------------------------ metadata slots


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
