"""One step: as the host plans it before the device runs it, and as it was launched, with its results on the way to the
host, the vectors of prompts among them; the packing of a step's input tokens; and a rank's part in the steps of
others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from twinpool.cache.device.device_copies import to_device, to_host, upload
from twinpool.cache.device.device_port import DONE, Completion, DeviceOp, DeviceStream
from twinpool.contracts.messages.rank_orders import RowOrder, RunStep, ServeExperts, TableEntries, TablePlace
from twinpool.contracts.sampling_params import CLASSES, JUDGED, ChosenExperts
from twinpool.engine.attention.attention_plan import StepShape
from twinpool.engine.layers.decoder import Decoder
from twinpool.engine.native.current_kernels import using
from twinpool.engine.runner.batch import BatchRow, DrawnToken, PromptPooling, RowOutput, TokenDraw, TokenFromStep
from twinpool.engine.runner.device_rows import PlannedHistories, PlannedTables
from twinpool.engine.runner.sampling.redraw import RedrawnTokens
from twinpool.engine.runner.sampling.sampler import DrawnRows, Logprobs
from twinpool.engine.tensors.adapters import StepAdapters
from twinpool.engine.tensors.row_exact_linear import Numerics

if TYPE_CHECKING:
    from twinpool.engine.runner.model_runner import ModelRunner


@dataclass(frozen=True, slots=True)
class PlannedSlots:
    """The slots of one state pool that a planned step reads and writes, one a sequence, with their epochs."""

    slots: list[list[int]]
    """[B][1]"""
    epochs: list[list[int]]
    """[B][1]"""


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """The shape of a step, and what it needs of every pool, by name."""

    shape: StepShape
    tables: Mapping[str, PlannedTables]
    """Of full and window pools."""
    slots: Mapping[str, PlannedSlots]
    """Of state pools."""
    histories: PlannedHistories | None
    """Of rows that draw by a history; None where none does."""
    adapters: StepAdapters | None = None
    """Those of its rows; None where no row has one."""


@dataclass
class ForwardResults:
    """The results of a step's forward pass: tensors on their way to the host, readable once the step is complete."""

    logits_nv: Tensor | None
    """[n, vocab] float32, on the device: of the positions to draw behind, until they are drawn; None without any."""
    scores: Sequence[Sequence[Logprobs]]
    """For each row, the log-probabilities of its scored tokens, in runs; empty where it asked for none."""
    replays: Sequence[Sequence[RedrawnTokens]]
    """For each row, the parts of its known answer that were drawn again; empty where it has none."""
    embeddings: Mapping[int, Tensor]
    """By row, the vector of the prompt that it ends, float32, where asked for."""
    stale_b: Tensor
    """[B] bool: rows of whose tables a page or slot was freed after it was leased."""
    experts_tlk: Tensor | None = None
    """[T, layers, k] int16: the experts that each token of the step goes to, where a row asks for them."""

    def routed(self, first: int, count: int) -> list[ChosenExperts]:
        """The experts of `count` tokens of the step from number `first` on. Call once complete."""
        assert self.experts_tlk is not None, "a row asked for them"
        part_tlk = self.experts_tlk[first : first + count].numpy().astype("<u2")
        return [ChosenExperts(part_tlk.shape[2], chosen_lk.tobytes()) for chosen_lk in part_tlk]

    def damaged(self, row: int) -> bool:
        """Whether logits by which tokens of this row were scored or drawn again, or its embedding, are not finite. Call
        once complete."""
        embedding_h = self.embeddings.get(row)
        if embedding_h is not None and not bool(embedding_h.isfinite().all()):
            return True
        flags = [part.nonfinite_n for part in self.scores[row]] + [part.nonfinite_n for part in self.replays[row]]
        return any(bool(flag_n.any()) for flag_n in flags)


