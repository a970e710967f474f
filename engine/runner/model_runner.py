"""The model runner: launches a step, which writes its state into pages, and the draw of the step's tokens."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from twinpool.cache.allocation import DeviceRow, numbers
from twinpool.cache.device.device_copies import HostIntegers, to_device, to_host, upload
from twinpool.cache.device.device_port import DEVICE, Completion, Device, DeviceOp, DeviceStream, LayerMarks, spans
from twinpool.cache.memory.kv_cache_spec import PoolKind, PoolSetSpec
from twinpool.cache.pool.page_allocator import EpochTable
from twinpool.cache.pool.pool_set import GateDoor, GatePass, LoadGate
from twinpool.contracts.errors import ConfigError, UnorderedAccess
from twinpool.contracts.messages.rank_order_codec import OrderChannel
from twinpool.contracts.messages.rank_orders import RunStep
from twinpool.engine.attention.attention_backend import AttentionBackend
from twinpool.engine.attention.attention_plan import (
    AttentionPlan,
    BackendPlan,
    SlotPlan,
    StepShape,
    make_plan,
)
from twinpool.engine.layers.decoder import Decoder, ForwardContext
from twinpool.engine.layers.moe.expert_group import ExpertGroup
from twinpool.engine.layers.picture_encoder import KEPT_BYTES, PictureEncoder
from twinpool.engine.runner.batch import NO_MASKS, BatchRow, DraftRow, RowOutput, TokenDraw, turned_positions
from twinpool.engine.runner.device_rows import (
    DeviceBlockTables,
    DeviceTokenHistories,
    EnteredTokens,
    PlannedTables,
    RowUpdate,
    TokenHistory,
)
from twinpool.engine.runner.graphs.step_graphs import Capture, DraftedSteps, StepGraphs
from twinpool.engine.runner.launched_step import (
    ForwardResults,
    LaunchedStep,
    PlannedSlots,
    PlannedStep,
    compute_order,
    input_tokens,
    pooled_prompts,
)
from twinpool.engine.runner.sampling.logits_processors import TokenMask
from twinpool.engine.runner.sampling.redraw import RedrawnTokens, redraw
from twinpool.engine.runner.sampling.sampler import DrawnRows, Logprobs, draw_tokens, token_logprobs
from twinpool.engine.tensors.adapters import AdapterStore, StepAdapters
from twinpool.engine.tensors.row_exact_linear import Numerics
from twinpool.engine.tensors.tensor_parallel import ALONE, TensorParallelGroup

_FORWARD, _DRAW, _PROPOSE = (DeviceOp(name, DeviceStream.COMPUTE) for name in ("forward", "draw", "propose"))
_LOGIT_ELEMENTS = 1 << 23
"""Logits computed at once when prompts are scored: 32 MiB in float32."""


class ModelRunner:
    """Computes steps of one model over the buffers of one pool set."""

    def __init__(
        self,
        decoder: Decoder,
        numerics: Numerics,
        attention: AttentionBackend,
        spec: PoolSetSpec,
        gates: Mapping[str, LoadGate],
        epochs: Mapping[str, EpochTable],
        device: Device,
        *,
        ranks: TensorParallelGroup = ALONE,
        followers: OrderChannel | None = None,
        experts: ExpertGroup | None = None,
        triton: bool = False,
    ) -> None:
        """`gates` and `epochs` are by pool. `followers`: the order channel to the other ranks, on the leader of several
        `ranks`. `experts`: those with which its experts are shared. `triton`: tokens are drawn by Triton's kernel."""
        self.ranks, self.followers, self.experts = ranks, followers, experts
        self.decoder, self.numerics, self.attention = decoder, numerics, attention
        self.spec = spec
        self._gates, self._epochs = dict(gates), dict(epochs)
        self._device = device
        self._tables = {
            pool.name: DeviceBlockTables(device.torch_device) for pool in spec.pools if pool.kind is not PoolKind.STATE
        }
        self._histories = DeviceTokenHistories(device.torch_device)
        self._triton = triton
        self._logits_at_once = _LOGIT_ELEMENTS // decoder.head.shape[0] if decoder.head is not None else 0
        tower = decoder.tower
        self.pictures = None if tower is None else PictureEncoder(tower, KEPT_BYTES, numerics, decoder.kernels, device)
        """What computes pictures, where the model takes any."""
        self.adapters: AdapterStore | None = None
        """Where the adapters of rows are; None: no row may have one."""
        self.graphs: StepGraphs | None = None
        """The captured forward passes of decode steps, where there are any."""

    @property
    def device(self) -> Device:
        return self._device

    def launch(self, rows: Sequence[BatchRow], marks: LayerMarks | None = None) -> LaunchedStep:
        """Begin a step and draw its tokens. Returns as soon as both are submitted; without `marks` the step is complete
        by then on a CPU."""
        step = self.begin(rows, marks)
        self.draw(step)
        return step

    def begin(self, rows: Sequence[BatchRow], marks: LayerMarks | None = None) -> LaunchedStep:
        """Submit the forward pass of one step to the device: compute and write the rows' state, and score or replay as
        a row asks. `draw` must follow before the next step begins.

        The rows are read when the step runs, so they must not change until it is complete. `marks`: of the device; the
        step reaches them.
        """
        planned = self.plan(rows)
        # Sets of all pages of a batch cost more than the rest of the plan: they are made for a device that checks them.
        op = self._naming(rows, _FORWARD) if self._device.checks else _FORWARD
        passages = {pool.name: self._gates[pool.name].enter(pool.name) for pool in self.spec.pools}
        gates: dict[tuple[str, int], Sequence[Completion]] = {}
        for passage in passages.values():
            gates.update(passage.gates)
        step = LaunchedStep(rows, planned)
        try:
            step.forward = self._device.submit(
                op, lambda: step.fill(self._step(rows, planned, passages, marks)), gates=gates, marks=marks
            )
        except UnorderedAccess:
            for pool, tables in planned.tables.items():
                self._tables[pool].undo(tables)
            if planned.histories is not None:
                self._histories.undo(planned.histories)
            raise
        step.completion = step.forward
        return step

    def draw(self, step: LaunchedStep, masks: Mapping[int, TokenMask] = NO_MASKS) -> None:
        """Submit the draw of a begun step's tokens.

        It is an operation of its own, so that masks may still be made while the forward pass runs. `masks`: by the
        number of the draw (`step.draws`), the tokens that may be drawn, besides what the draw itself allows.
        """
        if not step.draws:
            return
        assert masks.keys() <= set(range(len(step.draws))), "a mask is of a draw"
        wanted = step.draws
        if masks:
            wanted = [draw.masked(masks.get(number)) for number, draw in enumerate(wanted)]
        step.completion = self._device.submit(_DRAW, lambda: step.draw(self._draw(step, wanted)))

    def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
        """Propose the tokens behind each row's latest one, by the draft layer; waits for the device. All steps of these
        sequences must have been computed. Nothing that is proposed from pages that were given away is of use."""
        rounds: list[tuple[list[int], PlannedStep]] = []
        for at in range(max(row.most for row in rows)):
            going = [number for number, row in enumerate(rows) if row.most > at]
            steps = [BatchRow([0], rows[number].start + at, rows[number].tables) for number in going]
            rounds.append((going, self.plan(steps)))
        reach = [BatchRow([0] * row.most, row.start, row.tables) for row in rows]
        op = self._naming(reach, _PROPOSE) if self._device.checks else _PROPOSE
        passages = {pool.name: self._gates[pool.name].enter(pool.name) for pool in self.spec.pools}
        gates = {gate: waits for passage in passages.values() for gate, waits in passage.gates.items()}
        proposed: list[Tensor] = []

        def run() -> None:
            proposed.extend(map(to_host, self._propose(rows, rounds, passages)))

        try:
            self._device.submit(op, run, gates=gates).wait()
        except UnorderedAccess:
            for _, planned in reversed(rounds):
                for pool, tables in planned.tables.items():
                    self._tables[pool].undo(tables)
            raise
        drafts: list[list[int]] = [[] for _ in rows]
        for (going, _), tokens_n in zip(rounds, proposed, strict=True):
            for number, token in zip(going, tokens_n.tolist(), strict=True):
                drafts[number].append(token)
        return drafts

    @torch.inference_mode()
    def _propose(
        self,
        rows: Sequence[DraftRow],
        rounds: Sequence[tuple[Sequence[int], PlannedStep]],
        doors: Mapping[str, GateDoor],
    ) -> Iterator[Tensor]:
        """The proposals of each round, [n] int64: for the rows that are still going, a token each."""
        device = self._device.torch_device
        tokens_n, features_nh = to_device([row.token for row in rows], device), None
        before: Sequence[int] = range(len(rows))
        for at, (going, planned) in enumerate(rounds):
            if len(going) < len(before):
                places = {number: place for place, number in enumerate(before)}
                kept_n = to_device([places[number] for number in going], device)
                tokens_n = tokens_n.index_select(0, kept_n)
                features_nh = features_nh.index_select(0, kept_n) if features_nh is not None else None
            ctx = self.context(planned, doors)
            ctx.mute(self._stale(ctx, planned))
            padded_nh = None if features_nh is None else ctx.padded(features_nh)
            features_nh = self.decoder.draft_from(ctx.padded(tokens_n), padded_nh, ctx)[: ctx.count]
            logits_nv = self.decoder.draft_logits(features_nh, self.numerics)
            draws = [rows[number].draw for number in going]
            tokens_n = draw_tokens(logits_nv, [draw._replace(at=draw.position + at) for draw in draws]).tokens_n
            before = going
            yield tokens_n

    def plan(self, rows: Sequence[BatchRow]) -> PlannedStep:
        """Plan a step: what it needs of every pool, and what the device lacks of that. `context` must be called for
        every planned step, in the same order."""
        assert rows, "a step has at least one row"
        shape = StepShape.of([row.start for row in rows], [len(row.tokens) for row in rows])
        assert shape.counts.all(), "a row has at least one token"
        stops = (-(-shape.ends // self.spec.page_tokens)).tolist()
        tables: dict[str, PlannedTables] = {}
        slots: dict[str, PlannedSlots] = {}
        for pool in self.spec.pools:
            slices = [row.tables[pool.name] for row in rows]
            if pool.kind is PoolKind.STATE:
                slots[pool.name] = PlannedSlots([[s.pages[0]] for s in slices], [[s.epochs[0]] for s in slices])
            else:
                tables[pool.name] = self._tables[pool.name].plan(slices, stops)
        entered: dict[int, EnteredTokens] = {}
        for i, row in enumerate(rows):
            if row.draw is not None and isinstance(row.draw.tokens, TokenHistory):
                count = 1 + row.drafted
                start, at = int(shape.ends[i]) - count, int(shape.offsets[i + 1]) - count
                entered[i] = EnteredTokens(row.draw.tokens, start, at, count)
        histories = self._histories.plan(entered) if entered else None
        return PlannedStep(shape, tables, slots, histories, adapters_of(rows, shape, self.adapters, self.numerics))

    def forward(self, rows: Sequence[BatchRow]) -> list[RowOutput]:
        """Launch one step and wait for it: one output a row, in order."""
        return self.launch(rows).outputs()

    @torch.inference_mode()
    def _step(
        self,
        rows: Sequence[BatchRow],
        planned: PlannedStep,
        doors: Mapping[str, GatePass],
        marks: LayerMarks | None,
    ) -> ForwardResults:
        device = self._device.torch_device
        if self.followers is not None:
            self.followers.send(compute_order(planned))
        ctx = self.context(planned, doors)
        if self.experts is not None:
            ctx.spread = self.experts.begin(ctx.count)
        if marks is not None:
            ctx.passed = lambda: marks.passed({pool: door.opened for pool, door in doors.items()})
        stale_b = self._stale(ctx, planned)
        drawn_at: list[int] = []
        for row, end in zip(rows, planned.shape.offsets[1:].tolist(), strict=True):
            if row.drafted:
                drawn_at += range(end - 1 - row.drafted, end)
            elif row.draw is not None:
                drawn_at.append(end - 1)
        tokens_m, drawn_n = input_tokens(rows, len(ctx.positions_m) - ctx.count, device, drawn_at)
        turned = turned_positions(rows, planned.shape.positions, len(tokens_m)) if self.decoder.turned else None
        ctx.turned_cm = None if turned is None else to_device(turned, device)
        if self.followers is not None:
            self.ranks.first(torch.cat((tokens_m, stale_b.long(), *ctx.told(self.decoder.turned))))
        ctx.mute(stale_b)
        if self.pictures is not None:
            placed = zip(planned.shape.offsets[:-1].tolist(), (row.pictures for row in rows), strict=True)
            ctx.pictured = self.pictures.placed(placed)
        if planned.histories is not None:
            self._histories.update(planned.histories, tokens_m)
        chosen: list[Tensor] | None = [] if any(row.routed for row in rows) else None
        ctx.chosen = chosen
        x_mh = self._replayed(tokens_m, ctx, doors) if self.graphs is not None and marks is None else None
        if x_mh is None:
            x_mh = self.decoder.forward(tokens_m, ctx)
        firsts = planned.shape.offsets[:-1].tolist()
        logits_nv = self.decoder.logits(x_mh.index_select(0, drawn_n), self.numerics) if drawn_at else None
        scores: list[Sequence[Logprobs]] = [()] * len(rows)
        replays: list[Sequence[RedrawnTokens]] = [()] * len(rows)
        for at, (row, first) in enumerate(zip(rows, firsts, strict=True)):
            if row.score:
                scores[at] = [part.to_host() for part in self._score(row, x_mh[first:])]
            if row.replay is not None:
                logits, at_once = partial(self.decoder.logits, numerics=self.numerics), self._logits_at_once
                found = redraw(row, x_mh[first:], logits, at_once, triton=self._triton)
                replays[at] = [part.to_host() for part in found]
        pooled = pooled_prompts(self.decoder, self.numerics, rows, planned.shape.offsets.tolist(), x_mh)
        experts_tlk = None if chosen is None else to_host(torch.stack(chosen, 1).to(torch.int16))
        return ForwardResults(logits_nv, scores, replays, pooled, to_host(stale_b), experts_tlk)

    def _replayed(self, tokens_m: Tensor, ctx: ForwardContext, doors: Mapping[str, GatePass]) -> Tensor | None:
        """Replay a step that was captured: as `Decoder.forward`; None where the step has to be launched by kernels."""
        if self.graphs is None or ctx.adapters is not None or ctx.pictured is not None or ctx.turned_cm is not None:
            return None  # A graph has no input for these.
        if ctx.chosen is not None or any(door.gates for door in doors.values()):
            return None  # Nor does it tell which experts it chooses, or wait for loads.
        return self.graphs.replay(tokens_m, ctx)

    @torch.inference_mode()
    def capture(
        self, capture: Capture, *, rows: int, context: int, within_s: float, drafted: DraftedSteps | None = None
    ) -> None:
        """Capture the forward passes of steps of up to `rows` rows in contexts of up to `context` positions, and of
        `drafted` ones: as many sizes as can be begun in `within_s` seconds. Raises `ConfigError` where steps can't be
        captured, or compute other bits then."""
        if self.ranks.size > 1:
            raise ConfigError(f"its {self.ranks.size} ranks add up their results on the host, between kernels")
        if self.decoder.draft is not None:
            raise ConfigError("steps of a model with engine.draft_model aren't captured yet")
        graphs = StepGraphs(
            self.decoder, self.numerics, self.attention, self.spec, self._gates, self._device.torch_device,
            rows=rows, context=context, drafted=drafted,
        )  # fmt: skip
        graphs.capture(capture, within_s)
        self.graphs = graphs

    @torch.inference_mode()
    def follow(self, order: RunStep) -> None:
        """Compute a follower's part of a step; the leader broadcasts tokens and stale rows."""
        doors = {pool.name: self._gates[pool.name].enter(pool.name) for pool in self.spec.pools}
        ctx = self._context(self._ordered(order), doors)
        if self.experts is not None:
            ctx.spread = self.experts.begin(ctx.count)
        count, rows = len(ctx.positions_m), len(order.rows)
        told = self.ranks.first(ctx.positions_m.new_zeros(count + rows + sum(map(len, ctx.told(self.decoder.turned)))))
        ctx.mute(told[count : count + rows].bool())
        if self.decoder.turned:
            ctx.turned_cm = told[count + rows :].view(3, count)
        self.decoder.forward(told[:count], ctx)

    def _ordered(self, order: RunStep) -> PlannedStep:
        """The step that the leader planned; this rank's block tables have the same rows as the leader's."""
        for entry in order.entries:
            pages = numbers(list(entry.indices))
            epochs = array("i", bytes(4 * len(pages)))  # The leader says what is stale.
            self._tables[entry.pool].enter([RowUpdate(DeviceRow(entry.row), entry.first, (pages, epochs))])
        tables: dict[str, PlannedTables] = {}
        slots: dict[str, PlannedSlots] = {}
        at = {place.pool: n for n, place in enumerate(order.rows[0].tables)}
        for pool in self.spec.pools:
            places = [row.tables[at[pool.name]] for row in order.rows]
            rows = [place.row for place in places]
            if pool.kind is PoolKind.STATE:
                slots[pool.name] = PlannedSlots([[slot] for slot in rows], [[0] for _ in rows])
            else:
                firsts, stops = [place.first for place in places], [place.stop for place in places]
                tables[pool.name] = PlannedTables(rows, firsts, stops, ())
        starts, counts = [row.start for row in order.rows], [row.tokens for row in order.rows]
        return PlannedStep(StepShape.of(starts, counts), tables, slots, None)

    def context(self, planned: PlannedStep, doors: Mapping[str, GateDoor]) -> ForwardContext:
        """Make the forward context of a planned step, after its block tables were brought to the device; `doors` are
        the gates'."""
        for pool, tables in planned.tables.items():
            self._tables[pool].update(tables)
        return self._context(planned, doors)

    def _context(self, planned: PlannedStep, doors: Mapping[str, GateDoor]) -> ForwardContext:
        shape, device, size = planned.shape, self._device.torch_device, self.spec.page_tokens
        count = len(shape.positions)
        padding = np.zeros(self.numerics.padded(count) - count, dtype=np.int64)
        known: dict[str, HostIntegers] = {
            "starts": shape.starts,
            "offsets": shape.offsets,
            "sequences": shape.sequences,
            "positions": np.concatenate((shape.positions, padding)) if len(padding) else shape.positions,
        }
        for pool, tables in planned.tables.items():
            known[f"rows of {pool}"] = np.array(tables.rows, dtype=np.int64)
            known[f"firsts of {pool}"] = np.array(tables.firsts, dtype=np.int32)
        for pool, mine in planned.slots.items():
            known[f"slots of {pool}"] = np.array(mine.slots, dtype=np.int32)
            known[f"epochs of {pool}"] = np.array(mine.epochs, dtype=np.int32)
        there = dict(zip(known, upload(list(known.values()), device), strict=True))
        on_device = (there["starts"], there["offsets"], there["sequences"], there["positions"][:count])

        plans: dict[str, AttentionPlan] = {}
        for pool, tables in planned.tables.items():
            rows_b, kept = there[f"rows of {pool}"], self._tables[pool]
            if self.spec.by_name[pool].kind is PoolKind.WINDOW:
                firsts, firsts_b = known[f"firsts of {pool}"], there[f"firsts of {pool}"]
                pages_bw, epochs_bw = kept.windows(tables, rows_b, firsts_b)
                plans[pool] = make_plan(shape, on_device, pages_bw, size, epochs_bw, firsts, firsts_b)
            else:
                # On a CPU the tables say themselves which rows are stale.
                epochs_bp = None if kept.on_cpu else kept.epochs(tables, rows_b)
                plans[pool] = make_plan(shape, on_device, kept.pages(tables, rows_b), size, epochs_bp)
        starts, counts = tuple(shape.starts.tolist()), tuple(shape.counts.tolist())
        slots = {
            pool: SlotPlan(there[f"slots of {pool}"], starts, counts, *on_device[:2], there[f"epochs of {pool}"])
            for pool in planned.slots
        }
        return ForwardContext(
            self.numerics,
            self.attention,
            there["positions"],
            int(shape.ends.max()),
            count,
            plans,
            slots,
            doors,
            self.ranks,
            adapters=planned.adapters,
        )

    def _stale(self, ctx: ForwardContext, planned: PlannedStep) -> Tensor:
        """[B] bool: sequences of which a page or slot was freed after it was leased."""
        device = self._device.torch_device
        found = []
        tables: dict[str, BackendPlan] = {**ctx.plans, **ctx.slots}
        for pool, plan in tables.items():
            kept = self._tables.get(pool)
            if kept is not None and kept.on_cpu and self.spec.by_name[pool].kind is PoolKind.FULL:
                found.append(kept.stale(planned.tables[pool], self._epochs[pool]))
            else:
                found.append(self.attention.stale(plan, self._epochs[pool].on(device)))
        return found[0] if len(found) == 1 else torch.stack(found).any(0)

    @torch.inference_mode()
    def _draw(self, step: LaunchedStep, wanted: Sequence[TokenDraw]) -> DrawnRows:
        """Draw for the rows that do, by the logits of the step's forward pass."""
        histories = step.planned.histories

        def read(some: Sequence[int]) -> Tensor:
            assert histories is not None, "who draws by a history has it planned"
            return self._histories.read(histories, [step.drawing[i] for i in some])

        return draw_tokens(step.take_logits(), wanted, triton=self._triton, histories=read)

    def _score(self, row: BatchRow, x_th: Tensor) -> Iterator[Logprobs]:
        """Log-probabilities of the tokens in `row.score`, some rows of logits at a time."""
        follow = to_device(row.score or (), x_th.device)
        step = max(1, self._logits_at_once)
        for begin in range(0, len(follow), step):
            part = follow[begin : begin + step]
            logits_nv = self.decoder.logits(x_th[begin : begin + len(part)], self.numerics)
            yield token_logprobs(logits_nv, part, [row.score_top] * len(part))

    def _naming(self, rows: Sequence[BatchRow], op: DeviceOp) -> DeviceOp:
        """The operation `op` of a step, with the pages and slots that it reads, and those that it writes."""
        size = self.spec.page_tokens
        reads: dict[str, set[int]] = {pool: set() for pool in self.spec.by_name}
        writes: dict[str, set[int]] = {pool: set() for pool in self.spec.by_name}
        for row in rows:
            for pool, table in row.tables.items():
                pages = table.pages
                state = self.spec.by_name[pool].kind is PoolKind.STATE
                end = -(-(row.start + len(row.tokens)) // size) - table.first
                reads[pool].update(pages if state else pages[:end])
                writes[pool].update(pages if state else pages[row.start // size - table.first : end])
        read, written = (spans(DEVICE, {pool: sorted(pages) for pool, pages in of.items()}) for of in (reads, writes))
        return replace(op, reads=read, writes=written)


def adapters_of(
    rows: Sequence[BatchRow], shape: StepShape, store: AdapterStore | None, numerics: Numerics
) -> StepAdapters | None:
    """The adapters of a step's rows, which are in memory; None where no row has one."""
    if all(row.adapter is None for row in rows):
        return None
    assert store is not None, "nobody without adapters has let such a request in"
    wanted = {row.adapter.digest for row in rows if row.adapter is not None}
    assert wanted <= store.loaded.keys(), "an adapter stays as long as a request needs it"
    used = [None if row.adapter is None else store.loaded[row.adapter.digest] for row in rows]
    held = store.held([one for one in used if one is not None])
    numbers = [held.number(one) for one in used]
    return StepAdapters(held, numbers, shape.counts, numerics.padded(int(shape.offsets[-1])))
