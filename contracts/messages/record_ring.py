"""A bounded number of request records, of bounded bytes: the oldest go first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Generic, Protocol, TypeVar

from twinpool.contracts.messages.request_record import RequestRecord

_Key = tuple[str, str]


class KeptRecord(Protocol):
    """A record, or what one can be made of."""

    @property
    def router(self) -> str: ...
    @property
    def request_id(self) -> str: ...
    @property
    def arrived(self) -> float: ...
    @property
    def nbytes(self) -> int: ...
    def is_of(self, asked: str) -> bool: ...


R = TypeVar("R", bound=KeptRecord)


class RecordRing(Generic[R]):
    """The latest records. A record of a request that is there already takes its place, as the newest."""

    def __init__(self, most: int, max_bytes: int) -> None:
        """`most`: records; 0: none is kept."""
        self._most, self._max_bytes = most, max_bytes
        self._records: OrderedDict[_Key, R] = OrderedDict()
        self.nbytes = 0
        """About how much memory the records take."""

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[R]:
        """The records, the oldest first."""
        return iter(list(self._records.values()))

    def put(self, record: R) -> None:
        """Keep a record, as the newest."""
        key = (record.router, record.request_id)
        before = self._records.pop(key, None)
        if before is not None:
            self.nbytes -= before.nbytes
        self._records[key] = record
        self.nbytes += record.nbytes
        while self._records and (len(self._records) > self._most or self.nbytes > self._max_bytes):
            self.nbytes -= self._records.popitem(last=False)[1].nbytes

    def recent(self, count: int) -> list[R]:
        """The newest records, `count` at most, the newest first."""
        newest = reversed(self._records.values())
        return [record for _, record in zip(range(max(0, count)), newest, strict=False)]

    def get(self, router: str, request_id: str) -> R | None:
        return self._records.get((router, request_id))

    def find(self, asked: str) -> list[R]:
        """The records that an id asks for, the oldest first."""
        return [record for record in self._records.values() if record.is_of(asked)]

    def kept_s(self, now: float) -> float:
        """Seconds since the oldest record's request came; `now`: seconds since 1970. 0 without records."""
        oldest = next(iter(self._records.values()), None)
        return max(0.0, now - oldest.arrived) if oldest is not None else 0.0


def in_order(records: Iterable[RequestRecord]) -> list[RequestRecord]:
    """Sort the records that one id asks for: by request, then by the choices' numbers, which end their ids."""
    some = list(records)
    came: dict[str, float] = {}
    for record in some:
        answer = record.answer_id or record.request_id
        came[answer] = min(record.arrived, came.get(answer, record.arrived))

    def key(record: RequestRecord) -> tuple[float, str, int]:
        number = record.request_id.rpartition("-")[2]
        answer = record.answer_id or record.request_id
        return came[answer], answer, int(number) if number.isdigit() else 0

    return sorted(some, key=key)