UNIT = 2.0**-26
"""What a hidden state is rounded to a multiple of before it is added to the sum of a mean: a quarter of what float32
tells apart near 1. Sums of whole multiples are exact, so a mean has the same bits in any chunks and any order."""
_MOST = 2.0**13
"""A hidden state of this magnitude, or beyond it, counts as no number in a mean: so sums of as many positions as a
sequence may have (`contracts.message_types.POSITIONS`) are below 2**63 units."""
_SUMMED_ROWS = 256
"""Rows that are summed at once, for the memory that their whole numbers take."""


def pooled_prompts(
    decoder: Decoder, numerics: Numerics, rows: Sequence[BatchRow], offsets: Sequence[int], x_mh: Tensor
) -> dict[int, Tensor]:
    """By row that ends a prompt, the vector that was asked for, float32 on its way to the host; of other rows, what its
    prompt's vector needs of them is kept. `offsets`: where each row begins in `x_mh`, and the last one's end."""
    found, last = dict[int, Tensor](), dict[str, list[int]]()
    for number, row in enumerate(rows):
        pooling = row.pooling
        if pooling is None:
            continue
        ends = row.start + len(row.tokens) == pooling.length
        if pooling.way in ("mean", "cls"):
            _keep(pooling, row.start, decoder, x_mh[offsets[number] : offsets[number + 1]])
            if ends:
                found[number] = _kept(pooling)
        elif ends:
            last.setdefault(pooling.way, []).append(number)
    for way, numbers in last.items():
        x_nh = x_mh.index_select(0, to_device([offsets[number + 1] - 1 for number in numbers], x_mh.device))
        if way == JUDGED:
            vectors = decoder.logits(x_nh, numerics)
        else:
            vectors = decoder.classes(x_nh, numerics) if way == CLASSES else decoder.embeddings(x_nh)
        found |= zip(numbers, vectors, strict=True)
    return {number: to_host(_finished(rows[number].pooling, one, decoder, numerics)) for number, one in found.items()}


def _finished(pooling: PromptPooling | None, vector: Tensor, decoder: Decoder, numerics: Numerics) -> Tensor:
    """What is sent of a prompt's vector: the logits of its tokens, or what `Dense` modules make of it."""
    assert pooling is not None
    if pooling.way == JUDGED:
        return vector.index_select(0, to_device(pooling.tokens, vector.device))
    return decoder.projected(vector[None], numerics)[0] if pooling.dense else vector


def _keep(pooling: PromptPooling, start: int, decoder: Decoder, x_nh: Tensor) -> None:
    """Keep what a prompt's vector needs of its positions from `start` on, [n, hidden] of the last layer's output."""
    assert start == pooling.taken, "a prompt's chunks come one after the other, from the first"
    pooling.taken += len(x_nh)
    if pooling.way == "cls":
        pooling.kept_h = decoder.embeddings(x_nh[:1])[0] if start == 0 else pooling.kept_h
        return
    for part_nh in torch.split(x_nh, _SUMMED_ROWS):
        hidden_nh = decoder.embeddings(part_nh)
        sum_h = (hidden_nh.double() / UNIT).round().long().sum(0)
        most = hidden_nh.abs().max()
        pooling.kept_h = sum_h if pooling.kept_h is None else pooling.kept_h + sum_h
        pooling.most = most if pooling.most is None else torch.maximum(pooling.most, most)


def _kept(pooling: PromptPooling) -> Tensor:
    """The vector of a prompt of which all positions were kept: [hidden] float32; NaN where it can't be told."""
    assert pooling.kept_h is not None
    if pooling.most is None:
        return pooling.kept_h
    mean_h = (pooling.kept_h.double() / (pooling.length / UNIT)).float()
    return torch.where(pooling.most < _MOST, mean_h, torch.nan)


