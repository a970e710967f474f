"""What routing knows and what it costs: the KV index at a thousand workers, and every policy under conversations.

    python -m bench.serving.routing_policies
    python -m bench.serving.routing_policies --part index
    python -m bench.serving.routing_policies --part policies --seconds 600 --rates 6 12
    python -m bench.serving.routing_policies --part policies --trace bench/traces/conversation_200.jsonl --speed 0.5

`index`: memory for ten million pages, beside dictionaries; time to apply events, with and without their decoding; and
time to place a prompt of 128k tokens that all of 1,000 workers hold, beside the memory that the router had before
(`bench/serving/sent_blocks.py`), in turns. Times are of the processor: who else runs on the machine doesn't count.
`policies`: a queueing model (`bench/serving/routing_model.py`) of the
production router over eight prefill workers. Its costs are flags. The defaults are the demo's on two cores: what a
prefill worker told of its own speed, and what `bench.cache.copy_speed` found for loads from host memory (3.3 GB/s, 1
KiB a token); the milliseconds of a prompt beside its tokens are assumed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.common import machine
from bench.serving.routing_model import OLD_S, PolicyFigures, PromptAsk, StepCosts, conversations, measure
from bench.serving.sent_blocks import SentBlocks
from twinpool.contracts.block_hash import block_hashes
from twinpool.contracts.clock import SystemClock
from twinpool.contracts.config.router_config import AuditConfig, RouterConfig
from twinpool.contracts.ids import Incarnation, RequestId, Role, WorkerName
from twinpool.contracts.messages.kv_events import BlockStored, EventMedium, decode_batch, encode_batch
from twinpool.contracts.messages.worker_status import WorkerLimits, WorkerRecord, WorkerStatus, WorkerView
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.router.core.router_core import RouterCore
from twinpool.router.kv_indexer.holder_sets import DEVICE
from twinpool.router.kv_indexer.holder_table import HolderTable
from twinpool.router.kv_indexer.kv_index import KVIndex
from twinpool.router.kv_indexer.table_index import TableIndex
from twinpool.router.kv_indexer.table_memory import TableMemory, TableSize
from twinpool.router.kv_indexer.table_slots import SlotWriter
from twinpool.router.kv_indexer.told_prefixes import ToldPrefixes
from twinpool.router.state.prefix_hashes import PAGE_TOKENS, marked, prefix_hashes
from twinpool.router.state.routed_request import RoutedRequest
from twinpool.sim.scale.trace_file import TRACE_BLOCK_TOKENS, read_trace

POLICIES = ("cache_aware", "least_loaded", "power_of_two", "round_robin", "session")
PROMPT = 128 * 1024
TELLING_PAGES = 20_000
"""Pages whose events are encoded and decoded."""


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def timed_ms(call: Callable[[], object], times: int) -> float:
    """Median milliseconds of processor time of a call."""
    took = []
    for _ in range(times):
        began = time.thread_time()
        call()
        took.append(1000 * (time.thread_time() - began))
    return statistics.median(took)


# ---------------------------------------------------------------- the index


def fill(table: HolderTable, slots: Sequence[int], pages_each: int) -> dict[str, float]:
    """Enter pages of their own for each worker, in runs of 64 as events bring them."""
    rng = np.random.default_rng(1)
    before, spent = resident_bytes(), 0.0
    for slot in slots:
        for _ in range(0, pages_each, 640):
            keys = rng.integers(1, 2**64, 640, dtype=np.uint64)
            began = time.thread_time()
            for run in range(0, 640, 64):
                some = keys[run : run + 64]
                table.add(slot, DEVICE, some[marked(some, PAGE_TOKENS)])
            spent += time.thread_time() - began
    pages = len(slots) * (-(-pages_each // 640) * 640)
    return {
        "pages": pages,
        "entries": table.entries,
        "evicted": table.evicted,
        "resident_bytes_a_page": (resident_bytes() - before) / pages,
        "table_bytes_a_page": table.memory.size.bytes / pages,
        "bytes_an_entry": table.memory.size.bytes / table.entries,
        "apply_us_a_page": 1e6 * spent / pages,
    }


def dictionary_bytes() -> float:
    """Bytes of a page in dictionaries (`router.kv_indexer.kv_index`)."""
    tokens = tuple(np.random.default_rng(2).integers(0, 100_000, TELLING_PAGES * PAGE_TOKENS).tolist())
    payload = encode_batch(0.0, [_stored(tokens)], 0)
    tracemalloc.start()
    index = KVIndex()
    index.apply(decode_batch(payload).events)
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return taken / TELLING_PAGES


def _stored(tokens: tuple[int, ...]) -> BlockStored:
    return BlockStored(EventMedium.DEVICE, None, tuple(block_hashes(tokens, PAGE_TOKENS)), tokens, PAGE_TOKENS)


def telling_us(index: TableIndex) -> float:
    """Microseconds of a page from the bytes of its event to the table."""
    tokens = tuple(np.random.default_rng(3).integers(0, 100_000, TELLING_PAGES * PAGE_TOKENS).tolist())
    payloads = [
        encode_batch(0.0, [_stored(tokens[at : at + 64 * PAGE_TOKENS])], 0)
        for at in range(0, len(tokens), 64 * PAGE_TOKENS)
    ]
    began = time.thread_time()
    for payload in payloads:
        index.apply(decode_batch(payload).events)
    return 1e6 * (time.thread_time() - began) / TELLING_PAGES


def measure_index(workers: int, count: int, folder: Path) -> dict[str, Any]:
    """All figures of the index."""
    figures: dict[str, Any] = {"workers": workers}
    path = folder / "index"
    memory = TableMemory.create(path, TableSize.of_bytes(20 * (count // 4) * 10 // 9), PAGE_TOKENS)
    table, slots = HolderTable(memory), SlotWriter(memory)
    keys = [(WorkerName(f"prefill-{number}"), Incarnation(1)) for number in range(workers)]
    numbers = [slot for key in keys if (slot := slots.take(key)) is not None]
    prompt = tuple(range(PROMPT))
    pages = prefix_hashes(prompt).pages
    marks = pages[marked(pages, PAGE_TOKENS)]
    for slot in numbers:
        slots.set_live(slot, True)
    figures |= fill(table, numbers, count // workers)
    began = time.thread_time()
    for slot in numbers:
        table.add(slot, DEVICE, marks)
    figures["all_know_ms_a_worker"] = 1000 * (time.thread_time() - began) / workers
    figures["dictionary_bytes_a_page"] = dictionary_bytes()
    figures["hash_prompt_ms"] = timed_ms(lambda: prefix_hashes(prompt), 5)
    figures |= placing(workers, path, memory, prompt)
    figures["tell_us_a_page"] = telling_us(TableIndex(table, slots, (WorkerName("one-more"), Incarnation(1))))
    return figures


def block_names(prompt: tuple[int, ...]) -> tuple[bytes, ...]:
    """The keys of a prompt's blocks as objects of their own, as each request has them."""
    return tuple(int(key).to_bytes(8, "little") for key in prefix_hashes(prompt).blocks)


