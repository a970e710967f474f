"""A cheap watch over streams that look broken: repetition, and rare tokens. No I/O; O(1) a token, bounded memory.

It proves nothing. A model may repeat itself for good reasons, and a client may ask for rare words. But state that was
damaged without a trace shows as just this: nonsense, loops, strange characters. So the watch counts, logs and hands
what it flags to the audits, which do prove something.

**Repetition.** A stream repeats itself with period p at a token that equals the one p before it. Which p to look at is
told by the last place of the token's n-gram: one dictionary a stream, over its last tokens. While the guess at p holds,
one comparison a token carries it on; where it breaks the n-gram offers the next. The length of the run is compared with
`watch.repetition_tokens`, and must be three periods or more.

**Rare tokens.** The model's usual is learned from all its streams: how often each token has been said lately (counts
that are halved now and then). Rare are those said least that together make up `watch.rare_share` of it; how many of
them streams usually have is counted. A stream's last `watch.window_tokens` tokens are bits of one number. It is flagged
when they hold `rare_factor` times the usual number of rare ones, and so many more that chance alone would not do it in
a million windows. A stream's tokens teach the watch once they have left the window, so garbage doesn't become usual.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from contracts.config.router_config import WatchConfig
from contracts.ids import RequestId

NGRAM = 3
"""Tokens by which a stream's earlier self is looked for."""
TIMES = 3
"""Periods that a run must hold before it is a repetition."""
RECOUNT_TOKENS = 4096
"""After so many tokens it is looked up again which are rare: one pass over the vocabulary, without sorting."""
_MOST_OFTEN = 1 << 12
"""Counts from here on are one to that pass: no rare token is said so often."""
MEMORY_TOKENS = 1_000_000
"""Tokens after which the model's counts are halved: about as many are remembered."""
CHANCE = 1e-6
"""How likely a window of an undisturbed stream may be flagged, were its tokens independent."""


class FlagReason(StrEnum):
    REPETITION = "repetition"
    RARE = "rare_tokens"


@dataclass(frozen=True, slots=True)
class StreamFlag:
    """A stream looks broken from here on; told once a stream and reason."""

    request_id: RequestId
    why: FlagReason
    position: int
    """Of the token that did it, counted from the answer's first."""
    detail: dict[str, float]
    """What was measured, and what it was measured against."""


@dataclass(slots=True)
class _WatchedStream:
    said: int = 0
    recent: list[int] = field(default_factory=list)
    """The last tokens, in a ring."""
    ngram: tuple[int, ...] = ()
    """The last `NGRAM` tokens."""
    places: OrderedDict[tuple[int, ...], int] = field(default_factory=OrderedDict)
    """Where each recent n-gram ended last."""
    period: int = 0
    run: int = 0
    """Tokens in a row that equal the one a period before."""
    rare: int = 0
    """A bit for each of the window's tokens, the newest lowest."""
    pending: deque[tuple[int, bool]] = field(default_factory=deque)
    """The window's tokens, and whether they were rare: they teach nothing before they have left it unsuspected."""
    told: set[FlagReason] = field(default_factory=set)


