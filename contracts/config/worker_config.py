"""Configuration sections of the workers: engine, prefill, decode, transfer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from twinpool.contracts.config.cache_config import CacheOverride


@dataclass(frozen=True, slots=True)
class EngineConfig:
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """The dtype of computation; auto: the checkpoint's own."""
    models: Literal["native", "transformers"] = "native"
    """What computes the model. native: the model files of this package. transformers: the package of that name (``pip
    install 'twinpool[transformers]'``), with attention over pages as ever: for decoders of which there is no model
    file, on one rank and a CPU, from dense weights in a folder; slower."""
    weights: Literal["as_stored", "dense", "int8", "int4"] = "as_stored"
    """How a worker keeps its weights. as_stored: as the checkpoint has them, quantised ones in their blocks. dense:
    expanded to `engine.dtype`. int8, int4: dense ones of the products in attention and
    feed-forward layers (``…_proj``, experts) are quantised when they are loaded, with a scale for each 32 columns;
    embeddings, heads, routers of experts, gates of recurrent layers, indexers and the product of latent attention that
    is absorbed into others (``kv_b_proj``) stay dense."""
    activations: Literal["as_stored", "float", "int8"] = "as_stored"
    """How a CPU multiplies weights of whole numbers. float: with activations as they were computed. int8: activations
    are quantised first, with a scale for each 32 of a row, and products are summed in whole numbers: faster, and other
    tokens than the dequantised model's. as_stored: in int8 with a scale a row where the checkpoint declares int8
    activations (W8A8), else float. Refused where there is no weight of whole numbers, and on a GPU."""
    context: int = 0
    """The longest sequence that is served, prompt and answer together, in tokens; 0: the model's own. Less takes less
    memory for a request at most; more is refused unless the model's rope scaling gives it."""
    draft_model: str = ""
    """What drafts the tokens to come, besides what is looked up in them. mtp: the checkpoint's own layer that predicts
    further tokens, where the architecture has one. A path: the folder of an EAGLE-3 head for this model, on every node.
    Workers of both roles compute and keep its state beside the model's; `decode.speculation` says whether decode goes
    by it. Empty: none is loaded."""
    attention: Literal["auto", "torch", "native", "triton"] = "auto"
    """auto: triton on an NVIDIA GPU; on a CPU native, kernels compiled by g++ where there is one; else torch."""
    threads: int = 0
    """Threads a worker computes with; 0: cores divided by workers."""
    copy_threads: Literal["auto", "on", "off"] = "auto"
    """Whether a worker on a CPU copies and sends on threads of their own while it computes, and one of several ranks
    sends so: for machines with cores that don't compute, or with slow links. auto: where its node has more cores than
    the ranks that are planned there compute with; `serve`'s tables say which it is. On a GPU it always does."""
    numerics: Literal["invariant", "fast"] = "invariant"
    """invariant: a row's result depends on its own sequence alone, never on the batch or on chunk ends; fast: results
    may differ by rounding."""
    numerics_class: Literal["auto", "x86-64-v3", "x86-64-v4"] = "auto"
    """The processors that a worker's results are the same on, bit for bit. auto: its own kind. A level: all that have
    its instructions; libraries use no others, and kernels add up in the order that all have; a machine without them
    refuses to start."""
    device: str = "auto"
    """auto, cpu, cuda, or cuda:N for one GPU alone. auto: the GPUs if torch sees any and Triton is there (``pip install
    'twinpool[cuda]'``), else the CPU. Ranks are dealt the GPUs of a machine in turn; under a Ray that `serve` joins
    each asks for one of its own."""
    graphs: Literal["auto", "on", "off"] = "auto"
    """Whether the decode steps of a worker on a GPU are captured when it starts, and replayed in one launch each. auto:
    where that works, else the log says why not; on: a worker whose steps can't be captured doesn't start."""

    share_weights: Literal["auto", "on", "off"] = "auto"
    """Whether workers of a node that compute on its CPU have their weights once, mapped from memory that the node's
    agent keeps; a worker that is started again has them at once. auto: where that works, and a node is planned as if
    each had its own; on: planned once, so more is left for pools, and a worker that can't share doesn't start."""
    weight_roots: str = ""
    """Folders, with commas, below which weights may lie that the cluster changes to while it serves (`twinpool weights
    update`); empty: none can be. Each machine looks below its own."""


