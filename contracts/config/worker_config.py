"""Sections of the workers: engine, prefill, decode, transfer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from contracts.config.cache_config import CacheOverride


@dataclass(frozen=True, slots=True)
class EngineConfig:
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto: the checkpoint's own."""
    attention: Literal["auto", "torch", "native", "triton"] = "auto"
    """auto: triton on an NVIDIA GPU; on a CPU native, kernels compiled by g++ where there is one; else torch."""
    threads: int = 0
    """Threads a worker computes with; 0: cores divided by workers."""
    numerics: Literal["invariant", "fast"] = "invariant"
    """invariant: a row's result depends on its own sequence alone, never on the batch or on chunk ends."""
    numerics_class: Literal["auto", "x86-64-v3", "x86-64-v4"] = "auto"
    """The instructions that a worker's kernels and libraries keep to. auto: all that its machine has. A level: no more
    than it has, so that unlike machines compute the same bits; a machine that can't run it refuses to start."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the CPU, as long as data planes register host memory only; cuda is refused until then."""


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    chunk_tokens: int = 512
    """Token budget of a prefill step; longer prompts take several steps."""
    short_share: float = 0.25
    """The part of a step's token budget that prompts with less to compute than the oldest one come first in; the oldest
    has the rest, so it is never slowed down by more."""
    max_running: int = 32
    """Requests computed at the same time."""
    share_tokens: int = 4096
    """A prompt that is being computed leaves its finished pages to the cache every so many tokens, before it is whole:
    no more than these are computed again when its worker dies."""
    tp: int = 1
    """Tensor-parallel ranks of a worker, each a process with its share of the heads; 1, 2, 4, as the heads divide."""
    cache: CacheOverride = field(default_factory=CacheOverride)


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    max_batch_tokens: int = 64
    """Token budget of a decode step: one a running request."""
    metadata_slots: int = 128
    """Hand-overs that can be under way at once."""
    migration_pause_s: float = 5.0
    """A stream that is handed to another worker stands still for this long at most; then it goes on where it was."""
    migration_chunk_bytes: int = 8 * 1024 * 1024
    """What a worker writes of a request that it hands on between two steps of the others."""
    migration_precopy_bytes: int = 1024 * 1024
    """Of a request with more state than this, finished pages are copied ahead, while it runs, before it is moved."""
    prefix_offer_bytes: int = 256 * 1024 * 1024
    """What a worker that leaves offers of its prefix tree to the others, the hottest prefixes first; 0: nothing."""
    tp: int = 1
    """As `prefill.tp`; the two may differ."""
    retract: Literal["auto", "copy", "recompute"] = "auto"
    """What becomes of the state of a request that must leave the device for others: copied to host memory and back, or
    computed again by prefill; auto: what is quicker by the rates measured so far."""
    retract_limit: int = 3
    """A request that was retracted this often comes back only with pages for its whole answer, and leaves no more."""
    prompt_wait_s: float = 10.0
    """A request whose prompt another one is just receiving waits for that one this long at most, and then shares its
    pages instead of receiving them too."""
    first_answer_tokens: int = 512
    """What an answer is expected to come to before eight have ended: many requests ask for the rest of the context, and
    hardly any takes it."""
    output_length_quantile: float = 0.75
    """A request is admitted with room for the answer that this share of recent ones, as far along as it, stayed within;
    1: for the longest of them."""
    cache: CacheOverride = field(default_factory=CacheOverride)


@dataclass(frozen=True, slots=True)
class TransferConfig:
    plane: Literal["local", "shm", "zmq"] = "shm"
    """local: all in one process; shm: the writer writes into the reader's memory; zmq: TCP."""
    room_timeout_s: float = 60.0
    """Longest silence of a room before it is failed."""
    link_timeout_s: float = 10.0
    """A connection between workers, or between router and worker, on which nothing was heard for this long is cut."""
    connect_timeout_s: float = 10.0
    """How long prefill may take to answer a decode worker that it has not met yet."""
    peer_forget_s: float = 60.0
    """A peer whom nobody could reach for this long is forgotten, with all that was kept for it; it says hello again."""
    most_peers: int = 1024
    """Workers that one worker hands over to at the same time; more are refused."""
    control_frame_bytes: int = 1024 * 1024
    """The longest control message or notice that is taken in: a grant has about ten bytes a page, a notice thirty."""
    frame_bytes: int = 4 * 1024 * 1024
    """zmq: the longest frame of pages that is taken in, or one page where that is more; longer writes are split."""
