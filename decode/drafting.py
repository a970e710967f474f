"""Drafting: which requests of a step get drafts, and how many.

A step reads all weights whatever it computes, so while few requests run a row may as well carry some more positions:
the token that it goes on from and, behind it, a draft of those to come. Each is drawn as usual, from (seed, choice,
position), so a draft that equals what is drawn in its place has saved a step, and any other has cost a little
arithmetic: drafts change how fast an answer comes, and never a token of it.

What was computed for a draft that is rejected lies behind the committed positions: nobody hashes, shares or sends it,
and the next step writes over it. Recurrent states are the same within a block of positions, but a whole block is folded
into one matrix: so a row's drafts end before its block does.

How many drafts a request has follows from what they gain. A step of about `n` positions takes `a + b n` seconds, and
proposing `d` tokens `c d`; how often a draft of each place is drawn that follows drawn ones is counted by request. So
the tokens a second of the next step are known for any choice, and the best one is taken (`Drafting.verdict`): none
where all would lose, at one request as at many, looked up or made by a model. Every 32 steps, later 128, one request in
eight has a draft even where none pays, and others have one less, to see what has changed. Before times are known, all
may have drafts while at most `decode.draft_requests` run, and nobody while more do.

Drafts follow from the tokens that the host knows. So the next step of a request for which there is a draft isn't
launched before the one under way has landed, and a step with drafts is followed by none before its own landing: how far
it comes is known only then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

from msgspec import structs

from twinpool.cache.memory.kv_cache_spec import PoolSetSpec
from twinpool.contracts.block_hash import PICTURE_KEYS
from twinpool.contracts.clock import Clock
from twinpool.contracts.config.worker_config import DecodeConfig
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.decode.request import DecodePages, DecodeRequest
from twinpool.engine.attention.attention_backend import undoable_positions
from twinpool.engine.layers.decoder import FEATURES
from twinpool.engine.runner.batch import DraftRow, TokenDraw
from twinpool.engine.runner.model_runner import ModelRunner
from twinpool.engine.structured_output.grammar_engine import GrammarError

_REMEMBERED = 0.98
"""Weight of a draft after the next one of its place, in the rate of all requests: about the last fifty count."""
_REMEMBERED_STEP = 0.95
"""Weight of a step after the next one of its size: about the last twenty count."""
_ALIKE = 4
"""Sizes are alike up to so many times each other."""
_MIN_STEPS = 16
"""Steps below which nothing is known."""
_MAX_TIMES = 3.0
"""A step that took more than so many times what was expected counts as that."""
_REMEMBERED_DRAFT = 0.9
"""Weight of a draft after the next one of its place, in a request's rate."""
_UNKNOWN_RATE = 0.5
"""How often a draft is drawn of a place of which nothing is known."""
_LOOK_STEPS, _LOOK_LATER = 32, 128
"""Steps from one in which requests have a draft though none pays to the next such step: twice as many each time, up to
the second."""
_LOOKING = 8
"""Of so many requests one has a draft then."""
NGRAM = 3
"""Tokens that must occur again."""
_BITS = 21
"""Of a token in a key: no vocabulary has more than two million tokens. Of a key of a picture only some are looked at,
since a draft may be wrong."""
_TOKEN = (1 << _BITS) - 1
_REACH = 16384
"""Positions that are looked through, the latest ones: an index of them takes about 2 MB."""
_AT_ONCE = 1024
"""Positions that one look-up adds to the index, so that no step waits for a long prompt to be indexed."""


