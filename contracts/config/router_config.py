"""Configuration sections of the router: queueing, replay, sampling defaults, audits, the stream watch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from twinpool.contracts.errors import ConfigError

_CHECKPOINT, _NONE = "checkpoint", "none"
SAMPLING_BOUNDS: dict[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
}
"""The sampling parameters that have a default, with the least and the most that each may be."""


@dataclass(frozen=True, slots=True)
class RouterConfig:
    policy: Literal["cache_aware", "least_loaded", "power_of_two", "round_robin", "session"] = "cache_aware"
    """Who gets a request: the worker that will be quickest by what it holds and has to do; the least loaded, of all or
    of two drawn at random; the next in turn; or always the same for a session."""
    kv_index: Literal["auto", "none"] = "auto"
    """auto: a process beside the router follows what workers say of their caches (KV events), where they are processes
    and the policy asks for it; workers publish on loopback then unless `cache.events.endpoint` says where. none: what
    the router has sent is all that it knows."""
    kv_index_bytes: int = 64 * 1024**2
    """Memory of that index for pages: 20 bytes for each 64 tokens, however many workers hold them."""
    max_queue: int = 1024
    """Requests in flight; more get 429."""
    default_max_tokens: int = 512
    """`max_tokens` of completions that name none; a chat that names none may use the rest of the context."""
    max_prompt_logprobs: int = 32_768
    """Log-probabilities of prompt tokens (echo with logprobs) that one request may ask for, over all its choices."""
    max_routed_positions: int = 65_536
    """Positions of which one request may ask for the experts (`return_routed_experts`), those of each answer with its
    prompt: each has two bytes for each expert that a layer chooses, half a kilobyte to a kilobyte of a large model."""
    served_model_name: str = ""
    """Names under which clients ask for the model, separated by commas; answers carry the first. Empty: the folder's
    name, of a Hugging Face snapshot the repository's."""
    request_timeout_s: float = 600.0
    """Seconds from its arrival after which a request ends with an error, unless its own `timeout` says otherwise."""
    max_timeout_s: float = 3600.0
    """The longest `timeout` that a request may name."""
    ttft_slo_ms: int = 0
    """Milliseconds to the first token beyond which answers are of no use: a request for which more are predicted is
    refused at once, and one that nothing has begun by then is not computed. 0: none. A tenant's own comes before it;
    the header x-slo-ttft-ms may name less."""
    metrics_aliases: Literal["vllm", "none"] = "vllm"
    """vllm: /metrics has vLLM's names, too, where they mean the same, for dashboards and autoscalers that look for
    them."""
    replay_limit: int = 8
    """Attempts after the first before a request is failed."""
    concurrent_migrations: int = 4
    """Requests that one decode worker hands to others at the same time."""
    worker_wait_s: float = 60.0
    """Seconds that a request waits for a worker of a role to come (back)."""
    wake_timeout_s: float = 120.0
    """Seconds that a request which meets a cluster asleep for want of requests (`cluster.sleep_after_s`) waits for it
    to serve; then it gets 503."""
    wake_queue: int = 64
    """Requests that wait for that at once; more get 503 at once."""
    resume_wait_s: float = 2.0
    """Seconds that decode workers may take to say what they have kept of a request with an Idempotency-Key; those that
    haven't answered by then count as having nothing."""
    breaker_window_s: float = 30.0
    """A worker's outcomes within so many seconds decide whether the circuit breaker leaves it alone."""
    breaker_failures: int = 5
    """Least number of failures within the window before a worker is left alone for a while."""
    breaker_rate: float = 0.6
    """Least share of failures among the worker's outcomes within the window, besides `breaker_failures`."""
    breaker_open_s: float = 5.0
    """Seconds for which a worker is left alone; then one request tries it. Doubles with each failed trial, up to
    eightfold, while another worker of its role takes requests."""
    tool_parser: Literal[
        "auto",
        "none",
        "hermes",
        "llama3_json",
        "qwen3_coder",
        "glm45",
        "glm47",
        "deepseek_v3",
        "deepseek_v31",
        "deepseek_v32",
        "deepseek_v4",
        "harmony",
        "gemma4",
        "kimi_k2",
        "minimax_m2",
        "mistral",
        "mistral_json",
        "nemotron_json",
        "apriel",
        "granite",
        "seed_oss",
    ] = "auto"
    """How the model writes calls of tools; auto: as its chat template says."""
    sampling_defaults: str = "checkpoint"
    """What `temperature`, `top_p`, `top_k`, `min_p` and `repetition_penalty` are where a request doesn't say.
    checkpoint: as its generation_config.json says; none: 1, and no limit; pairs such as `temperature=0,top_p=0.9` count
    before the checkpoint's."""
    tool_prompt: Literal["auto", "none"] = "auto"
    """auto: where the model's chat template shows no tools, a system message describes them, in Hermes' format, and
    earlier calls and their results are written as its text; with `tool_parser` `auto` or `hermes`. none: tools are left
    to the template."""
    split_special_tokens: bool = True
    """Whether special tokens that users and tools write into a chat (`<|im_start|>`) are text, so that nobody forges a
    turn of another role. Prompts of /v1/completions have them as the tokens that they name."""
    reasoning_parser: Literal["auto", "none", "think", "gemma4", "mistral", "seed_oss"] = "auto"
    """How the model writes reasoning; auto: as its chat template says; think: between <think> and </think>; gemma4: in
    a channel of its own; mistral: between [THINK] and [/THINK]; seed_oss: between <seed:think> and </seed:think>.
    gpt-oss's is part of its format of calls."""
    stall_s: float = 30.0
    """/health fails when work waits and nothing has advanced for this long."""
    max_body_bytes: int = 0
    """Larger bodies are refused with 413; 0: 1 MiB, 32 bytes for each position of the context, and 24 MiB where the
    model takes images, at most 64 MiB."""
    max_images: int = 16
    """Images in one request, where the model takes them; 0: they are refused."""
    max_image_pixels: int = 2**26
    """Pixels of an image, as its header says, above which it isn't decoded. Decoding takes up to 12 bytes a pixel of
    `reader_memory_bytes`. Any image below is brought to the size that the model's processor makes of it."""
    image_urls: str = ""
    """Hosts whose images are fetched where a chat names them by an http or https URL, with commas: ``example.org``,
    ``*.example.org`` for all below it, ``example.org:8080`` for that port alone, ``*`` for every host; without a port
    80 and 443. Empty: none are, and an image has to come in the body. Addresses must be public all the same."""
    image_url_networks: str = ""
    """Networks, with commas (``10.1.0.0/16``), in which images may be fetched though their addresses aren't public."""
    image_url_bytes: int = 20 * 1024**2
    """Bytes of an image above which it isn't fetched."""
    image_url_timeout_s: float = 10.0
    """An image that isn't there after so many seconds, redirects and all, is given up."""
    body_buffer_bytes: int = 64 * 1024 * 1024
    """Memory for bodies that are being received, of all clients; a body's first 64 KiB don't count. Bodies beyond it
    get 503."""
    max_connections: int = 4096
    """Clients' connections, at most three quarters of the descriptors that the process may open. At the limit, the
    connection idle for longest is closed for a new one; when none is idle, only the health endpoints answer."""
    header_timeout_s: float = 10.0
    """Seconds from the first byte of a request until its headers must be whole."""
    body_timeout_s: float = 20.0
    """Seconds that a body may take, besides one for every `body_bytes_per_s` bytes that have come."""
    body_bytes_per_s: int = 65_536
    """The least rate, in bytes per second, at which a long body must come."""
    write_timeout_s: float = 60.0
    """A client that reads nothing of its answer for so many seconds is cut off."""
    stream_keepalive_s: float = 15.0
    """A stream without an event for so many seconds gets a comment line, so that proxies don't take it for dead."""
    reader_processes: int = 2
    """Processes that read bodies above 2 KiB, and those that may take a grammar; of several, one is kept free for
    bodies under 256 KiB. They start when they are first needed."""
    reader_timeout_s: float = 30.0
    """A body that takes a reader longer than this is refused, and the reader ended."""
    reader_memory_bytes: int = 2 * 1024**3
    """Memory that a reader may take for one body beyond what it has at its start."""
    client_buffer_events: int = 4096
    """Undelivered stream events of a slow client after which its request is cancelled."""
    kept_refusals: int = 4000
    """Requests refused before they were placed of which this router can say why (about 1 kB each); the oldest go, those
    of a tenant that has more than its share first. They take no room from records."""
    kept_records: int = 2000
    """Records of requests that have ended, for `twinpool explain`, which each router keeps; 0: none."""
    kept_record_bytes: int = 32 * 1024**2
    """Memory of these records at most, as they are counted."""
    reported_records: int = 20
    """Records a second, at most, that a router sends the controller; 0: none. Those in which something went otherwise
    than usual come first, then the slowest."""