@dataclass(frozen=True, slots=True)
class AdaptersConfig:
    load: str = ""
    """Adapters (LoRA) that are served from the start: ``name=/absolute/folder``, several with commas. A request chooses
    one by `model`."""
    roots: str = ""
    """Folders, with commas, below which adapters may lie that are loaded while the cluster serves; empty: none can be.
    Each machine looks below its own."""
    max_loaded: int = 8
    """Adapters that a worker has in memory at once. The least recently used one that no request needs makes way for
    another, and is read again when it is needed; where requests need all of them, others wait."""
    max_rank: int = 64
    """The highest rank of an adapter's layer; memory is planned for so many adapters of this rank."""

    @property
    def configured(self) -> dict[str, str]:
        """The folders of `load`, by name."""
        entries = (entry.strip().partition("=") for entry in self.load.split(",") if entry.strip())
        return {name.strip(): path.strip() for name, _, path in entries}

    @property
    def allowed(self) -> list[str]:
        """The folders below which adapters may lie, those of `load` among them."""
        return [root.strip() for root in self.roots.split(",") if root.strip()] + list(self.configured.values())

    @property
    def used(self) -> bool:
        """Whether there can be any."""
        return bool(self.allowed)


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    chunk_tokens: int = 512
    """Token budget of a prefill step; longer prompts take several steps. On a colocated worker the budget of any step,
    in which each row of decode takes one token first."""
    short_share: float = 0.25
    """The part of a step's token budget that goes first to prompts with less left to compute than the oldest one. The
    oldest prompt gets the rest, so that it is never slowed down by more."""
    max_running: int = 32
    """Requests computed at the same time."""
    share_tokens: int = 4096
    """A prompt that is being computed inserts its finished pages into the prefix cache every so many tokens, before it
    is whole: no more tokens than these are computed again when its worker dies."""
    background_tokens: int = 0
    """Tokens of background prompts (of batches, or of a priority of -1000000 or less) that a step has beside others'.
    0: none: they are computed while no other prompt is to be computed here, so that others' first tokens don't wait
    for theirs."""
    background_rest_s: float = 0.5
    """For so long after a step with another's prompt, or another's row beside it on a colocated worker, no background
    prompt is computed, where `background_tokens` is 0: others' answers, which prefill doesn't see, often share its
    processor. 0: at once."""
    tenant_credit_tokens: int = 1024
    """When a tenant comes back that had nothing to compute, so many of its tokens at most come before all others', as
    if it had saved them up. In the long run each gets its share, whatever this is; 0: nothing is saved up."""
    shared_step_s: float = 0.01
    """While a tenant is expected, steps of others' prompts have as many tokens as take about so long, beyond what a
    step costs however small it is, by the steps measured so far, and no less than an eighth of `chunk_tokens`. So long
    does its next prompt wait for the step under way."""
    picture_step_s: float = 0.25
    """So long, about, do pictures keep a worker from its steps at a time: their towers are computed in slices between
    steps, until so many seconds are over."""
    tenant_return_s: float = 60.0
    """A tenant that came within so many seconds, after it had nothing to compute, is expected to come again; where one
    tenant alone does, none is."""
    tp: int = 1
    """Tensor-parallel ranks of a worker, each a process with its share of the heads; 1, 2, 4, as the heads divide."""
    ep: int = 1
    """Expert-parallel ranks of a worker with a mixture of experts: as many as `tp`, and each rank holds its share of
    the experts whole; 1, and it holds its share of every expert."""
    pp: int = 1
    """Pipeline-parallel ranks of a worker, each a process with some of the layers, one stage behind the other: for
    models larger than a card or a process may be. They have `tp` of 1. As many as layers at most, and each stage has
    some of every kind of layer that keeps state."""
    dp: int = 1
    """Data-parallel ranks: so many workers of the pool, on one host, share the experts of a mixture. Each has requests
    and pages of its own, holds its share of the experts, and computes them for the tokens of all. The pool's number of
    workers is a multiple of it. Each may have `tp` ranks, which divide each of its experts; with `ep` and `pp` of 1,
    and on CPUs so far."""
    cache: CacheOverride = field(default_factory=CacheOverride)


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    max_batch_tokens: int = 64
    """Token budget of a decode step: one token per running request, and drafts."""
    speculation: Literal["auto", "prompt_lookup", "draft_model", "off"] = "auto"
    """Whether a step's rows carry drafts of the tokens to come. prompt_lookup: what followed a request's latest tokens
    before, in its prompt or its answer. draft_model: what `engine.draft_model` predicts. Each is drawn as well, so
    answers come faster where drafts are right, and are the same. auto: draft_model where there is one, else
    prompt_lookup."""
    draft_tokens: int = 4
    """Drafts that a row carries, at most."""
    background_rows: int = 0
    """Background requests (of batches, or of a priority of -1000000 or less) that take steps beside others. 0: none:
    they take steps while no other request runs here, so that others' tokens don't wait for theirs."""
    background_rest_s: float = 0.5
    """For so long after another request has come they take no more steps either while its prompt isn't here: it would
    wait for theirs. 0: until it runs."""
    draft_requests: int = 4
    """While so many requests run, at most, all of them have drafts before it is known what these cost. From then on
    requests have as many as pay, however many run: by how often drafts are right and what a position adds to a step."""
    metadata_slots: int = 128
    """Hand-overs that can be under way at once."""
    migration_pause_s: float = 5.0
    """A request that is migrated is paused for so many seconds at most; then it goes on where it was."""
    migration_chunk_bytes: int = 8 * 1024 * 1024
    """Bytes that a worker writes of a migrating request between two steps of its other requests."""
    migration_precopy_bytes: int = 1024 * 1024
    """A request with more bytes of state than this has its finished pages copied ahead, while it runs, before it
    migrates."""
    prefix_offer_bytes: int = 256 * 1024 * 1024
    """Bytes of its prefix tree that a worker that leaves offers to others, the hottest prefixes first; 0: nothing."""
    tp: int = 1
    """As `prefill.tp`; the two may differ."""
    ep: int = 1
    """As `prefill.ep`; the two may differ."""
    pp: int = 1
    """As `prefill.pp`; the two may differ."""
    dp: int = 1
    """As `prefill.dp`; the two may differ."""
    retract: Literal["auto", "copy", "recompute"] = "auto"
    """What happens to the state of a retracted request: copied to host memory and back, or computed again by prefill;
    auto: the quicker one by the rates measured so far."""
    retract_limit: int = 3
    """A request that was retracted this often resumes only with pages for its whole answer, and isn't retracted
    again."""
    prompt_wait_s: float = 10.0
    """A request whose prompt another request is just receiving waits for so many seconds at most to share its pages
    instead of receiving them too."""
    first_answer_tokens: int = 512
    """Expected tokens of an answer before eight answers have ended: many requests ask for the rest of the context, and
    hardly any uses it."""
    output_length_quantile: float = 0.75
    """A request is admitted with room for the answer that this share of recent ones, as far along as it, stayed within;
    1: for the longest of them."""
    kept_answers: int = 256
    """Answers of requests with an Idempotency-Key that a worker keeps for clients that may come back: those that have
    ended, and those that run though their router or client is gone. Beyond it the oldest that has ended is forgotten,
    and without one a request whose client is gone is cancelled; 0: none are kept."""
    kept_answer_s: float = 120.0
    """Seconds for which an answer is kept after its end, and for which a request whose router or client is gone is
    computed for nobody, at most to its deadline. Prefill goes by it, too."""
    kept_answer_bytes: int = 64 * 1024 * 1024
    """Memory of the kept answers that have ended, by an estimate that log-probabilities count in."""
    cache: CacheOverride = field(default_factory=CacheOverride)

    @property
    def drafts(self) -> int:
        """Drafts that a row carries, at most; ``auto`` counts as some."""
        return 0 if self.speculation == "off" else self.draft_tokens


