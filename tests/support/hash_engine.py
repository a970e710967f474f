"""An engine whose tokens are a hash of exactly the state that it read: any stale, foreign or missing byte changes them.

It stands in for models of every kind: what position p writes into each pool is a function of its token and of every
byte that p may see, as for a real model, but any pool set will do and no rounding hides a difference. `recite` computes
the same answers from nothing but the tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from twinpool.cache.allocation import TableSlice
from twinpool.cache.device.device_port import DEVICE, DONE, Completion, Device, DeviceOp, DeviceStream, spans
from twinpool.cache.device.layer_marks import LayerMarks
from twinpool.cache.memory.kv_cache_spec import IndexSpace, PoolKind, PoolSetSpec
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.contracts.sampling_params import TokenDifference
from twinpool.engine.runner.batch import BatchRow, DrawnToken, RowOutput, TokenFromStep

VOCAB = 300


def _entry(mark: bytes, pool: str, buffer: str, layer: int, nbytes: int) -> bytes:
    """What one position (or the state after it) holds in one layer of one buffer."""
    return hashlib.shake_128(mark + f"{pool}/{buffer}/{layer}".encode()).digest(nbytes)


def _token(mark: bytes) -> int:
    return int.from_bytes(mark[:8]) % VOCAB


@dataclass
class _Seen:
    """The bytes of every pool that a position may see, in the order of the registry."""

    spec: PoolSetSpec
    parts: list[bytes] = field(default_factory=list)

    def mark(self, token: int) -> bytes:
        return hashlib.blake2b(b"".join(self.parts) + token.to_bytes(4, "little"), digest_size=16).digest()


def recite(spec: PoolSetSpec, prompt: Sequence[int], count: int) -> list[int]:
    """The greedy answer of `count` tokens, without pools, pages or workers."""
    marks: list[bytes] = []
    tokens = list(prompt)
    while len(marks) < len(prompt) + count - 1 or len(tokens) < len(prompt) + count:
        at = len(marks)
        seen = _Seen(spec)
        for pool in spec.pools:
            first = {PoolKind.FULL: 0, PoolKind.WINDOW: max(0, at - pool.window_tokens + 1), PoolKind.STATE: at - 1}[
                pool.kind
            ]
            for buffer in pool.buffers:
                for layer in range(buffer.layers):
                    width = _width(spec, buffer.shape_bytes, buffer.index)
                    if pool.kind is PoolKind.STATE and not at:
                        seen.parts.append(bytes(width))
                    for position in range(max(0, first), at):
                        seen.parts.append(_entry(marks[position], pool.name, buffer.name, layer, width))
        marks.append(seen.mark(tokens[at]))
        if len(marks) == len(tokens):
            tokens.append(_token(marks[-1]))
    return tokens[len(prompt) : len(prompt) + count]


def _width(spec: PoolSetSpec, shape_bytes: int, index: IndexSpace) -> int:
    """Bytes of one position: of a buffer by page, its share of the page."""
    return shape_bytes // spec.page_tokens if index is IndexSpace.PAGE else shape_bytes


class HashStep:
    """Implements `engine.runner.batch.Step`."""

    def __init__(self) -> None:
        self.completion: Completion = DONE
        self.drawn: list[RowOutput] = []

    @property
    def done(self) -> bool:
        return self.completion.done

    def outputs(self) -> list[RowOutput]:
        self.completion.wait()
        return self.drawn


class HashEngine:
    """Stands where `engine.runner.model_runner.Engine` does."""

    def __init__(self, pools: PoolSet, device: Device) -> None:
        self.pools, self.device = pools, device
        self.spec = pools.spec

    def launch(self, rows: Sequence[BatchRow], marks: LayerMarks | None = None) -> HashStep:
        step = HashStep()
        reads, writes = self._named(rows)
        passages = {pool: self.pools.gates[pool].enter(pool) for pool in self.spec.by_name}
        gates = {gate: waits for passage in passages.values() for gate, waits in passage.gates.items()}

        def run() -> None:
            for pool, passage in passages.items():
                for layer in range(self.spec.by_name[pool].layers):
                    passage.layer(layer)
            step.drawn += [self._row(row) for row in rows]

        op = DeviceOp("forward", DeviceStream.COMPUTE, spans(DEVICE, reads), spans(DEVICE, writes))
        step.completion = self.device.submit(op, run, gates=gates, marks=marks)
        return step

    def _named(self, rows: Sequence[BatchRow]) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
        reads: dict[str, set[int]] = {pool: set() for pool in self.spec.by_name}
        writes: dict[str, set[int]] = {pool: set() for pool in self.spec.by_name}
        for row in rows:
            for pool, mine in row.tables.items():
                reads[pool] |= set(mine.pages)
                first = row.start // self.spec.page_tokens - mine.first
                point = self.spec.by_name[pool].kind is PoolKind.STATE
                writes[pool] |= set(mine.pages if point else mine.pages[first:])
        return {p: sorted(i) for p, i in reads.items()}, {p: sorted(i) for p, i in writes.items()}

    def _row(self, row: BatchRow) -> RowOutput:
        tables = row.tables
        for pool, table in tables.items():
            if tuple(self.pools.allocators[pool].epochs.of(table.pages)) != tuple(table.epochs):
                return RowOutput(stale=True)
        tokens = row.tokens
        if isinstance(tokens, TokenFromStep):  # Steps run in their order, so the one before has run.
            assert isinstance(tokens.step, HashStep)
            drawn = tokens.step.drawn[tokens.row].drawn
            if drawn is None:
                return RowOutput(stale=True)
            tokens = (drawn.token,)
        drawn_by_row: list[DrawnToken] = []
        known, found, replayed = row.replay, [], 0
        for position, token in enumerate(tokens, row.start):
            mark = self._see(tables, position).mark(token)
            self._write(tables, position, mark)
            if known is not None and position + 1 in known.positions(row.start, len(tokens)):
                replayed += 1
                if _token(mark) != known.tokens[position + 1]:
                    found.append(TokenDifference(position + 1, _token(mark), 1.0))
            behind = len(tokens) - 1 - (position - row.start)
            right = not drawn_by_row or drawn_by_row[-1].token == token
            if row.draw is not None and right and len(drawn_by_row) == row.drafted - behind:
                drawn_by_row.append(DrawnToken(_token(mark), None))
        *accepted, last = drawn_by_row or (None,)
        return RowOutput(last, replayed=replayed, differences=tuple(found), accepted=tuple(d for d in accepted if d))

    def _see(self, tables: Mapping[str, TableSlice], at: int) -> _Seen:
        seen = _Seen(self.spec)
        for pool in self.spec.pools:
            for buffer in self.pools.layout.buffers[pool.name]:
                for layer in range(buffer.spec.layers):
                    if pool.kind is PoolKind.STATE:
                        seen.parts.append(
                            self._bytes(buffer.offset(layer, tables[pool.name].page(0)), buffer.entry_bytes)
                        )
                        continue
                    first = max(0, at - pool.window_tokens + 1) if pool.kind is PoolKind.WINDOW else 0
                    for position in range(first, at):
                        offset, width = self._place(tables[pool.name], buffer, layer, position)
                        seen.parts.append(self._bytes(offset, width))
        return seen

    def _place(self, table: TableSlice, buffer: object, layer: int, position: int) -> tuple[int, int]:
        page, slot = divmod(position, self.spec.page_tokens)
        index = table.page(page)
        assert index, "a page that is still seen was given back"
        width = _width(self.spec, buffer.spec.shape_bytes, buffer.spec.index)  # type: ignore[attr-defined]
        return buffer.offset(layer, index) + slot * width, width  # type: ignore[attr-defined]

    def _bytes(self, offset: int, width: int) -> bytes:
        return self.pools.region[offset : offset + width].numpy().tobytes()

    def _write(self, tables: Mapping[str, TableSlice], position: int, mark: bytes) -> None:
        for pool in self.spec.pools:
            for buffer in self.pools.layout.buffers[pool.name]:
                for layer in range(buffer.spec.layers):
                    if pool.kind is PoolKind.STATE:
                        offset, width = buffer.offset(layer, tables[pool.name].page(0)), buffer.entry_bytes
                    else:
                        offset, width = self._place(tables[pool.name], buffer, layer, position)
                    data = _entry(mark, pool.name, buffer.spec.name, layer, width)
                    self.pools.region[offset : offset + width] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
