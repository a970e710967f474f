"""Sampling parameters of a request as workers see them (resolved, validated, frozen), and log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one choice are drawn.

    The draw at absolute position `p` depends on (`seed`, `choice`, `p`) and on the logits alone, so any worker
    continues any request from its tokens.
    """

    max_tokens: int
    """Tokens to generate at most, counted from the end of the prompt; 0 only scores the prompt."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 or less: no limit."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    """The tokens that may be drawn, sorted; empty: all."""
    grammar: str = ""
    """What the answer must follow, as the text that the structured-output engine compiles (`contracts.grammar`); empty:
    nothing. It outranks `min_tokens` and `logit_bias`."""
    seed: int = 0
    """64 bits, minted by the router when the client sends none."""
    choice: int = 0
    min_tokens: int = 0
    """No stop token may be drawn before this many generated tokens."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the answer, the model's end tokens included unless `ignore_eos`."""
    logprobs: int | None = None
    """None: none. n: the log-probability of each drawn token, and the n best at its position."""
    prompt_logprobs: int | None = None
    """None: none. n: the log-probability of each prompt token, and the n best; disables prefix reuse for the
    request."""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural log-probabilities at one position, of the unmodified distribution (before penalties and temperature)."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    """The best (token, log-probability) pairs, best first."""


@dataclass(frozen=True, slots=True)
class TokenDifference:
    """A token of an answer that was drawn differently when an audit computed the answer again."""

    position: int
    """Absolute, counted from the prompt's first token."""
    drawn: int
    """The token that the audit drew there, after the same tokens."""
    gap: float
    """By how much every logit would have to be off for the answer's token to be drawn; 0 where that can't be told."""