@dataclass(frozen=True, slots=True)
class BatchConfig:
    folder: str = ""
    """Absolute folder in which files and batches are kept; all routers must see the same. Empty: there are none."""
    file_bytes: int = 200 * 1024**2
    """The largest file that may be uploaded."""
    tenant_bytes: int = 2 * 1024**3
    """What one tenant's files may take, outputs included."""
    disk_bytes: int = 10 * 1024**3
    """What all files may take."""
    free_bytes: int = 1024**3
    """Uploads are refused, and batches wait, while the disk has less room than this."""
    max_files: int = 500
    """Files of one tenant; and of its batches that have ended as many are kept, the last ones."""
    max_lines: int = 50_000
    """Requests of one batch."""
    max_batches: int = 50
    """Batches of one tenant that have not ended."""
    concurrency: int = 16
    """Requests of batches that one router has under way, for each model."""
    quiet_s: float = 0.5
    """Seconds for which a decode worker has had no other request before any of a batch begins there. 0: none, where
    prefill, decode and routers share no cores."""
    line_tries: int = 5
    """Tries of a request that fails by the server's fault, before the failure is its answer. What finds no room isn't
    counted: it waits."""
    sync_s: float = 0.5
    """Answers are synced to the disk so often: what a crash of the machine loses is asked again."""
    keep_s: int = 30 * 24 * 3600
    """Seconds after which files go, and batches that have ended."""