def placing(workers: int, path: Path, memory: TableMemory, prompt: tuple[int, ...]) -> dict[str, float]:
    """Milliseconds to place the prompt that all workers hold: by the table, and by a dictionary a worker, in turns."""
    clock = SystemClock()
    rooms = (f"room-{n}" for n in itertools.count())
    core = RouterCore(RouterConfig(), clock, lambda: next(rooms), AuditConfig(fraction=0.0), told=ToldPrefixes(path))
    views = []
    for number in range(workers):
        name, one = WorkerName(f"prefill-{number}"), Incarnation(1)
        record = WorkerRecord(name, Role.PREFILL, one, 1, "", "", "", WorkerLimits(10**6, 10**6))
        counters = {"compute_tokens_per_s": 19_000.0, "load_tokens_per_s": 10**6}
        views.append(
            WorkerView(record, WorkerStatus(name, Role.PREFILL, "ready", 1, "", one, 0, 0, 0, 0, counters=counters))
        )
    core.on_view(views)
    for view in views:
        core.on_linked((view.record.name, view.record.incarnation))
    before = {entry.key: SentBlocks() for entry in core.workers}
    for memory_of_one in before.values():
        memory_of_one.sent(block_names(prompt))
    requests = itertools.count()
    found: dict[str, list[float]] = {"place_ms": [], "index_alone_ms": [], "before_ms": [], "before_place_ms": []}
    for _ in range(15):
        now = clock.now()
        memory.header["pulse"][0] = now
        rid = RequestId(f"r{next(requests)}")
        hashes = prefix_hashes(prompt)  # Of its own, as a request's is: nothing about it is remembered.
        request = RoutedRequest(rid, prompt, SamplingParams(1), now=now, deadline=now + 600, hashes=hashes)
        began = time.thread_time()
        core.submit(request)
        found["place_ms"].append(1000 * (time.thread_time() - began))
        hits = core.indexes.hits(prefix_hashes(prompt), clock.now())
        assert len(hits.held) == workers, "all of them hold it"
        core.cancel(rid)
        core.take_actions()
        fresh = prefix_hashes(prompt)
        found["index_alone_ms"].append(timed_ms(lambda fresh=fresh: core.indexes.hits(fresh, clock.now()), 1))  # type: ignore[misc]

        blocks = block_names(prompt)
        began = time.thread_time()
        for remembered in before.values():
            remembered.overlap(blocks)
        found["before_ms"].append(1000 * (time.thread_time() - began))
        began = time.thread_time()
        able = core.workers.able(Role.PREFILL, PROMPT, {}, now)
        uncached = [PROMPT - before[entry.key].overlap(blocks) * 64 for entry in able]
        costs = [(entry.load + tokens, tokens, entry.turn) for entry, tokens in zip(able, uncached, strict=True)]
        before[able[costs.index(min(costs))].key].sent(blocks)
        found["before_place_ms"].append(1000 * (time.thread_time() - began))
    first = {f"first_{name}": took[0] for name, took in found.items()}
    return first | {name: statistics.median(took) for name, took in found.items()}