class PromptLookup:
    """The index of one request's tokens: a draft of the next ones is what followed the last time that the latest ones
    occurred.

    The method is prompt lookup decoding (A. Saxena, 2023), n-gram speculation elsewhere: where an answer repeats its
    prompt or itself, as in code, summaries and tool calls, the continuation is there to be copied. It takes no model
    and no memory of the device.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        """`tokens`: the request's own list, prompt and answer so far, which grows behind."""
        self._tokens = tokens
        self._behind: dict[int, int] = {}
        """By n-gram, the position behind its latest occurrence."""
        self._indexed = max(0, len(tokens) - _REACH)
        """The position from which on n-grams begin that aren't in the index yet."""

    def propose(self, most: int) -> list[int]:
        """Return up to `most` tokens that may come next; none where the latest ones are new, or not looked at yet."""
        tokens, last = self._tokens, len(self._tokens) - NGRAM
        if last < 0 or most <= 0:
            return []
        if len(self._behind) > 2 * _REACH:
            self._behind.clear()
            self._indexed = last - _REACH
        stop = min(last, self._indexed + _AT_ONCE)
        for at in range(self._indexed, stop):
            self._behind[self._key(at)] = at + NGRAM
        self._indexed = stop
        behind = self._behind.get(self._key(last))
        if behind is None:
            return []
        draft: list[int] = []
        for at in range(behind, behind + most):
            # A run that repeats itself up to here goes on by its own draft.
            token = tokens[at] if at < len(tokens) else draft[at - len(tokens)]
            if token >= PICTURE_KEYS:
                break
            draft.append(token)
        return draft

    def _key(self, at: int) -> int:
        key = 0
        for token in self._tokens[at : at + NGRAM]:
            key = key << _BITS | token & _TOKEN
        return key


class WantedDraft(NamedTuple):
    """A request that is to have a draft of up to `most` tokens; it has pages for as many."""

    request: DecodeRequest
    most: int


class Drafter(Protocol):
    """Makes drafts."""

    def ready(self, request: DecodeRequest) -> bool:
        """Return whether there is a guess of what comes behind the request's latest token."""

    def propose(self, wanted: Sequence[WantedDraft]) -> Sequence[Sequence[int]]:
        """Return a draft for each, in order: tokens that may come behind the latest one; none without a guess."""


class PromptLookupDrafter:
    """Implements `Drafter` by what a request's own tokens have in common."""

    def __init__(self) -> None:
        self._lookups: WeakKeyDictionary[DecodeRequest, PromptLookup] = WeakKeyDictionary()

    def ready(self, request: DecodeRequest) -> bool:
        return bool(self._lookup(request).propose(1))

    def propose(self, wanted: Sequence[WantedDraft]) -> Sequence[Sequence[int]]:
        return [self._lookup(request).propose(most) for request, most in wanted]

    def _lookup(self, request: DecodeRequest) -> PromptLookup:
        lookup = self._lookups.get(request)
        if lookup is None:
            lookup = self._lookups[request] = PromptLookup(request.tokens)
        return lookup


class DraftModelDrafter:
    """Implements `Drafter` by the model's draft layer, whose state lies in the requests' pages."""

    def __init__(self, engine: ModelRunner, pages: DecodePages) -> None:
        self._engine, self._running = engine, pages.manager.running
        self._plain: WeakKeyDictionary[DecodeRequest, SamplingParams] = WeakKeyDictionary()

    def ready(self, request: DecodeRequest) -> bool:
        return True

    def propose(self, wanted: Sequence[WantedDraft]) -> Sequence[Sequence[int]]:
        return self._engine.propose([self._row(request, most) for request, most in wanted])

    def _row(self, request: DecodeRequest, most: int) -> DraftRow:
        at, submit = request.planned, request.submit
        tables = self._running.block_tables(request.held, at, at + most)
        plain = self._plain.get(request)
        if plain is None:
            plain = self._plain[request] = _plain(submit.sampling)
        draw = TokenDraw(plain, (), submit.prompt_len, at + 1, request.mask)
        return DraftRow(request.tokens[-1], at, tables, most, draw)


def _plain(params: SamplingParams) -> SamplingParams:
    """`params` without what hangs on the tokens before, which a proposal may leave out."""
    return structs.replace(
        params, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, min_tokens=0, logprobs=None
    )


def make_drafter(config: DecodeConfig, engine: ModelRunner, pages: DecodePages) -> Drafter:
    """The drafter that `config`, worked out by `with_speculation`, asks for."""
    return DraftModelDrafter(engine, pages) if config.speculation == "draft_model" else PromptLookupDrafter()


def with_speculation(config: DecodeConfig, spec: PoolSetSpec) -> DecodeConfig:
    """`config` with ``auto`` of `decode.speculation` made what a model with these pools has."""
    if config.speculation != "auto":
        return config
    model = any(buffer.name == FEATURES for buffer in spec.full.buffers)
    return replace(config, speculation="draft_model" if model else "prompt_lookup")


