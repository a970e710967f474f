"""The answers of the simulated model: each token is a hash of what its position may see, under a grammar's mask.

`recite` computes an answer from the tokens alone, without pages, tables or workers; `HashEngine` computes the same
tokens from the bytes of its pages.

A grammar is a number. It allows a quarter to three quarters of the vocabulary: those tokens whose hash with the number
and with all tokens of the answer so far says so. Now and then it forces a token. So a mask hangs on every token before,
and one that was lost shows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache

from twinpool.cache.memory.kv_cache_spec import BufferSpec, IndexSpace, PoolKind, PoolSetSpec, PoolSpec
from twinpool.contracts.sampling_params import AdapterRef, SamplingParams, TokenLogprob
from twinpool.engine.attention.attention_backend import BLOCK
from twinpool.engine.runner.sampling.logits_processors import TokenMask
from twinpool.engine.structured_output.grammar_engine import GrammarError, GrammarMatcher, StartedGrammar

VOCABULARY = 64


def position_mark(seen: Sequence[bytes], token: int, adapter: AdapterRef | None, weights: str = "") -> bytes:
    """Hash everything that a position saw, its own token, and the adapter and the weights that it is computed with."""
    said = b"|".join(seen) + token.to_bytes(4, "little") + (adapter.digest.encode() if adapter is not None else b"")
    return hashlib.blake2b(said + (f"|{weights}".encode() if weights else b""), digest_size=16).digest()


STATE_PLACES = BLOCK + 1
"""Places of a slot: the states behind each position of a block, and that before the block."""


def entry_width(buffer: BufferSpec, page_tokens: int) -> int:
    """Bytes that a position writes into a layer of a buffer: its share of what is stored by page or by slot."""
    shares = {IndexSpace.PAGE: page_tokens, IndexSpace.SLOT: STATE_PLACES}.get(buffer.index, 1)
    return buffer.shape_bytes // shares


def pool_entries(pool: PoolSpec, page_tokens: int, mark: bytes) -> list[bytes]:
    """The entries that a position writes into a pool: one for each layer of each buffer."""
    widths = [entry_width(buffer, page_tokens) for buffer in pool.buffers for _ in range(buffer.layers)]
    said, size = mark + pool.name.encode(), sum(widths)
    whole = hashlib.blake2b(said, digest_size=size).digest() if size <= 64 else hashlib.shake_128(said).digest(size)
    return [whole[sum(widths[:i]) : sum(widths[: i + 1])] for i in range(len(widths))]


@lru_cache(maxsize=1024)
def _manner(params: SamplingParams) -> bytes:
    """Encode the sampling parameters but lengths, stop tokens and log-probabilities, which are applied elsewhere."""
    biases = sorted(params.logit_bias)
    said = (
        params.temperature,
        params.top_p,
        params.top_k,
        params.min_p,
        params.repetition_penalty,
        params.presence_penalty,
        params.frequency_penalty,
        biases,
        params.allowed_token_ids,
        params.grammar,
        params.seed,
        params.choice,
    )
    return hashlib.blake2b(repr(said).encode(), digest_size=16).digest()


def penalised(params: SamplingParams) -> bool:
    """Whether a draw depends on the tokens before it: a penalty is set."""
    return (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0)


def draw_token(
    mark: bytes, params: SamplingParams, before: Sequence[int], prompt_len: int, position: int,
    mask: Sequence[int] | None = None,
) -> int:  # fmt: skip
    """Draw the token at `position`; only penalties make it depend on the tokens `before` it directly. `mask`: what its
    grammar allows."""
    said = mark + _manner(params) + position.to_bytes(4, "little")
    if penalised(params):
        assert len(before) >= position, "penalties look at all tokens before the drawn one"
        said += bytes(before[:prompt_len]) + b"|" + bytes(before[prompt_len:position])
    chosen = params.allowed_token_ids if mask is None else mask
    if mask is not None and set(mask) <= set(params.stop_token_ids):
        return mask[0]  # It outranks `min_tokens`.
    for attempt in range(1 << 20):
        drawn = hashlib.blake2b(said + attempt.to_bytes(4, "little"), digest_size=8).digest()
        number = int.from_bytes(drawn, "little")
        token = chosen[number % len(chosen)] if chosen else number % VOCABULARY
        if position - prompt_len >= params.min_tokens or token not in params.stop_token_ids:
            return token
    raise AssertionError("every token is a stop token")


def score_token(mark: bytes, token: int, best: int) -> TokenLogprob:
    """Log-probabilities after a position: of `token`, and of the `best` best tokens."""
    whole = hashlib.blake2b(mark + b"logprobs", digest_size=VOCABULARY).digest()
    ordered = sorted(range(VOCABULARY), key=lambda other: (whole[other], other))[:best] if best else ()
    return TokenLogprob(token, -whole[token] / 7.0, tuple((other, -whole[other] / 7.0) for other in ordered))


@dataclass(frozen=True, slots=True)
class ExpectedAnswer:
    """The answer that a request must get."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    """One for each token of the answer, where the request asks for them; else empty."""
    scores: tuple[TokenLogprob, ...] | None
    """Log-probabilities of the prompt's tokens from the second on, where the request asks for them; else None."""