def show_index(figures: dict[str, Any], console: Console) -> None:
    table = Table(title=f"{figures['workers']:,} workers, {figures['pages']:,} pages of {PAGE_TOKENS} tokens")
    table.add_column("what")
    table.add_column("the table", justify="right")
    table.add_column("dictionaries", justify="right")
    table.add_row("bytes a page", f"{figures['table_bytes_a_page']:.1f}", f"{figures['dictionary_bytes_a_page']:.0f}")
    table.add_row("bytes an entry (one page in four)", f"{figures['bytes_an_entry']:.1f}", "")
    table.add_row("resident bytes a page", f"{figures['resident_bytes_a_page']:.1f}", "")
    table.add_row("entries that gave way", f"{figures['evicted']:,} of {figures['entries']:,}", "")
    table.add_row("apply a page, µs", f"{figures['apply_us_a_page']:.2f}", "")
    table.add_row("from the event's bytes on, µs", f"{figures['tell_us_a_page']:.2f}", "")
    table.add_row("another worker learns 128k tokens, ms", f"{figures['all_know_ms_a_worker']:.2f}", "")
    table.add_row("what all hold of 128k tokens, ms", f"{figures['index_alone_ms']:.2f}", f"{figures['before_ms']:.1f}")
    table.add_row("place the prompt, ms", f"{figures['place_ms']:.2f}", f"{figures['before_place_ms']:.1f}")
    table.add_row(
        "place it for the first time, ms", f"{figures['first_place_ms']:.2f}", f"{figures['first_before_ms']:.1f}"
    )
    table.add_row("hash the prompt (a reader does), ms", f"{figures['hash_prompt_ms']:.1f}", "")
    console.print(table)


