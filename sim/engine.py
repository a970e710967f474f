"""An engine whose tokens are a hash of exactly the state that it read.

What position p writes into each pool is a function of its token and of every byte that p may see; the token drawn
after p is a function of the same bytes and of the request's seed. So one stale, foreign or missing byte anywhere in
the pages that a row's tables name changes every token from there on. `recite` works the same answers out from the
tokens alone: it has no pages, tables or workers in it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from cache.claim import Table
from cache.device import DEVICE, DONE, Completion, Device, Op, Stream, spans
from cache.pools import PoolSet
from cache.registry import BufferLayout, Kind, PoolSetSpec, PoolSpec
from contracts.sampling import Difference
from engine.batch import Drawn, FromStep, Row, RowOutput

VOCABULARY = 64


def _mark(seen: Sequence[bytes], token: int) -> bytes:
    """What stands for everything that a position saw, and its own token."""
    return hashlib.blake2b(b"|".join(seen) + token.to_bytes(4, "little"), digest_size=16).digest()


def _entry(pool: PoolSpec, mark: bytes) -> list[bytes]:
    """What a position leaves in a pool: one entry for each layer of each buffer."""
    widths = [buffer.shape_bytes for buffer in pool.buffers for _ in range(buffer.layers)]
    whole = hashlib.blake2b(mark + pool.name.encode(), digest_size=sum(widths)).digest()
    return [whole[sum(widths[:i]) : sum(widths[: i + 1])] for i in range(len(widths))]


def _draw(mark: bytes, seed: int, position: int) -> int:
    drawn = hashlib.blake2b(mark + seed.to_bytes(8, "little") + position.to_bytes(4, "little"), digest_size=8).digest()
    return int.from_bytes(drawn, "little") % VOCABULARY


@lru_cache(maxsize=256)
def recite(
    spec: PoolSetSpec, prompt: tuple[int, ...], seed: int, max_tokens: int, stops: tuple[int, ...] = ()
) -> tuple[int, ...]:
    """The answer to a prompt: up to `max_tokens` tokens, the first of `stops` included."""
    tokens = list(prompt)
    lanes = {pool.name: [bytearray() for buffer in pool.buffers for _ in range(buffer.layers)] for pool in spec.pools}
    widths = {pool.name: [b.shape_bytes for b in pool.buffers for _ in range(b.layers)] for pool in spec.pools}
    for pool in spec.pools:
        if pool.kind is Kind.STATE:
            for lane, width in zip(lanes[pool.name], widths[pool.name], strict=True):
                lane.extend(bytes(width))
    at = 0
    while len(tokens) < len(prompt) + max_tokens:
        seen = [
            bytes(lane[-(pool.window_tokens - 1) * width :] if pool.kind is Kind.WINDOW else lane)
            for pool in spec.pools
            for lane, width in zip(lanes[pool.name], widths[pool.name], strict=True)
        ]
        mark = _mark(seen, tokens[at])
        at += 1
        for pool in spec.pools:
            for lane, entry in zip(lanes[pool.name], _entry(pool, mark), strict=True):
                if pool.kind is Kind.STATE:
                    lane.clear()
                lane.extend(entry)
        if at == len(tokens):
            tokens.append(_draw(mark, seed, at))
            if tokens[-1] in stops:
                break
    return tuple(tokens[len(prompt) :])


class HashStep:
    """Implements `engine.batch.Step`."""

    def __init__(self) -> None:
        self.completion: Completion = DONE
        self.drawn: list[RowOutput] = []

    @property
    def done(self) -> bool:
        return self.completion.done

    def outputs(self) -> list[RowOutput]:
        self.completion.wait()
        return self.drawn


@dataclass(frozen=True)
class _Lane:
    """One layer of one buffer in the region."""

    layout: BufferLayout
    layer: int

    @property
    def width(self) -> int:
        return self.layout.spec.shape_bytes

    def page(self, index: int) -> slice:
        start = self.layout.offset(self.layer, index)
        return slice(start, start + self.layout.entry_bytes)


class HashEngine:
    """Stands where `engine.engine.Engine` does: `launch` and `device` are what workers use of it."""

    def __init__(self, pools: PoolSet, device: Device) -> None:
        self.device = device
        self._pools, self._spec = pools, pools.spec
        self._memory = memoryview(pools.region.numpy())  # type: ignore[arg-type]
        self._lanes = {
            pool.name: [_Lane(b, layer) for b in pools.layout.buffers[pool.name] for layer in range(b.spec.layers)]
            for pool in self._spec.pools
        }

    def launch(self, rows: Sequence[Row]) -> HashStep:
        step = HashStep()
        tables = [{self._spec.full.name: Table(0, row.pages, row.epochs), **row.others} for row in rows]
        reads, writes = self._named(rows, tables)
        passages = {pool: self._pools.gates[pool].enter(pool) for pool in self._spec.by_name}
        gates = {gate: waits for passage in passages.values() for gate, waits in passage.gates.items()}

        def run() -> None:
            for name, passage in passages.items():
                for layer in range(self._spec.by_name[name].layers):
                    passage.layer(layer)
            step.drawn += [self._row(row, mine) for row, mine in zip(rows, tables, strict=True)]

        op = Op("forward", Stream.COMPUTE, spans(DEVICE, reads), spans(DEVICE, writes))
        step.completion = self.device.submit(op, run, gates=gates)
        return step

    def _named(
        self, rows: Sequence[Row], tables: Sequence[Mapping[str, Table]]
    ) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
        """The pages and slots that a step reads and writes, by pool."""
        reads: dict[str, set[int]] = {pool: set() for pool in self._spec.by_name}
        writes: dict[str, set[int]] = {pool: set() for pool in self._spec.by_name}
        for row, table in zip(rows, tables, strict=True):
            for pool, mine in table.items():
                reads[pool] |= set(mine.pages)
                state = self._spec.by_name[pool].kind is Kind.STATE
                first = 0 if state else row.start // self._spec.page_tokens - mine.first
                writes[pool] |= set(mine.pages[first:])
        return {p: sorted(i) for p, i in reads.items()}, {p: sorted(i) for p, i in writes.items()}

    def _row(self, row: Row, tables: Mapping[str, Table]) -> RowOutput:
        for name, table in tables.items():
            if tuple(self._pools.allocators[name].epochs_of(table.pages)) != tuple(table.epochs):
                return RowOutput(stale=True)
        tokens = self._tokens(row)
        seen = {pool.name: self._seen(pool, tables[pool.name], row.start) for pool in self._spec.pools}
        mark, known, found, replayed = b"", row.replay, list[Difference](), 0
        for position, token in enumerate(tokens, row.start):
            mark = _mark([bytes(lane) for pool in self._spec.pools for lane in seen[pool.name]], token)
            for pool in self._spec.pools:
                self._write(pool, tables[pool.name], position, _entry(pool, mark), seen[pool.name])
            if known is not None and position + 1 in known.positions(row.start, len(tokens)):
                replayed += 1
                again = _draw(mark, known.params.seed, position + 1)
                if again != known.tokens[position + 1]:
                    found.append(Difference(position + 1, again, 1.0))
        drawn = None
        if row.draw is not None:
            drawn = Drawn(_draw(mark, row.draw.params.seed, row.draw.position), None)
        return RowOutput(drawn, replayed=replayed, differences=tuple(found))

    def _tokens(self, row: Row) -> Sequence[int]:
        if not isinstance(row.tokens, FromStep):
            return row.tokens
        step = row.tokens.step
        assert isinstance(step, HashStep)
        before = step.drawn[row.tokens.row].drawn
        # Of a stale row nothing was drawn; whoever goes on from it is stale as well.
        return [before.token if before is not None else 0]

    def _seen(self, pool: PoolSpec, table: Table, start: int) -> list[bytearray]:
        """What the position `start` sees of a pool: a run of bytes for each lane."""
        lanes = self._lanes[pool.name]
        if pool.kind is Kind.STATE:
            return [bytearray(self._memory[lane.page(table.pages[0])]) for lane in lanes]
        size = self._spec.page_tokens
        first = max(0, start - pool.window_tokens + 1) if pool.kind is Kind.WINDOW else 0
        out = []
        for lane in lanes:
            run = bytearray()
            for number in range(first // size, -(-start // size)):
                index = table.pages[number - table.first]
                assert index, "a page that is still seen was given back"
                run += self._memory[lane.page(index)]
            skip = (first - first // size * size) * lane.width
            out.append(run[skip : skip + (start - first) * lane.width])
        return out

    def _write(
        self, pool: PoolSpec, table: Table, position: int, entry: Sequence[bytes], seen: Sequence[bytearray]
    ) -> None:
        """Write what a position leaves; `seen` becomes what the next one sees."""
        number, at = divmod(position, self._spec.page_tokens)
        for lane, data, run in zip(self._lanes[pool.name], entry, seen, strict=True):
            if pool.kind is Kind.STATE:
                self._memory[lane.page(table.pages[0])] = data
                run[:] = data
                continue
            start = lane.page(table.pages[number - table.first]).start + at * lane.width
            self._memory[start : start + lane.width] = data
            run.extend(data)
            if pool.kind is Kind.WINDOW:
                del run[: max(0, len(run) - (pool.window_tokens - 1) * lane.width)]