@lru_cache(maxsize=1024)
def recite(spec: PoolSetSpec, prompt: tuple[int, ...], params: SamplingParams, weights: str = "") -> ExpectedAnswer:
    """Compute the answer to a prompt: up to `max_tokens` tokens, a stop token included. `weights`: the digest of those
    that it is computed with; empty: the checkpoint's."""
    tokens, logprobs, scores = list(prompt), list[TokenLogprob](), list[TokenLogprob]()
    lanes = {pool.name: [bytearray() for buffer in pool.buffers for _ in range(buffer.layers)] for pool in spec.pools}
    size = spec.page_tokens
    widths = {pool.name: [entry_width(b, size) for b in pool.buffers for _ in range(b.layers)] for pool in spec.pools}
    for pool in spec.pools:
        if pool.kind is PoolKind.STATE:
            for lane, width in zip(lanes[pool.name], widths[pool.name], strict=True):
                lane.extend(bytes(width))
    at, length = 0, len(prompt)
    while at < length or len(tokens) < length + params.max_tokens:
        seen = [
            bytes(lane[-(pool.window_tokens - 1) * width :] if pool.kind is PoolKind.WINDOW else lane)
            for pool in spec.pools
            for lane, width in zip(lanes[pool.name], widths[pool.name], strict=True)
        ]
        mark = position_mark(seen, tokens[at], params.adapter, weights)
        at += 1
        for pool in spec.pools:
            for lane, entry in zip(lanes[pool.name], pool_entries(pool, size, mark), strict=True):
                if pool.kind is PoolKind.STATE:
                    lane.clear()
                lane.extend(entry)
        if at < length and params.prompt_logprobs is not None:
            scores.append(score_token(mark, tokens[at], params.prompt_logprobs))
        if at == len(tokens) and params.max_tokens:
            mask = allowed(params.grammar, tuple(tokens[length:])) if params.grammar else None
            tokens.append(draw_token(mark, params, tokens, length, at, mask))
            if params.logprobs is not None:
                logprobs.append(score_token(mark, tokens[-1], params.logprobs))
            if tokens[-1] in params.stop_token_ids:
                break
    wanted = tuple(scores) if params.prompt_logprobs is not None else None
    return ExpectedAnswer(tuple(tokens[length:]), tuple(logprobs), wanted)


@lru_cache(maxsize=1 << 14)
def allowed(grammar: str, answer: tuple[int, ...]) -> tuple[int, ...]:
    """The tokens that may follow `answer`."""
    said = grammar.encode() + bytes(answer)
    bits = hashlib.blake2b(said, digest_size=VOCABULARY).digest()
    if bits[0] % 5 == 0:
        return (bits[1] % VOCABULARY,)
    return tuple(token for token in range(VOCABULARY) if bits[token] % 2) or (bits[2] % VOCABULARY,)


class SimMatcher:
    """Implements `engine.structured_output.grammar_engine.GrammarMatcher`."""

    def __init__(self, grammar: str) -> None:
        self.grammar, self.answer = grammar, tuple[int, ...]()

    def consume(self, tokens: Sequence[int]) -> None:
        if self.fitting(tokens) < len(tokens):
            raise GrammarError(f"{list(tokens)} doesn't fit behind {len(self.answer)} tokens")
        self.answer += tuple(tokens)

    def fitting(self, tokens: Sequence[int]) -> int:
        answer = self.answer
        for count, token in enumerate(tokens):
            if token not in allowed(self.grammar, answer):
                return count
            answer += (token,)
        return len(tokens)

    def forced(self) -> Sequence[int]:
        tokens, answer = list[int](), self.answer
        while len(only := allowed(self.grammar, answer)) == 1:
            tokens += only
            answer += only
        return tokens


class SimGrammars:
    """Implements `engine.structured_output.grammar_engine.GrammarEngine`; compiles at once."""

    def start(self, grammar: str, emitted: Sequence[int]) -> Future[StartedGrammar]:
        future, matcher = Future[StartedGrammar](), SimMatcher(grammar)
        try:
            matcher.consume(emitted)
            future.set_result(StartedGrammar(matcher, TokenMask.of(allowed(grammar, matcher.answer))))
        except GrammarError as error:
            future.set_exception(error)
        return future

    def masks(self, wanted: Sequence[tuple[GrammarMatcher, Sequence[int]]]) -> list[list[TokenMask] | GrammarError]:
        out: list[list[TokenMask] | GrammarError] = []
        for matcher, drafts in wanted:
            assert isinstance(matcher, SimMatcher)
            behind = [(*matcher.answer, *drafts[:count]) for count in range(len(drafts) + 1)]
            out.append([TokenMask.of(allowed(matcher.grammar, answer)) for answer in behind])
        return out

    def close(self) -> None:
        pass
