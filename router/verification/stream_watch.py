"""A cheap watch for streams that look broken: repetition, and rare tokens. No I/O; O(1) a token, bounded memory.

A flag proves nothing. A model may repeat itself for good reasons, and a client may ask for rare words. But state that
was damaged without a trace shows as just this: nonsense, loops, strange characters. So flags are counted and logged,
and the flagged answers are audited, which does prove something.

**Repetition.** A stream repeats itself with period p at a token that equals the token p before it. The guess at p is
the distance to the last place of the token's n-gram, from one dictionary a stream over its last tokens. While the guess
holds, one comparison a token carries it on; where it breaks, the next n-gram that was seen before offers another. The
length of the run is compared with `watch.repetition_tokens`, and must be three periods or more.

**Rare tokens.** The model's usual frequencies are learned from all its streams: how often each token was drawn lately
(counts that are halved now and then). The rare tokens are the least frequent ones that together make up
`watch.rare_share` of all; their usual rate is counted. A stream's last `watch.window_tokens` tokens are kept as bits of
one number. The stream is flagged when they hold `watch.rare_factor` times the usual number of rare tokens, and so many
more that chance alone would not do it in a million windows. A stream's tokens are learned once they have left the
window, so garbage doesn't become usual.

Flags and the findings of audits are logged alike (`log_flag`, `log_finding`).
"""

from __future__ import annotations

import logging
import math
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from twinpool.contracts.config.router_config import WatchConfig
from twinpool.contracts.damage import DamageSite
from twinpool.contracts.ids import RequestId
from twinpool.contracts.json_logs import log
from twinpool.router.state.routed_request import RoutedRequest
from twinpool.router.verification.audits import AuditFinding, AuditResult

NGRAM = 3
"""Tokens of an n-gram, by which an earlier place like the present one is found."""
TIMES = 3
"""Periods that a run must span before it counts as a repetition."""
RECOUNT_TOKENS = 4096
"""Tokens learned between two recounts of the rare ones; one is a pass over the vocabulary, without sorting."""
_MAX_COUNT = 1 << 12
"""A recount doesn't tell counts from here on apart: no rare token is drawn so often."""
MEMORY_TOKENS = 1_000_000
"""The sum of the model's counts at which they are halved: about as many tokens are remembered."""
CHANCE = 1e-6
"""Probability with which a window of a healthy stream may be flagged at most, were its tokens independent."""


class FlagReason(StrEnum):
    REPETITION = "repetition"
    RARE = "rare_tokens"


@dataclass(frozen=True, slots=True)
class StreamFlag:
    """The flag of a stream that looks broken; raised once a stream and reason."""

    request_id: RequestId
    why: FlagReason
    position: int
    """The position of the token that raised the flag; the answer's first token is 0."""
    detail: dict[str, float]
    """What was measured: `period` and `tokens` of a repetition; `share` of rare tokens and their `usual` share."""


@dataclass(slots=True)
class _WatchedStream:
    said: int = 0
    recent: list[int] = field(default_factory=list)
    """The last tokens, in a ring."""
    ngram: tuple[int, ...] = ()
    """The last `NGRAM` tokens."""
    places: OrderedDict[tuple[int, ...], int] = field(default_factory=OrderedDict)
    """For each recent n-gram the position at which it ended last."""
    period: int = 0
    run: int = 0
    """Tokens in a row that equal the one a period before."""
    rare: int = 0
    """A bit for each of the window's tokens, set for a rare one; the newest token's is the lowest."""
    pending: deque[tuple[int, bool]] = field(default_factory=deque)
    """The window's tokens, and whether each was rare. They are learned when they leave the window, or when the stream
    ends; never once the stream is flagged for rare tokens."""
    told: set[FlagReason] = field(default_factory=set)
    """Reasons for which the stream was flagged."""


class StreamWatch:
    """The watch over all streams of one model in one router."""

    def __init__(self, config: WatchConfig, vocab: int) -> None:
        self._config = config
        self._repetition, self._rare = config.repetition_tokens > 0, config.rare_factor > 0
        self._ring = config.repetition_period + NGRAM
        self._streams: dict[RequestId, _WatchedStream] = {}
        self._counts = array("I", bytes(4 * vocab)) if self._rare else array("I")
        self._total = 0
        """The sum of the counts."""
        self._seen = 0
        """Tokens learned since the start."""
        self._rare_at_most = 0
        """Tokens whose count is no more than this are rare."""
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
        """Share of rare tokens among the tokens that the model drew lately."""
        return self._rare_rate

    def __len__(self) -> int:
        """Number of streams under watch."""
        return len(self._streams)

    def feed(self, request_id: RequestId, tokens: Sequence[int]) -> list[StreamFlag]:
        """Take in the next tokens of a stream; returns the flags that they raise, mostly none."""
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
        """Forget a stream that has ended, well or not, and learn its last tokens. Idempotent."""
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
            # The tokens of the n-gram are repeated already.
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
        # At first every token is rare, so the rate is counted from the second half of the warm-up on: as a mean over
        # all tokens since, and later over about as many as the warm-up has.
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
        """Find the tokens that are rare by now: the least frequent ones, up to `rare_share` of all."""
        often = np.minimum(np.frombuffer(self._counts, dtype=np.uint32), _MAX_COUNT)
        tokens_with = np.bincount(often, minlength=_MAX_COUNT + 1)[:_MAX_COUNT]
        said_up_to = np.cumsum(tokens_with * np.arange(_MAX_COUNT))
        allowed = self._config.rare_share * self._total
        self._rare_at_most = int(np.searchsorted(said_up_to, allowed, side="right")) - 1

    def _rare_limit(self) -> int:
        """The number of rare tokens in a window that flags its stream; kept until the usual rate has moved."""
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
    """The least count of successes that independent trials reach with a probability of at most `chance`.

    Each of the `trials` succeeds with probability `share`. Returns `trials` + 1 where no count is so unlikely.
    """
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


_LEVELS = {AuditResult.DAMAGED: logging.ERROR, AuditResult.DISPUTED: logging.ERROR}


def log_finding(finding: AuditFinding) -> None:
    """Log one line for a finding: the positions that differ, the workers that served them, and the auditors."""
    leg = finding.leg
    log(
        "state damage" if finding.result is AuditResult.DAMAGED else "audit",
        level=_LEVELS.get(finding.result, logging.WARNING),
        where=str(DamageSite.AUDIT),
        request_id=finding.request_id,
        result=str(finding.result),
        checked=finding.checked,
        differing=finding.differing,
        differences=[(d.position, d.drawn, round(d.gap, 4)) for d in finding.differences],
        attempt=leg.attempt if leg is not None else None,
        workers={str(role): name for role, name in leg.workers.items()} if leg is not None else {},
        role=finding.role,
        auditors=list(finding.auditors),
        reason=finding.message,
    )


def log_flag(flag: StreamFlag, request: RoutedRequest) -> None:
    log(
        "stream looks broken",
        level=logging.WARNING,
        request_id=flag.request_id,
        why=str(flag.why),
        position=flag.position,
        workers={str(role): name for role, name in request.workers.items()},
        attempt=request.attempt,
        room=request.room,
        detail=flag.detail,
    )
