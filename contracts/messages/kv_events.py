"""KV events: which pages came to a tier or went, in the format that existing indexers read.

The tree, the tiers and storage emit plain values into a `KVEventLog`, in the order of the changes: `BlockStored`,
`BlockRemoved`, `AllBlocksCleared`. A `KVEventPublisher` (cache/tiers/kv_event_publisher.py) sends what a round
collected as one batch; a `KVEventSubscriber` (router/kv_indexer/kv_event_subscriber.py) follows it and rebuilds the
index. This file holds the events and their bytes; it does no I/O.

**The format** is that of vLLM's `vllm/distributed/kv_events.py` in its array form (v0.9 up to the releases that moved
the events to maps), which Dynamo's indexer accepts beside the map form; for SGLang and llm-d see below. A message has
three frames: the topic, the sequence number (8 bytes, big-endian, from 0), and a msgpack payload, an array whose
structs are arrays tagged by name:

    batch   [ts: float seconds since 1970, events: array, data_parallel_rank: int or nil]
    event   ["BlockStored", block_hashes, parent_block_hash, token_ids, block_size, lora_id, medium, lora_name,
                 extra_keys (left out when there is no salt)]
            ["BlockRemoved", block_hashes, medium]
            ["AllBlocksCleared"]  or, for a single tier,  ["AllBlocksCleared", medium]

- Hashes are the 16-byte block hashes of the pages (`contracts.block_hash.block_hashes`), as msgpack *bin*: vLLM and its
  readers take bytes or integers. They are content-addressed, so the same prefix has the same hash on every worker and
  tier, and all token ids of a prefix (and its salt) are in the hash.
- `medium` is "GPU" for the device tier, "CPU_PINNED" for the host tier and "DISK" for storage: the spellings that
  every version of Dynamo's reader knows. The reader here takes the other common spellings as well.
- A salt (adapter or tenant) travels in `extra_keys`, one array for each block, where vLLM puts its cache salts;
  `lora_id` and `lora_name` are nil.
- SGLang's `disaggregation/kv_events.py` publishes the same frames, and the same arrays up to `medium`, with the same
  media; but its hashes are integers, and a salt is a map where `lora_name` is here. A reader typed like its structs
  (`list[int]`) doesn't read bytes.
- llm-d's indexer (`pkg/kvevents`, its vLLM and SGLang adapters) reads bytes or integers: of bytes the last eight. It
  keeps a medium as it is spelled, passes over fields that it doesn't know, and drops a run whose parent it hasn't met,
  which is why parents are published before their children. Of the topic it expects `kv@POD@MODEL`; text in `extra_keys`
  it takes for hashes of images; and it does nothing at "AllBlocksCleared".
- An indexer that does not know the second element of "AllBlocksCleared" forgets more than it must: it loses hits and
  is never wrong about the blocks that it keeps.

A page that was stored twice in a tier is in it once, and a removal of a page that isn't there changes nothing: so a
batch may be applied again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgpack

from twinpool.contracts.errors import WireError

__all__ = [
    "END",
    "TRUTH",
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "EventMedium",
    "KVEventBatch",
    "KvEvent",
    "decode_batch",
    "encode_batch",
]


class EventMedium(StrEnum):
    """The tier that an event is about."""

    DEVICE = "device"
    HOST = "host"
    STORAGE = "storage"


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A run of pages, each the child of the one before, is now in `tier`.

    `parent`: the hash of the page before the first, None at the start of a sequence. `tokens`: the token ids of all the
    pages, `page_tokens` for each hash.
    """

    tier: EventMedium
    parent: bytes | None
    hashes: tuple[bytes, ...]
    tokens: tuple[int, ...]
    page_tokens: int
    salt: str = ""

    def __post_init__(self) -> None:
        assert self.hashes, "a run has pages"
        assert len(self.tokens) == len(self.hashes) * self.page_tokens, "every page is full"


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """These pages are no longer in `tier`."""

    tier: EventMedium
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """`tier` holds nothing any more; None: no tier does."""

    tier: EventMedium | None = None


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared
"""One event of a batch."""


@dataclass(frozen=True, slots=True)
class KVEventBatch:
    """The content of one message; `events` are in the order in which they happened. `ts`: seconds since 1970 at the
    publisher. `rank`: the data-parallel rank, None where there is none."""

    ts: float
    events: tuple[KvEvent, ...]
    rank: int | None


