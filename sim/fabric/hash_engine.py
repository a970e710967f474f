"""An engine whose tokens are a hash of exactly the state that it read.

The state that position p writes into each pool is a function of its token and of every byte that p may see; the token
drawn after p is a function of the same bytes and of all the request's sampling parameters. So one stale, foreign or
missing byte anywhere in the pages that a row's tables name, or one parameter that was lost on its way, changes every
token from there on. `hash_answers.recite` computes the same answers from the tokens alone.

A worker of several ranks has one engine here, which reads each head from every rank that holds it, and writes it to
all of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from twinpool.cache.allocation import TableSlice
from twinpool.cache.device.device_port import (
    DEVICE,
    DONE,
    Completion,
    Device,
    DeviceOp,
    DeviceStream,
    LayerMarks,
    spans,
)
from twinpool.cache.memory.kv_cache_spec import BufferLayout, BufferSpec, PoolKind, PoolSetSpec, PoolSpec
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.contracts.sampling_params import TokenDifference, TokenLogprob
from twinpool.decode.drafting import WantedDraft
from twinpool.decode.request import DecodeRequest
from twinpool.engine.attention.attention_backend import BLOCK
from twinpool.engine.runner.batch import BatchRow, DrawnToken, RowOutput, TokenDraw, TokenFromStep
from twinpool.engine.runner.device_rows import TokenHistory
from twinpool.engine.runner.sampling.logits_processors import TokenMask
from twinpool.engine.tensors.adapters import AdapterStore
from twinpool.sim.fabric.hash_answers import (
    VOCABULARY,
    draw_token,
    entry_width,
    pool_entries,
    position_mark,
    recite,
    score_token,
)

_NO_DRAFT, _WRONG_TOKEN = 0.2, 0.25
"""How often there is no draft, and how often a token of one is wrong."""


@dataclass(frozen=True, slots=True)
class _ComputedRow:
    """A row whose state is written. `marks` are by place in its `tokens`; None: it is stale."""

    row: BatchRow
    tokens: Sequence[int] = ()
    marks: Sequence[bytes] | None = None
    output: RowOutput = field(default_factory=partial(RowOutput, stale=True))
    """All but what it draws."""


class HashStep:
    """Implements `engine.runner.batch.StepHandle`."""

    def __init__(self) -> None:
        self.completion: Completion = DONE
        self.computed: list[_ComputedRow] = []
        self.drawn: list[RowOutput] = []

    @property
    def done(self) -> bool:
        return self.completion.done

    def outputs(self) -> list[RowOutput]:
        self.completion.wait()
        return self.drawn


def _listed(mask: TokenMask | None) -> list[int] | None:
    """The tokens that a mask allows."""
    if mask is None:
        return None
    return np.flatnonzero(np.unpackbits(mask.words.view(np.uint8), bitorder="little")).tolist()


@dataclass(frozen=True, slots=True)
class _Share:
    """One rank's part of a lane: `width` bytes of each entry, from the entry's byte `first` on."""

    memory: memoryview
    layout: BufferLayout
    layer: int
    first: int
    width: int

    def page(self, index: int) -> slice:
        start = self.layout.offset(self.layer, index)
        return slice(start, start + self.layout.entry_bytes)


class _Lane:
    """One layer of one buffer, with the heads of all ranks."""

    def __init__(
        self, whole: BufferSpec, layer: int, ranks: Sequence[tuple[memoryview, BufferLayout]], page_tokens: int
    ) -> None:
        self.width, self.layer = entry_width(whole, page_tokens), layer
        head = whole.shape_bytes // whole.heads if whole.heads else 0
        self._shares = [
            _Share(memory, layout, layer, layout.spec.first_head * head, entry_width(layout.spec, page_tokens))
            for memory, layout in ranks
        ]
        self._alone = self._shares[0] if len(ranks) == 1 else None

    def read(self, index: int, entries: int, first: int = 0) -> bytes | memoryview:
        """Read `entries` entries of a page or slot from place `first` on, over all ranks."""
        if self._alone is not None:
            start = self._alone.page(index).start + first * self.width
            return self._alone.memory[start : start + entries * self.width]
        whole, known = bytearray(entries * self.width), bytearray(entries * self.width)
        for share in self._shares:
            page = share.memory[share.page(index)]
            for at in range(entries):
                place, to = (first + at) * share.width, at * self.width + share.first
                mine = page[place : place + share.width]
                for n, byte in enumerate(mine, to):
                    # Where copies on several ranks differ, the inverted byte stands for damage, so that tokens change.
                    whole[n] = byte if not known[n] else whole[n] if whole[n] == byte else ~byte & 0xFF
                    known[n] = 1
        return bytes(whole)

    def write(self, index: int, at: int, entry: bytes) -> None:
        for share in self._shares:
            start = share.page(index).start + at * share.width
            share.memory[start : start + share.width] = entry[share.first : share.first + share.width]


class HashEngine:
    """Stands in for `engine.runner.model_runner.ModelRunner`, with the `launch` and `device` that workers use."""

    pictures = None
    experts = None
    adapters: AdapterStore | None = None
    """Where the adapters of rows are; None: no row may have one."""

    def __init__(
        self,
        pools: PoolSet,
        device: Device,
        others: Sequence[PoolSet] = (),
        together: Callable[[], None] = lambda: None,
        stepped: Callable[[], None] = lambda: None,
        weights: str = "",
    ) -> None:
        """`others`: the pool sets of the worker's other ranks. `together` is called when a step is computed, and makes
        every rank carry out the orders that were sent before; `stepped`, when all layers of one with marks are written.
        `weights`: as `recite` has them.
        """
        self.device, self._weights = device, weights
        self.on_launch: Callable[[Sequence[BatchRow]], None] = lambda rows: None
        self._pools, self._spec, self._together, self._stepped = pools, pools.spec.whole, together, stepped
        self._unwritten: list[tuple[_Lane, int, int, bytes]] | None = None
        """What the step that runs has still to write, where it writes layer by layer: lane, page, place in it."""
        ranks = [(memoryview(p.region.numpy()), p.layout.buffers) for p in (pools, *others)]  # type: ignore[arg-type]
        size = self._spec.page_tokens
        self._lanes = {
            pool.name: [
                _Lane(buffer, layer, [(memory, layouts[pool.name][at]) for memory, layouts in ranks], size)
                for at, buffer in enumerate(pool.buffers)
                for layer in range(buffer.layers)
            ]
            for pool in self._spec.pools
        }

    def launch(self, rows: Sequence[BatchRow], marks: LayerMarks | None = None) -> HashStep:
        return self._launch(rows, marks, draws=True)

    def begin(self, rows: Sequence[BatchRow]) -> HashStep:
        return self._launch(rows, None, draws=False)

    def draw(self, step: HashStep, masks: Mapping[int, TokenMask]) -> None:
        """Submit the draw of a begun step; `masks` are by the number of the draw."""

        def run() -> None:
            number = 0
            for row in step.computed:
                mine = [draw.masked(masks.get(n)).mask for n, draw in enumerate(row.row.draws, number)]
                number += len(mine)
                step.drawn.append(self._draw_row(row, mine))

        step.completion = self.device.submit(DeviceOp("draw", DeviceStream.COMPUTE), run)

    def _launch(self, rows: Sequence[BatchRow], marks: LayerMarks | None, *, draws: bool) -> HashStep:
        step = HashStep()
        self.on_launch(rows)
        wanted = {row.adapter.digest for row in rows if row.adapter is not None}
        assert not wanted or (self.adapters is not None and wanted <= self.adapters.loaded.keys()), "it is in memory"
        reads, writes = self._named(rows) if self.device.checks else ({}, {})
        passages = {pool: self._pools.gates[pool].enter(pool) for pool in self._spec.by_name}
        gates = {gate: waits for passage in passages.values() for gate, waits in passage.gates.items()}

        def run() -> None:
            for name, passage in passages.items():
                for layer in range(self._spec.by_name[name].layers):
                    passage.layer(layer)
            self._together()
            self._unwritten = [] if marks is not None else None
            step.computed = [self._row(row) for row in rows]
            if draws:
                step.drawn += [self._draw_row(row, [draw.mask for draw in row.row.draws]) for row in step.computed]
            if marks is not None:
                self._write_layers(marks)

        op = DeviceOp("forward", DeviceStream.COMPUTE, spans(DEVICE, reads), spans(DEVICE, writes))
        step.completion = self.device.submit(op, run, gates=gates, marks=marks)
        return step

    def _write_layers(self, marks: LayerMarks) -> None:
        """Write what the step computed, layer by layer, as a model does."""
        entries, self._unwritten = self._unwritten or [], None
        layers = {pool.name: pool.layers for pool in self._spec.pools}
        for layer in range(max(layers.values())):
            for lane, index, at, data in entries:
                if lane.layer == layer:
                    lane.write(index, at, data)
            marks.passed({pool: min(layer + 1, count) for pool, count in layers.items()})
        self._stepped()

    def _named(self, rows: Sequence[BatchRow]) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
        """The pages and slots that a step reads and writes, by pool."""
        reads: dict[str, set[int]] = {pool: set() for pool in self._spec.by_name}
        writes: dict[str, set[int]] = {pool: set() for pool in self._spec.by_name}
        for row in rows:
            for pool, mine in row.tables.items():
                reads[pool] |= set(mine.pages)
                state = self._spec.by_name[pool].kind is PoolKind.STATE
                first = 0 if state else row.start // self._spec.page_tokens - mine.first
                writes[pool] |= set(mine.pages[first:])
        return {p: sorted(i) for p, i in reads.items()}, {p: sorted(i) for p, i in writes.items()}

    def _row(self, row: BatchRow) -> _ComputedRow:
        tables = row.tables
        for name, table in tables.items():
            if tuple(self._pools.allocators[name].epochs.of(table.pages)) != tuple(table.epochs):
                return _ComputedRow(row)
        tokens = self._tokens(row)
        if tokens is None:
            return _ComputedRow(row)
        seen = {pool.name: self._seen(pool, tables[pool.name], row.start) for pool in self._spec.pools}
        marks, known, found, replayed = list[bytes](), row.replay, list[TokenDifference](), 0
        scores: list[TokenLogprob] = []
        for position, token in enumerate(tokens, row.start):
            read = [bytes(lane) for pool in self._spec.pools for lane in seen[pool.name]]
            mark = position_mark(read, token, row.adapter, self._weights)
            for pool in self._spec.pools:
                self._write(
                    pool, tables[pool.name], position, pool_entries(pool, self._spec.page_tokens, mark), seen[pool.name]
                )
            if row.score is not None and position - row.start < len(row.score):
                scores.append(score_token(mark, row.score[position - row.start], row.score_top))
            if known is not None and position + 1 in known.positions(row.start, len(tokens)):
                replayed += 1
                mask = _listed(known.masks.get(position + 1))
                again = draw_token(mark, known.params, known.tokens, known.prompt_len, position + 1, mask)
                if again != known.tokens[position + 1]:
                    found.append(TokenDifference(position + 1, again, 1.0))
            marks.append(mark)
        return _ComputedRow(row, tokens, marks, RowOutput(None, tuple(scores), replayed, tuple(found)))

    def _draw_row(self, computed: _ComputedRow, masks: Sequence[TokenMask | None]) -> RowOutput:
        """The output of a row, by a mask for each of its draws."""
        row, tokens, marks = computed.row, computed.tokens, computed.marks
        if marks is None:
            return computed.output
        drawn: list[DrawnToken] = []
        first = len(tokens) - 1 - row.drafted
        for place, (draw, mask) in enumerate(zip(row.draws, masks, strict=True), first):
            if place > first and drawn[-1].token != tokens[place]:
                break  # That draft wasn't drawn.
            drawn.append(self._drawn(draw, tokens[: place + 1], row.start, marks[place], mask))
        last, accepted = (drawn[-1], tuple(drawn[:-1])) if drawn else (None, ())
        return computed.output._replace(drawn=last, accepted=accepted)

    @staticmethod
    def _drawn(draw: TokenDraw, tokens: Sequence[int], start: int, mark: bytes, mask: TokenMask | None) -> DrawnToken:
        """Draw behind `tokens` of a row from position `start` on, which the host may not know yet."""
        params, known, position = draw.params, draw.tokens, start + len(tokens)
        if isinstance(known, TokenHistory):
            known = [*known.tokens[:start], *tokens]
        allows = _listed(mask) if params.grammar else None
        token = draw_token(mark, params, known, draw.prompt_len, position, allows)
        return DrawnToken(token, None if params.logprobs is None else score_token(mark, token, params.logprobs))

    def _tokens(self, row: BatchRow) -> Sequence[int] | None:
        """The row's tokens; None where it goes on from a stale row, for which nothing was drawn: it is stale too."""
        if not isinstance(row.tokens, TokenFromStep):
            return row.tokens
        step = row.tokens.step
        assert isinstance(step, HashStep)
        before = step.drawn[row.tokens.row].drawn
        return [before.token] if before is not None else None

    def _seen(self, pool: PoolSpec, table: TableSlice, start: int) -> list[bytearray]:
        """The state that position `start` sees in a pool: a run of bytes for each lane."""
        lanes = self._lanes[pool.name]
        if pool.kind is PoolKind.STATE:
            place = start % BLOCK - 1 if start % BLOCK else BLOCK
            return [bytearray(lane.read(table.page(0), 1, place)) for lane in lanes]
        size = self._spec.page_tokens
        first = max(0, start - pool.window_tokens + 1) if pool.kind is PoolKind.WINDOW else 0
        out = []
        for lane in lanes:
            run = bytearray()
            for number in range(first // size, -(-start // size)):
                index = table.page(number)
                assert index, "a page that is still seen was given back"
                run += lane.read(index, size)
            skip = (first - first // size * size) * lane.width
            out.append(run[skip : skip + (start - first) * lane.width])
        return out

    def _write(
        self, pool: PoolSpec, table: TableSlice, position: int, entry: Sequence[bytes], seen: Sequence[bytearray]
    ) -> None:
        """Write a position's entries; `seen` is updated to the state that the next position sees. A position that
        fills a block of recurrent state leaves nothing of it but the state behind: as with a real one, what came before
        can't be had again."""
        number, at = divmod(position, self._spec.page_tokens)
        for lane, data, run in zip(self._lanes[pool.name], entry, seen, strict=True):
            if pool.kind is PoolKind.STATE:
                slot, place = table.page(0), position % BLOCK
                self._put(lane, slot, place, data)
                if place == BLOCK - 1:
                    self._put(lane, slot, BLOCK, data)
                    for gone in range(BLOCK):
                        self._put(lane, slot, gone, bytes(len(data)))
                run[:] = data
                continue
            self._put(lane, table.page(number), at, data)
            run.extend(data)
            if pool.kind is PoolKind.WINDOW:
                del run[: max(0, len(run) - (pool.window_tokens - 1) * lane.width)]

    def _put(self, lane: _Lane, index: int, place: int, data: bytes) -> None:
        """Write an entry, or keep it for when the step writes its layer."""
        if self._unwritten is None:
            lane.write(index, place, data)
        else:
            self._unwritten.append((lane, index, place, data))


class SimDrafter:
    """Implements `decode.drafting.Drafter`: knows the answers, and is wrong now and then.

    Answers of the simulated engine never repeat anything, so prompt lookup would find nothing in them.
    """

    def __init__(self, spec: PoolSetSpec, seed: int, weights: str = "") -> None:
        """`spec`: the whole model's pools. `weights`: as `recite` has them."""
        self._spec, self._rng, self._weights = spec, random.Random(seed), weights

    def ready(self, request: DecodeRequest) -> bool:
        return self._rng.random() >= _NO_DRAFT

    def propose(self, wanted: Sequence[WantedDraft]) -> Sequence[Sequence[int]]:
        return [self._draft(request, most) for request, most in wanted]

    def _draft(self, request: DecodeRequest, most: int) -> Sequence[int]:
        submit, rng = request.submit, self._rng
        answer = recite(self._spec, submit.tokens[: submit.prompt_len], submit.sampling, self._weights).tokens
        right = answer[request.generated :][: rng.randint(1, most)]
        return [rng.randrange(VOCABULARY) if rng.random() < _WRONG_TOKEN else token for token in right]