@dataclass(frozen=True, slots=True)
class AuditConfig:
    fraction: float = 0.01
    """Share of finished answers that idle prefill workers compute again from their tokens alone; 0: none."""
    queue_answers: int = 64
    """Answers that wait for an audit by an idle worker; when there are more, the oldest are left out."""
    chunk_tokens: int = 128
    """Positions of an audit's step: a request that comes waits for one such step at most."""
    margin: float = 0.25
    """With `numerics: fast`, a token counts as damaged only where every logit would have to be off by more than
    this."""
    timeout_s: float = 120.0
    """An audit that a worker has not answered for so many seconds is left out."""


@dataclass(frozen=True, slots=True)
class WatchConfig:
    repetition_tokens: int = 0
    """A stream that has repeated a piece of itself for this many tokens is flagged; 0: not watched."""
    repetition_period: int = 64
    """Longest repeated piece that is looked for, in tokens; it counts as repeated from its third time on."""
    rare_factor: float = 0.0
    """A stream with this many times as many rare tokens as the model's usual is flagged; 0: not watched."""
    rare_share: float = 0.05
    """Rare are the least frequent of the model's recent tokens, which together make up this share of them."""
    window_tokens: int = 64
    """Rare tokens are counted among this many last tokens of a stream; at most 1024."""
    warm_up_tokens: int = 100_000
    """Tokens of a model before its usual rate is known: until then no stream is flagged for its rare tokens."""


def read_sampling_defaults(text: str, checkpoint: dict[str, float]) -> dict[str, float]:
    """Return the sampling defaults that `text` asks for, the value of `router.sampling_defaults`: ``checkpoint`` has
    those of the `checkpoint`, ``none`` has none, and pairs such as ``temperature=0,top_p=0.9`` count before those of
    the checkpoint.

    Raises `ConfigError` for a name that isn't in `SAMPLING_BOUNDS`, and a value that is out of them.
    """
    if text in (_CHECKPOINT, _NONE):
        return dict(checkpoint) if text == _CHECKPOINT else {}
    found = dict(checkpoint)
    for pair in text.split(","):
        name, _, value = (part.strip() for part in pair.partition("="))
        if name not in SAMPLING_BOUNDS:
            raise ConfigError(
                f"config key router.sampling_defaults is {_CHECKPOINT}, {_NONE}, or pairs such as "
                f"temperature=0,top_p=0.9 of {', '.join(SAMPLING_BOUNDS)}; got {text!r:.60}"
            )
        least, most = SAMPLING_BOUNDS[name]
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = math.nan
        if not least <= found[name] <= most:
            raise ConfigError(
                f"config key router.sampling_defaults: {name} must be from {least:g} to {most:g}; got {value!r:.40}"
            )
    return found
