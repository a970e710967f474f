"""Sampling parameters of a request as workers see them (resolved, validated, frozen), and log-probabilities."""

from __future__ import annotations

import base64
import hashlib
from typing import Annotated

from msgspec import Meta, structs

from twinpool.contracts.message_types import POSITIONS, SOME, Finite, Int32, Message, TokenIds, Uint32, Uint64

POOLINGS = ("last", "mean", "cls")
"""What the embedding of a prompt is made of: the hidden state, behind the final norm, of its last token, the mean of
those of all tokens, or that of the first."""
DENSE = "+dense"
"""What a pooling ends with where its vector goes through the checkpoint's `Dense` modules."""
JUDGED = "judged"
"""The pooling that sends, in place of an embedding, the logits of `SamplingParams.allowed_token_ids` behind the last
token."""
CLASSES = "classes"
"""The pooling that sends the logits of all classes behind the last token, of a checkpoint that has a head for them."""
ADAPTER_SALT = "lora:"
"""What the salt of a request with an adapter begins with; no other salt does."""


class WeightsVersion(Message, frozen=True):
    """Weights that were put in place of the checkpoint's while the cluster served, as the controller knows them."""

    number: Uint32
    """How often the cluster's weights were changed, or its caches flushed, up to these: what was computed under
    another number is never found, and no worker hands over to one of another number."""
    version: str = ""
    """The name that clients are told; empty: the checkpoint's own weights, whose name is their digest."""
    path: str = ""
    """The folder of safetensors that they were read from; empty: the checkpoint's own."""
    digest: str = ""
    """SHA-256 of the folder's files, in hex, by which each worker knows that it has read the same."""

    @property
    def serial(self) -> str:
        """The part of a fingerprint by which workers of other weights are refused."""
        return f"{self.version}#{self.number}"


class AdapterRef(Message, frozen=True):
    """An adapter, by its content: the digest says what a request is computed with, the name and the path only how it
    is called and where it may be found."""

    name: Annotated[str, Meta(max_length=127)]
    digest: Annotated[str, Meta(max_length=64)]
    """SHA-256 of its files (`contracts.checkpoint.adapter_files`), in hex."""
    path: Annotated[str, Meta(max_length=4096)]
    """Its folder, where each worker looks for it by itself."""

    def salted(self, salt: str) -> str:
        """The salt of a request with this adapter, of what it would be without: pages of two adapters, or of one whose
        files have changed, are never found by each other."""
        named = base64.urlsafe_b64encode(hashlib.sha256(self.digest.encode()).digest()).decode().rstrip("=")
        return f"{ADAPTER_SALT}{named}\n{salt}"


class SamplingParams(Message, frozen=True):
    """How the tokens of one choice are drawn.

    The draw at absolute position `p` depends on (`seed`, `choice`, `p`) and on the logits alone, so any worker
    continues any request from its tokens.
    """

    max_tokens: Uint32
    """Tokens to generate at most, counted from the end of the prompt; 0 only scores or embeds the prompt."""
    temperature: Finite = 1.0
    """0 is greedy."""
    top_p: Finite = 1.0
    top_k: Int32 = 0
    """0 or less: no limit."""
    min_p: Finite = 0.0
    repetition_penalty: Finite = 1.0
    presence_penalty: Finite = 0.0
    frequency_penalty: Finite = 0.0
    logit_bias: Annotated[tuple[tuple[Uint32, Finite], ...], SOME] = ()
    allowed_token_ids: TokenIds = ()
    """The tokens that may be drawn, sorted; empty: all."""
    grammar: str = ""
    """What the answer must follow, as the text that the structured-output engine compiles (`contracts.grammar`); empty:
    nothing. It outranks `min_tokens` and `logit_bias`."""
    seed: Uint64 = 0
    """64 bits, minted by the router when the client sends none."""
    choice: Uint32 = 0
    min_tokens: Uint32 = 0
    """No stop token may be drawn before this many generated tokens."""
    stop_token_ids: TokenIds = ()
    """Tokens that end the answer, the model's end tokens included unless `ignore_eos`."""
    logprobs: Uint32 | None = None
    """None: none. n: the log-probability of each drawn token, and the n best at its position."""
    prompt_logprobs: Uint32 | None = None
    """None: none. n: the log-probability of each prompt token, and the n best; disables prefix reuse for the
    request."""
    adapter: AdapterRef | None = None
    """The adapter (LoRA) whose products are added to the model's; None: the model alone draws. A worker whose stream's
    version is below `contracts.messages.stream_frames.ADAPTERS_SINCE` would leave it out: it is given no such
    request."""
    pooling: Annotated[str, Meta(max_length=16)] = ""
    """How the prompt's embedding is made, one of `POOLINGS`, perhaps with `DENSE`, `JUDGED` or `CLASSES`; nothing is
    drawn then, as `max_tokens` is 0. Empty: none is asked for. Workers know ``last`` since
    `contracts.messages.stream_frames.EMBEDDINGS_SINCE`, judgements since `JUDGED_SINCE`, all since `POOLINGS_SINCE`."""
    routed_experts: bool = False
    """Whether each log-probability comes with the experts of the position that it was computed at, so a request of this
    kind asks for `logprobs`, and for `prompt_logprobs` where its prompt has two tokens or more. Only workers of
    `contracts.messages.stream_frames.ROUTED_SINCE` or later know it."""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def pools_all(self) -> bool:
        """Whether the embedding is made of other hidden states than the last token's, so that none may be skipped."""
        return self.pooling.removesuffix(DENSE) in ("mean", "cls")

    def with_experts(self) -> SamplingParams:
        """These, asking for experts as well, and for the log-probabilities that they come with."""
        logprobs, prompt_logprobs = self.logprobs or 0, self.prompt_logprobs or 0
        return structs.replace(self, routed_experts=True, logprobs=logprobs, prompt_logprobs=prompt_logprobs)


ROUTED_BYTES = 1 << 14
"""The most bytes of the experts that one position goes to."""


class ChosenExperts(Message, frozen=True):
    """The experts that one position's hidden states went to, layer by layer."""

    top_k: Uint32
    """Experts that each layer chooses."""
    ids: Annotated[bytes, Meta(max_length=ROUTED_BYTES)]
    """[layers, top_k] uint16, little-endian: of the layers that are mixtures of experts, in order; the ids of one layer
    as its router gives them, likeliest first for most."""


class TokenLogprob(Message, frozen=True):
    """Natural log-probabilities at one position, of the unmodified distribution (before penalties and temperature)."""

    token: Uint32
    logprob: float
    top: Annotated[tuple[tuple[Uint32, float], ...], SOME] = ()
    """The best (token, log-probability) pairs, best first."""
    experts: ChosenExperts | None = None
    """The experts of the position before the token's, whose logits these are of, where asked for."""


TokenLogprobs = Annotated[tuple[TokenLogprob, ...], POSITIONS]
"""Of one sequence, one for each of its tokens."""


class TokenDifference(Message, frozen=True):
    """A token of an answer that was drawn differently when an audit computed the answer again."""

    position: Uint32
    """Absolute, counted from the prompt's first token."""
    drawn: Uint32
    """The token that the audit drew there, after the same tokens."""
    gap: float
    """By how much every logit would have to be off for the answer's token to be drawn; 0 where that can't be told."""