_MEDIA = {EventMedium.DEVICE: "GPU", EventMedium.HOST: "CPU_PINNED", EventMedium.STORAGE: "DISK"}
_TIERS = {
    None: EventMedium.DEVICE,
    "GPU": EventMedium.DEVICE,
    "DEVICE": EventMedium.DEVICE,
    "CPU_PINNED": EventMedium.HOST,
    "CPU": EventMedium.HOST,
    "CPU_TIER1": EventMedium.HOST,
    "DISK": EventMedium.STORAGE,
    "STORAGE": EventMedium.STORAGE,
    "NVME": EventMedium.STORAGE,
    "CPU_TIER2": EventMedium.STORAGE,
    "EXTERNAL": EventMedium.STORAGE,
}


def encode_batch(ts: float, events: Sequence[KvEvent], rank: int | None) -> bytes:
    """Return the payload of one message; the arguments are those of `KVEventBatch`."""
    return msgpack.packb([ts, [_to_array(event) for event in events], rank])  # type: ignore[no-any-return]


def _to_array(event: KvEvent) -> list[Any]:
    match event:
        case BlockStored():
            out = ["BlockStored", event.hashes, event.parent, event.tokens, event.page_tokens, None]
            out += [_MEDIA[event.tier], None]
            return [*out, [[event.salt]] * len(event.hashes)] if event.salt else out
        case BlockRemoved():
            return ["BlockRemoved", event.hashes, _MEDIA[event.tier]]
        case AllBlocksCleared():
            return ["AllBlocksCleared"] if event.tier is None else ["AllBlocksCleared", _MEDIA[event.tier]]


def decode_batch(payload: bytes) -> KVEventBatch:
    """Read a payload; raises `WireError` for anything that isn't a batch in the format above."""
    try:
        raw = msgpack.unpackb(payload, use_list=False, strict_map_key=True)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise WireError(f"a batch of KV events is not msgpack: {error}") from None
    match raw:
        case (float() | int() as ts, tuple() as events, *rest) if not rest or rest[0] is None or _is_int(rest[0]):
            return KVEventBatch(float(ts), tuple(_from_array(event) for event in events), rest[0] if rest else None)
    raise WireError("a batch of KV events must be [ts, events, rank]")


def _from_array(raw: Any) -> KvEvent:
    match raw:
        case ("BlockStored", tuple() as hashes, parent, tuple() as tokens, page_tokens, *rest):
            extra = rest[3] if len(rest) > 3 else None
            return _stored(hashes, parent, tokens, page_tokens, _tier(rest[1] if len(rest) > 1 else None), extra)
        case ("BlockRemoved", tuple() as hashes, *rest) if all(isinstance(h, bytes) for h in hashes):
            return BlockRemoved(_tier(rest[0] if rest else None), hashes)
        case ("AllBlocksCleared",):
            return AllBlocksCleared()
        case ("AllBlocksCleared", medium, *_):
            return AllBlocksCleared(None if medium is None else _tier(medium))
    raise WireError(f"not a KV event: {str(raw)[:80]}")


def _stored(
    hashes: tuple[Any, ...], parent: Any, tokens: tuple[Any, ...], page_tokens: Any, tier: EventMedium, extra: Any
) -> BlockStored:
    if not hashes or not all(isinstance(h, bytes) for h in hashes) or not isinstance(parent, bytes | None):
        raise WireError("BlockStored needs hashes as bytes, and a parent as bytes or nil")
    if not _is_int(page_tokens) or page_tokens < 1 or len(tokens) != len(hashes) * page_tokens:
        raise WireError(f"BlockStored has {len(tokens)} tokens for {len(hashes)} blocks of {page_tokens!r}")
    if not all(map(_is_int, tokens)):
        raise WireError("BlockStored has tokens that are no integers")
    salt = ""
    match extra:
        case None:
            pass
        case ((str() as salt, *_), *_):
            pass
        case _:
            raise WireError("BlockStored has extra keys that are not [[salt], ...]")
    return BlockStored(tier, parent, hashes, tokens, page_tokens, salt)


def _tier(medium: Any) -> EventMedium:
    if not isinstance(medium, str | None) or medium not in _TIERS:
        raise WireError(f"unknown medium {medium!r}; known: {', '.join(m for m in _TIERS if m)}")
    return _TIERS[medium]


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


END = (-1).to_bytes(8, "big", signed=True)
"""The sequence number of the message that ends the answer to a replay request."""
TRUTH = b"truth"
"""The replay request for all that the tiers hold, in place of a sequence number."""