class StepTimes:
    """What a position adds to a step, by the steps so far: near a size about `a + b n` seconds for `n` positions.

    Steps are remembered by size (`_size_class`), the latest of each, and fitted by least squares over those whose sizes
    are like the one asked for (`_ALIKE`), or over all where these tell nothing: no one line is right for all sizes, and
    what a step of many requests takes must not decide on the drafts of the one that comes after them.
    """

    def __init__(self) -> None:
        self._sums: dict[int, tuple[float, float, float]] = {}
        """By class of size, the weight of its steps, and its weighted positions and seconds."""
        self._steps = 0

    def saw(self, positions: int, seconds: float) -> None:
        """Take in that a step of so many positions took so long."""
        if seconds <= 0.0:
            return
        if (expected := self.seconds(positions)) is not None:
            seconds = min(seconds, _MAX_TIMES * expected)  # Something else was in the way.
        self._steps += 1
        kind = _size_class(positions)
        before = self._sums.get(kind, (0.0, 0.0, 0.0))
        weight, size, total = (_REMEMBERED_STEP * old for old in before)
        self._sums[kind] = weight + 1.0, size + positions, total + seconds

    @property
    def alike(self) -> bool:
        """Whether enough steps were seen, and all of about one size, which doesn't tell what a position adds."""
        return self._steps >= _MIN_STEPS and len(self._sums) == 1

    def seconds(self, positions: int) -> float | None:
        """The seconds of a step; None before anything is known."""
        fit = self.fit(positions)
        return None if fit is None else fit[0] + fit[1] * positions

    def fit(self, around: int) -> tuple[float, float] | None:
        """The seconds of a step and of a position, none negative, for steps of about `around` positions; None while
        steps were few, or all of one size."""
        if self._steps < _MIN_STEPS or self.alike:
            return None
        known = [(size / weight, weight, size, total) for weight, size, total in self._sums.values()]
        near = [one for one in known if max(one[0], around) <= _ALIKE * min(one[0], around)]
        weights = sizes = squares = seconds = products = 0.0
        for mean, weight, size, total in near if len(near) > 1 else known:
            weights, sizes, squares = weights + weight, sizes + size, squares + size * mean
            seconds, products = seconds + total, products + total * mean
        slope = max(0.0, (weights * products - sizes * seconds) / (weights * squares - sizes * sizes))
        base = (seconds - slope * sizes) / weights
        return (base, slope) if base > 0.0 else (0.0, seconds / sizes)


def _size_class(positions: int) -> int:
    """Sizes of a class count as one: each up to 16 by itself, then an eighth of each octave."""
    octave = max(0, positions.bit_length() - 4)
    return 8 * octave + (positions >> octave)


class StepVerdict(NamedTuple):
    """What drafts are worth in the next step."""

    depth: int
    """The places that a draft may have; 0: none pay."""
    share: float | None = None
    """How often a draft must be drawn, at least, counted from the row's own token, to pay; None: that isn't known yet,
    and a request may have as many as were right of late."""
    gain: float = 1.0
    """Tokens a second that are expected, over those of the step without drafts."""
    tried: frozenset[int] = frozenset()
    """The ids of requests that have one draft even where none pays."""

    def most(self, request: DecodeRequest) -> int:
        """How many drafts a request may have."""
        if self.share is None:
            most = min(self.depth, request.draft_limit)
        else:
            most = sum(chance > self.share for chance in _chances(request.draft_rates[: self.depth]))
        return most or int(id(request) in self.tried)


def _chances(rates: Iterable[float]) -> Iterator[float]:
    """By place, how often a draft is drawn, from how often one is that follows drawn ones."""
    chance = 1.0
    for rate in rates:
        chance *= rate
        yield chance