class StreamWatch:
    """All streams of one model in one router."""

    def __init__(self, config: WatchConfig, vocab: int) -> None:
        self._config = config
        self._repetition, self._rare = config.repetition_tokens > 0, config.rare_factor > 0
        self._ring = config.repetition_period + NGRAM
        self._streams: dict[RequestId, _WatchedStream] = {}
        self._counts = array("I", bytes(4 * vocab)) if self._rare else array("I")
        self._total = 0
        """What the counts add up to."""
        self._seen = 0
        """Tokens that taught it something, ever."""
        self._rare_at_most = 0
        """Tokens said no more often than this are rare."""
        self._mask = (1 << config.window_tokens) - 1
        self._rare_rate = 0.0
        self._limit, self._limit_for = config.window_tokens + 1, -1.0
        self.flagged: Counter[FlagReason] = Counter()
        self.ended = 0

    @property
    def on(self) -> bool:
        return self._repetition or self._rare

    @property
    def rare_rate(self) -> float:
        """Share of rare tokens in what the model says lately."""
        return self._rare_rate

    def __len__(self) -> int:
        """Streams that it knows."""
        return len(self._streams)

    def feed(self, request_id: RequestId, tokens: Sequence[int]) -> list[StreamFlag]:
        """The next tokens of a stream; what there is to say of them."""
        stream = self._streams.get(request_id)
        if stream is None:
            stream = self._streams[request_id] = _WatchedStream()
        flags = []
        for token in tokens:
            if self._repetition and (flag := self._repeats(request_id, stream, token)) is not None:
                flags.append(flag)
            if self._rare and (flag := self._is_rare(request_id, stream, token)) is not None:
                flags.append(flag)
            stream.said += 1
        return flags

    def end(self, request_id: RequestId) -> None:
        """The stream has ended, somehow. Idempotent."""
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            self.ended += 1
            for token, rare in stream.pending:
                self._learn(token, rare)

    # ------------------------------------------------------------ repetition

    def _repeats(self, request_id: RequestId, stream: _WatchedStream, token: int) -> StreamFlag | None:
        recent, at, size = stream.recent, stream.said, self._ring
        if len(recent) < size:
            recent.append(token)
        else:
            recent[at % size] = token
        if stream.period and recent[(at - stream.period) % size] == token:
            stream.run += 1
        else:
            stream.period = stream.run = 0
        ngram = stream.ngram = (*stream.ngram[1 - NGRAM :], token)
        before = stream.places.pop(ngram, None)
        stream.places[ngram] = at
        if len(stream.places) > self._config.repetition_period:
            stream.places.popitem(last=False)
        if not stream.period and before is not None and at - before <= self._config.repetition_period:
            # As far as the n-gram goes it has repeated itself already.
            stream.period, stream.run = at - before, NGRAM
        if (
            stream.run < max(self._config.repetition_tokens, TIMES * stream.period)
            or FlagReason.REPETITION in stream.told
        ):
            return None
        detail = {"period": float(stream.period), "tokens": float(stream.run)}
        return self._flag(request_id, stream, FlagReason.REPETITION, detail)

    # ------------------------------------------------------------ rare tokens

    def _is_rare(self, request_id: RequestId, stream: _WatchedStream, token: int) -> StreamFlag | None:
        rare = token >= len(self._counts) or self._counts[token] <= self._rare_at_most
        stream.rare = (stream.rare << 1 | rare) & self._mask
        window = self._config.window_tokens
        if FlagReason.RARE in stream.told:
            return None
        stream.pending.append((token, rare))
        if len(stream.pending) > window:
            self._learn(*stream.pending.popleft())
        if self._seen < self._config.warm_up_tokens or stream.said + 1 < window:
            return None
        count = stream.rare.bit_count()
        if count < self._rare_limit():
            return None
        stream.pending.clear()
        return self._flag(request_id, stream, FlagReason.RARE, {"share": count / window, "usual": self._rare_rate})

    def _learn(self, token: int, rare: bool) -> None:
        if token >= len(self._counts):
            return
        self._counts[token] += 1
        self._total += 1
        self._seen += 1
        # At first everything is rare: the rate is counted from the second half of the warm-up on, as a mean over what
        # there was, and later over about as many tokens as the warm-up has.
        counted = self._seen - self._config.warm_up_tokens // 2
        if counted > 0:
            self._rare_rate += (rare - self._rare_rate) / min(counted, self._config.warm_up_tokens)
        if self._total >= MEMORY_TOKENS:
            counts = np.frombuffer(self._counts, dtype=np.uint32)
            counts >>= 1
            self._total = int(counts.sum())
            self._recount()
        elif self._seen % RECOUNT_TOKENS == 0 or self._seen == self._config.warm_up_tokens // 2:
            self._recount()

    def _recount(self) -> None:
        """Which tokens are rare by now: the least said ones, up to `rare_share` of everything."""
        often = np.minimum(np.frombuffer(self._counts, dtype=np.uint32), _MOST_OFTEN)
        tokens_with = np.bincount(often, minlength=_MOST_OFTEN + 1)[:_MOST_OFTEN]
        said_up_to = np.cumsum(tokens_with * np.arange(_MOST_OFTEN))
        allowed = self._config.rare_share * self._total
        self._rare_at_most = int(np.searchsorted(said_up_to, allowed, side="right")) - 1

    def _rare_limit(self) -> int:
        """Rare tokens of a window from which on its stream is flagged; kept until the usual rate has moved."""
        if abs(self._rare_rate - self._limit_for) > 0.02 * self._limit_for or self._limit_for < 0:
            self._limit_for = self._rare_rate
            window = self._config.window_tokens
            factor = math.ceil(self._config.rare_factor * self._rare_rate * window)
            self._limit = max(factor, least_unlikely(window, self._rare_rate, CHANCE))
        return self._limit

    def _flag(
        self, request_id: RequestId, stream: _WatchedStream, why: FlagReason, detail: dict[str, float]
    ) -> StreamFlag:
        stream.told.add(why)
        self.flagged[why] += 1
        return StreamFlag(request_id, why, stream.said, detail)


def least_unlikely(trials: int, share: float, chance: float) -> int:
    """The least count that so many independent trials of this share reach with at most this chance."""
    share = min(max(share, 1e-9), 1 - 1e-9)
    if share**trials > chance:
        return trials + 1
    tail, count = 0.0, trials
    while count > 1:
        tail += math.comb(trials, count) * share**count * (1 - share) ** (trials - count)
        if tail > chance:
            return count + 1
        count -= 1
    return count