@dataclass(frozen=True, slots=True)
class ColocateConfig:
    """A colocated worker also goes by the keys of `prefill` and `decode`, but for their `tp`, `ep`, `pp`, `dp` and
    `cache`."""

    prompt_tokens: int = 64
    """The part of a step's token budget (`prefill.chunk_tokens`) that prompts keep, however many rows decode has in the
    step; at least a page."""
    mixed_steps: bool = True
    """Whether rows of decode and chunks of prompts are computed in one step, so that weights are read once. Otherwise
    one step of each follows the other: for kernels that are made for one kind."""
    tp: int = 1
    """As `prefill.tp`."""
    ep: int = 1
    """As `prefill.ep`."""
    pp: int = 1
    """As `prefill.pp`."""
    dp: int = 1
    """As `prefill.dp`."""
    cache: CacheOverride = field(default_factory=CacheOverride)


@dataclass(frozen=True, slots=True)
class DisaggregationConfig:
    """Of a cluster of two pools: whether decode workers may compute prompts themselves."""

    mode: Literal["always", "conditional"] = "always"
    """always: each prompt is computed by a prefill worker and handed over. conditional: decode workers compute a prompt
    themselves where its first token would come earlier so, and where no prefill worker can take it; they then need
    memory for steps of `prefill.chunk_tokens`, too."""
    step_tokens: int = 128
    """Tokens of a decode worker's step that has both running requests and prompts: a running request waits no longer
    for its next token than such a step takes. Rows take one each, first; prompts get the rest, and at least a page. A
    step without running requests has up to `prefill.chunk_tokens`."""
    local_tokens: int = 1024
    """Tokens of prompts that a decode worker may have yet to compute, while a prefill worker could take them; a prompt
    that would exceed it is handed over. Without a prefill worker there is no such bound."""