# ---------------------------------------------------------------- policies


def asks_of(args: argparse.Namespace, rate: float) -> tuple[list[PromptAsk], int]:
    """The prompts, and the tokens of their blocks."""
    if args.trace is None:
        return conversations(args.seconds, rate, args.block_tokens, args.seed), args.block_tokens
    lines = read_trace(args.trace)
    asks = [PromptAsk(one.at_s / args.speed, one.input_length, one.hash_ids, "") for one in lines]
    return asks, TRACE_BLOCK_TOKENS


def measure_policies(args: argparse.Namespace, console: Console) -> list[dict[str, Any]]:
    costs = StepCosts(args.base_ms / 1000, args.compute, args.load, args.device_tokens, args.host_tokens)
    found: list[dict[str, Any]] = []
    for rate in args.rates if args.trace is None else [0.0]:
        asks, block_tokens = asks_of(args, rate)
        since = OLD_S if args.trace is None else 0.0
        rows = [(policy, True) for policy in args.policies]
        if "cache_aware" in args.policies:
            rows.append(("cache_aware", False))
        figures = [
            measure(
                policy,
                asks,
                args.workers,
                costs,
                block_tokens,
                args.slo_ms / 1000,
                index=index,
                since_s=since,
                routers=args.routers,
            )
            for policy, index in rows
        ]
        counted = sum(ask.at_s >= since for ask in asks)
        asked = counted / (asks[-1].at_s - since)
        console.print(_policies(figures, asked, counted, args.slo_ms))
        found += [{"rate": asked, **asdict(one)} for one in figures]
    return found


def _policies(figures: Sequence[PolicyFigures], rate: float, count: int, slo_ms: int) -> Table:
    table = Table(title=f"{count} prompts, {rate:.1f} a second")
    heads = ("policy", "hits", "of them loaded", "TTFT p50, ms", "p99, ms", f"in {slo_ms} ms, each s", "share")
    for name in heads:
        table.add_column(name, justify="left" if name == "policy" else "right")
    for one in figures:
        name = one.policy + ("" if one.index or one.policy != "cache_aware" else ", by what was sent")
        table.add_row(
            name,
            f"{one.hit_rate:.1%}",
            f"{one.host_share:.1%}",
            f"{1000 * one.ttft_p50_s:,.0f}",
            f"{1000 * one.ttft_p99_s:,.0f}",
            f"{one.goodput:.2f}",
            f"{one.in_time:.1%}",
        )
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=("index", "policies", "all"), default="all")
    parser.add_argument("--index-workers", type=int, default=1000)
    parser.add_argument("--pages", type=int, default=10_000_000)
    parser.add_argument("--workers", type=int, default=8, help="prefill workers of the model")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--routers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=120.0, help="of the time that is modelled")
    parser.add_argument("--rates", type=float, nargs="+", default=[4.0, 8.0, 12.0], help="prompts a second")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--speed", type=float, default=1.0, help="divides the trace's gaps")
    parser.add_argument("--block-tokens", type=int, default=64)
    parser.add_argument("--base-ms", type=float, default=5.0)
    parser.add_argument("--compute", type=float, default=10_000, help="prompt tokens a second of one worker")
    parser.add_argument("--load", type=float, default=3_000_000, help="tokens a second from its host memory")
    parser.add_argument("--device-tokens", type=int, default=65_536)
    parser.add_argument("--host-tokens", type=int, default=262_144)
    parser.add_argument("--slo-ms", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    console, figures = Console(width=110), {"machine": machine.describe()}
    console.print(machine.headline())
    if args.part in ("index", "all"):
        with tempfile.TemporaryDirectory() as folder:
            index = measure_index(args.index_workers, args.pages, Path(folder))
        show_index(index, console)
        figures["index"] = index
    if args.part in ("policies", "all"):
        figures["policies"] = {"policies": measure_policies(args, console)}
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