class Drafting:
    """The drafts of one decode worker's requests; see the module's prose."""

    def __init__(
        self,
        pages: DecodePages,
        config: DecodeConfig,
        engine: ModelRunner,
        clock: Clock,
        drafter: Drafter | None = None,
    ) -> None:
        """`drafter`: None: the one that `config` asks for."""
        self._config = config = with_speculation(config, pages.manager.spec)
        self._pages, self._drafter, self._clock = pages, drafter or make_drafter(config, engine, pages), clock
        self.times = StepTimes()
        self.propose_s = 0.0
        """Seconds that a place of proposals takes, for all requests together."""
        self.rates = [_UNKNOWN_RATE] * config.drafts
        """By place, how often a draft was drawn that follows drawn ones: what is known of a request that is new."""
        self._looked, self._steps, self._look_steps = 0, 0, _LOOK_STEPS
        """How often requests had a draft though none paid, the steps since, and how many it takes to the next time."""
        self._turn: frozenset[int] = frozenset()
        """The ids of those that are to have one next, until a step has one of them: they wait for theirs under way."""
        self.counters = {"tokens_drafted": 0.0, "drafts_accepted": 0.0, "rows_drafted": 0.0, "draft_gain": 1.0}
        self.counters |= dict.fromkeys(("draft_steps_paying", "draft_steps_tried", "draft_steps_without"), 0.0)
        for place in range(1, config.drafts + 1):
            self.counters |= {f"drafted_at_{place}": 0.0, f"accepted_at_{place}": 0.0}

    def verdict(self, running: Sequence[DecodeRequest]) -> StepVerdict | None:
        """Return what drafts are worth in the next step, while these requests run; None: there are none."""
        if not self._config.drafts or not running:
            return None
        for request in running:
            if not request.draft_rates:
                request.draft_rates = list(self.rates)
        fit = self.times.fit(2 * len(running))  # Between the step without drafts and that with all of them.
        if fit is None:
            draft = len(running) <= self._config.draft_requests and not self.times.alike
            found = StepVerdict(self._config.drafts if draft else 0)
        else:
            found = self._best(running, *fit)
        if self._steps < self._look_steps:
            return found
        self._turn &= frozenset(map(id, running))
        if not self._turn:
            count = -(-len(running) // _LOOKING)
            turn = (running[(self._looked * count + at) % len(running)] for at in range(count))
            self._turn = frozenset(map(id, turn))
        # Steps of another size than the others, so that what a position takes is still known.
        return found._replace(depth=max(0, found.depth - 1), tried=self._turn)

    def _best(self, running: Sequence[DecodeRequest], step_s: float, position_s: float) -> StepVerdict:
        """The choice of most tokens a second: to a depth, the drafts that are likeliest to be drawn, one by one as long
        as each brings more than the step's time for it would."""
        count, found = len(running), StepVerdict(0, 1.0)
        without = count / (step_s + position_s * count)
        if max(request.draft_rates[0] for request in running) <= position_s * without:
            return found
        chances = sorted(
            (
                (chance, at)
                for request in running
                for at, chance in enumerate(_chances(request.draft_rates[: max(0, self._reach(request))]))
            ),
            reverse=True,
        )
        best = without
        for depth in range(1, self._config.drafts + 1):
            tokens, seconds = float(count), step_s + position_s * count + self.propose_s * depth
            for chance, at in chances:
                if chance * seconds <= position_s * tokens:
                    break
                if at < depth:
                    tokens, seconds = tokens + chance, seconds + position_s
            if tokens / seconds > best:
                best = tokens / seconds
                found = StepVerdict(depth, position_s * best, best / without)
        return found

    def waits(self, request: DecodeRequest, verdict: StepVerdict | None) -> bool:
        """Whether the next step of a request waits for the one that is under way: to know how far its drafts came, or
        because there is a draft for the next one that is likely to pay. `verdict`: of that step."""
        if request.drafts:
            return True
        return verdict is not None and verdict.most(request) > 0 and self._drafter.ready(request)

    def saw(self, positions: int, seconds: float) -> None:
        """Take in that a step of so many positions took so long: only where drafts are on does anybody ask."""
        if self._config.drafts:
            self.times.saw(positions, seconds)

    def plan(self, batch: Sequence[DecodeRequest], verdict: StepVerdict | None, budget: int) -> None:
        """Give drafts to the requests of a step, in order: as many as are likely to pay by the step's `verdict`, up to
        `budget` tokens in all, where there are pages for them."""
        if verdict is None or not batch:
            return
        self._took(verdict, tried=any(id(request) in verdict.tried for request in batch))
        wanted: list[WantedDraft] = []
        for request in batch:
            pays = verdict.most(request)
            most = min(budget, self._config.drafts, pays, self._reach(request))
            request.undrafted += not pays
            if request.under_way or most <= 0:
                continue
            forced = self._forced(request)
            if not forced and not self._drafter.ready(request):
                continue
            most = min(most, len(forced)) if forced else most
            most = self._pages.manager.running.extend(request.held, request.planned + 1 + most) - request.planned - 1
            if most <= 0:
                continue
            if forced:
                request.drafts = tuple(forced[:most])
            else:
                wanted.append(WantedDraft(request, most))
            budget -= most
        for (request, most), draft in zip(wanted, self._proposed(wanted) if wanted else (), strict=True):
            request.drafts = self._fitting(request, tuple(draft[:most]))

    def _reach(self, request: DecodeRequest) -> int:
        """How many drafts the next step of a request has room for, by its length and by what can be undone; it may be
        negative. The last token of the longest answer is computed by no step."""
        most = request.positions - request.planned - 1
        return min(most, undoable_positions(request.planned)) if self._pages.manager.running.stateful else most

    def _took(self, verdict: StepVerdict, *, tried: bool) -> None:
        """Count a step by its verdict; `tried`: whether it has one of those that have a draft even where none pays."""
        kind = "paying" if verdict.depth else "tried" if tried else "without"
        self.counters[f"draft_steps_{kind}"] += 1
        self.counters["draft_gain"] = verdict.gain
        self._steps += 1
        if tried:
            self._looked, self._steps, self._turn = self._looked + 1, 0, frozenset()
            self._look_steps = _LOOK_STEPS if verdict.gain > 1.0 else min(2 * self._look_steps, _LOOK_LATER)

    def _proposed(self, wanted: Sequence[WantedDraft]) -> Sequence[Sequence[int]]:
        """The drafter's proposals, whose time is measured."""
        began, depth = self._clock.now(), max(most for _, most in wanted)
        drafts = self._drafter.propose(wanted)
        place_s = (self._clock.now() - began) / depth
        if self.propose_s:
            place_s = min(place_s, _MAX_TIMES * self.propose_s)
            place_s = _REMEMBERED_DRAFT * self.propose_s + (1.0 - _REMEMBERED_DRAFT) * place_s
        self.propose_s = place_s
        return drafts

    def _forced(self, request: DecodeRequest) -> Sequence[int]:
        """The next tokens of which the request's grammar allows no others."""
        if request.grammar is None:
            return ()
        try:
            return request.grammar.behind(request.answer).forced()
        except GrammarError:
            return ()  # The step says so.

    def _fitting(self, request: DecodeRequest, draft: tuple[int, ...]) -> tuple[int, ...]:
        """As much of a draft as the request's grammar allows."""
        if request.grammar is None:
            return draft
        try:
            return draft[: request.grammar.behind(request.answer).fitting(draft)]
        except GrammarError:
            return ()

    def landed(self, request: DecodeRequest, accepted: int) -> None:
        """Count a step of the request whose first `accepted` drafts were drawn: it goes on behind them. The longer its
        drafts are right, the longer its next ones may be."""
        drafted, request.drafts = len(request.drafts), ()
        self._count(request, drafted, accepted)
        request.launched = request.planned = request.committed
        if accepted == drafted:
            request.draft_limit = min(self._config.drafts, 2 * request.draft_limit)
        else:
            request.draft_limit = max(1, accepted)

    def _count(self, request: DecodeRequest, drafted: int, accepted: int) -> None:
        """Count a step's drafts, by place; those behind the first that wasn't drawn were never judged."""
        counters = self.counters
        counters["tokens_drafted"] += drafted
        counters["drafts_accepted"] += accepted
        counters["rows_drafted"] += 1
        for place in range(1, drafted + 1):
            counters[f"drafted_at_{place}"] += 1
            counters[f"accepted_at_{place}"] += place <= accepted
        judged = min(drafted, accepted + 1)
        for rates, remembered in ((request.draft_rates, _REMEMBERED_DRAFT), (self.rates, _REMEMBERED)):
            for place, rate in enumerate(rates[:judged]):
                rates[place] = remembered * rate + (1.0 - remembered) * (place < accepted)
        request.drafted += drafted
        request.accepted += accepted