class LaunchedStep:
    """Implements `engine.runner.batch.StepHandle`; `ModelRunner` fills it when the device runs the step."""

    def __init__(self, rows: Sequence[BatchRow], planned: PlannedStep) -> None:
        self.rows, self.planned = rows, planned
        self.drawing: list[int] = []
        """The row of each draw, in order: a row with drafts is there once for each of its draws."""
        self.draws: list[TokenDraw] = []
        """The draws, in the same order."""
        for number, row in enumerate(rows):
            if row.draw is None:
                continue
            if row.drafted:
                self.drawing += [number] * (1 + row.drafted)
                self.draws += row.draws
            else:
                self.drawing.append(number)
                self.draws.append(row.draw)
        self.forward: Completion = DONE
        """The completion of the forward pass alone."""
        self.completion: Completion = DONE
        self._computed: ForwardResults | None = None
        self._tokens_n: Tensor | None = None
        self._draws: DrawnRows | None = None

    @property
    def done(self) -> bool:
        return self.completion.done

    def fill(self, computed: ForwardResults) -> None:
        self._computed = computed

    def take_logits(self) -> Tensor:
        """The logits of the draws, [n, vocab] float32; once. For an operation that runs later on the same stream.
        Raises what the forward pass raised."""
        if self._computed is None:
            self.forward.wait()
        assert self._computed is not None, "the draw runs after the forward pass"
        logits_nv, self._computed.logits_nv = self._computed.logits_nv, None
        assert logits_nv is not None, "a step draws once"
        return logits_nv

    def draw(self, drawn: DrawnRows) -> None:
        self._tokens_n, self._draws = drawn.tokens_n, drawn.to_host()

    def tokens(self, rows: Sequence[int]) -> Tensor:
        """The tokens that `rows`, which have no drafts, drew, [n] int64 on the device. For operations that run later on
        the same stream."""
        tokens_n = self._tokens_n
        assert tokens_n is not None, "the rows draw, and a later operation of the same stream runs later"
        if list(rows) == self.drawing:
            return tokens_n
        at = {row: i for i, row in enumerate(self.drawing)}
        return tokens_n.index_select(0, to_device([at[row] for row in rows], tokens_n.device))

    def outputs(self) -> list[RowOutput]:
        """Return one output a row, in order; waits for the device. Raises what the step raised."""
        self.completion.wait()
        computed = self._computed
        assert computed is not None, "a complete step has been computed"
        draws = iter(self._draws.listed() if self._draws is not None else [])
        outputs: list[RowOutput] = []
        for row, stale in zip(self.rows, computed.stale_b.tolist(), strict=True):
            if row.drafted:
                outputs.append(accepted_draws(row, list(islice(draws, 1 + row.drafted)), stale=stale))
            elif row.draw is None:
                outputs.append(RowOutput(stale=stale))
            else:
                drawn = next(draws)
                outputs.append(RowOutput(drawn, stale=stale, nonfinite=drawn is None))
        for number, (scores, replays) in enumerate(zip(computed.scores, computed.replays, strict=True)):
            embedding_h = computed.embeddings.get(number)
            if scores or replays or embedding_h is not None:
                outputs[number] = outputs[number]._replace(
                    scores=tuple(score for part in scores for score in part.listed()),
                    replayed=sum(len(part.tokens_n) for part in replays),
                    differences=tuple(found for part in replays for found in part.listed()),
                    nonfinite=outputs[number].nonfinite or computed.damaged(number),
                    embedding=() if embedding_h is None else tuple(embedding_h.tolist()),
                )
        if computed.experts_tlk is not None:
            shape = self.planned.shape
            for number, row in enumerate(self.rows):
                if row.routed:
                    experts = computed.routed(int(shape.offsets[number]), int(shape.counts[number]))
                    outputs[number] = with_experts(outputs[number], experts, row.drafted)
        return outputs


def with_experts(output: RowOutput, experts: Sequence[ChosenExperts], drafted: int) -> RowOutput:
    """A row's output, whose log-probabilities have the experts of the positions that they were computed at. `experts`:
    of the row's tokens, of which the last `drafted` are drafts."""
    scores = [structs.replace(score, experts=mine) for score, mine in zip(output.scores, experts, strict=False)]
    drawn = [] if output.drawn is None else [*output.accepted, output.drawn]
    told = [
        one if one.logprob is None else one._replace(logprob=structs.replace(one.logprob, experts=mine))
        for one, mine in zip(drawn, experts[len(experts) - 1 - drafted :], strict=False)
    ]
    return output._replace(scores=tuple(scores), accepted=tuple(told[:-1]), drawn=told[-1] if told else None)