@dataclass(frozen=True, slots=True)
class TransferConfig:
    plane: Literal["auto", "local", "shm", "zmq", "nixl", "cuda_ipc", "staged"] = "auto"
    """auto: shm on one host and zmq else, for pools on GPUs cuda_ipc and staged; `serve` says which. local: all in one
    process; shm: the writer writes into the reader's memory; zmq: TCP; nixl: one-sided writes by NIXL over UCX, which
    needs ``pip install 'twinpool[nixl]'``; cuda_ipc: shm for pools on GPUs of one host; staged: TCP for pools on a
    device, through buffers in host memory."""
    room_timeout_s: float = 60.0
    """Seconds of silence after which a room (hand-over) is failed."""
    link_timeout_s: float = 10.0
    """A connection between workers, or between router and worker, on which nothing was heard for so many seconds is
    cut."""
    connect_timeout_s: float = 10.0
    """Seconds that prefill may take to answer a decode worker that it has not met yet."""
    peer_forget_s: float = 60.0
    """A peer that could not be reached for so many seconds is forgotten, with all state kept for it; it says hello
    again."""
    max_peers: int = 1024
    """Workers that one worker hands over to at the same time; more are refused."""
    control_frame_bytes: int = 1024 * 1024
    """The longest control message or notice that is taken in: a grant has about ten bytes a page, a notice thirty."""
    layers: bool = True
    """Whether pages leave layer by layer while later layers are computed; else when their chunk is computed. On a CPU
    they leave so only where `engine.copy_threads` comes to threads."""
    layer_group_bytes: int = 256 * 1024
    """A group of layers that leaves at once has at least so many bytes."""
    layer_group_s: float = 0.001
    """A group of layers is made so large that it takes a link about so many seconds, by the rate measured so far."""
    in_flight_bytes: int = 256 * 1024 * 1024
    """Bytes of pages that may be under way to one peer; more wait their turn, in order. A write that is alone may have
    more."""
    frame_bytes: int = 4 * 1024 * 1024
    """zmq and staged: the most bytes of a pool that one write may have, or one page where that is more; longer writes
    are split."""
    connections: int = 2
    """zmq and staged: TCP connections that pages take from one rank of a worker to one rank of another."""
    bounce_bytes: int = 1024 * 1024
    """staged: bytes of a host buffer that pages go through, or one page of a layer where that is more. A connection has
    two at either end."""