def accepted_draws(row: BatchRow, draws: Sequence[DrawnToken | None], *, stale: bool = False) -> RowOutput:
    """The output of a row by its draws (`BatchRow.draws`); None where nothing could be drawn.

    A draw counts where all drafts before it are what was drawn in their places: only then it was made from the state
    of its own sequence.
    """
    if not draws:
        return RowOutput(stale=stale)
    accepted: list[DrawnToken] = []
    drafts = row.tokens[-row.drafted :] if row.drafted and not isinstance(row.tokens, TokenFromStep) else ()
    for draft, drawn in zip(drafts, draws, strict=False):
        if drawn is None or drawn.token != draft:
            break
        accepted.append(drawn)
    last = draws[len(accepted)]
    return RowOutput(last, stale=stale, nonfinite=last is None, accepted=tuple(accepted))


def input_tokens(
    rows: Sequence[BatchRow], padding: int, device: torch.device, beside: Sequence[int] = ()
) -> tuple[Tensor, Tensor]:
    """Pack a step's tokens and pad them with zeros: [M] int64. Tokens of earlier steps are copied on the device.

    `beside`: numbers that go up in the same copy, returned as int64.
    """
    known: list[int] = []
    pending: dict[LaunchedStep, tuple[list[int], list[int]]] = {}
    for row in rows:
        source = row.tokens
        if isinstance(source, TokenFromStep):
            assert isinstance(source.step, LaunchedStep)
            places, drawn = pending.setdefault(source.step, ([], []))
            places.append(len(known))
            drawn.append(source.row)
            known.append(0)
        else:
            known += source
    numbers = [known + [0] * padding, list(beside), *(places for places, _ in pending.values())]
    tokens_m, beside_n, *all_places = upload([np.array(some, dtype=np.int64) for some in numbers], device)
    for places_n, (step, (_, drawn)) in zip(all_places, pending.items(), strict=True):
        tokens_m.index_copy_(0, places_n, step.tokens(drawn))
    return tokens_m, beside_n


def compute_order(planned: PlannedStep) -> RunStep:
    """Make the order by which followers compute a step: positions and block tables, without tokens."""
    places = {
        pool: [TablePlace(pool, *place) for place in zip(mine.rows, mine.firsts, mine.stops, strict=True)]
        for pool, mine in planned.tables.items()
    } | {pool: [TablePlace(pool, slot, 0, 1) for (slot,) in mine.slots] for pool, mine in planned.slots.items()}
    starts, counts = planned.shape.starts.tolist(), planned.shape.counts.tolist()
    rows = zip(starts, counts, zip(*places.values(), strict=True), strict=True)
    entries = [
        TableEntries(pool, one.row.number, one.first, tuple(one.entries[0]))
        for pool, mine in planned.tables.items()
        for one in mine.updates
    ]
    return RunStep(tuple(RowOrder(*row) for row in rows), tuple(entries))


_TAKE_PART = DeviceOp("take part", DeviceStream.COMPUTE)


@torch.inference_mode()
def serve_experts(engine: ModelRunner) -> None:
    """Take part, without rows, in one step of the workers that `engine` shares its experts with, on this rank."""
    group, decoder = engine.experts, engine.decoder
    assert group is not None, "it shares its experts"
    with using(decoder.kernels):
        like = torch.empty(0, dtype=decoder.dtype, device=engine.device.torch_device)
        group.take_part(decoder.mixtures, like, engine.numerics)


def take_part(engine: ModelRunner, *, drained: bool) -> None:
    """Take part, without rows, in steps of the workers that `engine` shares its experts with, with all ranks.
    `drained`: whether it needs no further step itself, which they are told. Raises what a step raises."""
    group = engine.experts
    assert group is not None, "it shares its experts"

    def step() -> None:
        if group.due:  # Else a step of its own that had waited on the device was the one.
            if engine.followers is not None:
                engine.followers.send(ServeExperts())
            serve_experts(engine)

    group.drained = drained
    while group.due:
        engine.device.submit(_TAKE_PART, step).wait()
