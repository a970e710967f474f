"""Break product code in hundreds of places, one at a time, and see whether a test notices: `make mutation-sweep`.

1. `places`: what can be broken (`tests/mutants/breaking.py`) is found in the files of `TARGETS`, and so many are drawn
   from it by a seed, a share a file.
2. `map`: each test is run once with probes in these files (`tests/mutants/probing.py`): which statements it executes.
   Kept in build/mutation-sweep/map.json; tests whose file didn't change aren't run again.
3. `judge`: for each place a process that has imported everything, and collected all tests, forks a child; the child
   puts the broken function in, and runs the tests that execute that statement, one of each file at a time and the fast
   ones first, until one fails. That test is run again without the break: where it fails as well it is flaky, is left
   out, and the place is judged again. A mutant that hangs a test is dead, too. Verdicts are added to state.jsonl, so a
   sweep that was stopped goes on where it was; a place keeps its verdict as long as its function doesn't change.
4. `report`: how many died, and each that didn't, with its line. `keep` puts the verdicts into the repository.
   What no test can tell from the code as it is stands in equivalent.tsv with the reason, and is left out.

`make mutation-sweep ARGS="--count 400 --jobs 2 --hours 4"` does all of it; ARGS="report" shows what is known so far;
ARGS="judge --again" judges survivors once more, after tests were added; ARGS="judge --only
cache/pool/page_allocator.py" a file.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import hashlib
import json
import math
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from types import FunctionType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")

import hypothesis  # noqa: E402
import pytest  # noqa: E402

from tests.mutants.breaking import Place, broken, places  # noqa: E402
from tests.mutants.probing import Probes  # noqa: E402

FOLDER = ROOT / "build" / "mutation-sweep"
KEPT = ROOT / "tests" / "mutants" / "verdicts.jsonl"
EQUIVALENT = ROOT / "tests" / "mutants" / "equivalent.tsv"
"""Mutations that no test can tell from the code, each with the reason: not judged, and counted by themselves."""
TARGETS = (
    "router/core/router_core.py", "router/core/placement.py", "router/core/failover.py",
    "router/kv_indexer/holder_table.py", "router/migration/migrations.py", "router/migration/migration_table.py",
    "router/state/routed_request.py", "router/state/worker_table.py", "router/state/circuit_breaker.py",
    "router/verification/audits.py", "router/text/detokenizer.py", "router/openai/choice_output.py",
    "router/api/admin_changes.py", "prefill/worker.py", "prefill/request.py", "prefill/scheduler.py",
    "prefill/step_commit.py", "prefill/step_commit.py", "prefill/audit_runner.py", "decode/worker.py",
    "decode/scheduler.py", "decode/transfer_queue.py", "decode/step_commit.py", "decode/request.py",
    "decode/request.py", "decode/retraction/retraction.py", "decode/retraction/retraction_policy.py",
    "decode/retraction/memory_pressure.py", "decode/migration/outgoing_migrations.py",
    "decode/migration/drain_offers.py", "decode/migration/prefix_push.py", "transfer/rooms/room_states.py",
    "transfer/rooms/sender/kv_sender.py", "transfer/rooms/sender/sender_rooms.py",
    "transfer/rooms/sender/sender_peers.py", "transfer/rooms/sender/write_queue.py",
    "transfer/rooms/receiver/kv_receiver.py", "transfer/rooms/receiver/receiver_rooms.py",
    "transfer/rooms/receiver/receiver_peers.py", "transfer/rooms/receiver/receiver_room.py",
    "transfer/rooms/room_messages.py", "cache/pool/page_allocator.py", "cache/pool/page_allocator.py",
    "cache/prefix_cache/radix_tree.py", "cache/prefix_cache/tree_accounts.py",
    "cache/prefix_cache/tree_node.py", "cache/prefix_cache/eviction_policy.py",
    "cache/prefix_cache/tree_node.py", "cache/prefix_cache/eviction_policy.py",
    "cache/prefix_cache/radix_tree.py", "cache/prefix_cache/eviction_policy.py",
    "cache/prefix_cache/tree_node.py", "cache/manager/allocations.py", "cache/manager/running_pages.py",
    "cache/manager/allocations.py", "cache/manager/finished_pages.py", "cache/manager/swapped_requests.py",
    "cache/arena/arena_keeper.py", "cache/memory/kv_cache_spec.py", "contracts/wire/message_codec.py",
    "contracts/wire/message_codec.py", "contracts/messages/rank_orders.py",
    "contracts/messages/rank_order_codec.py", "engine/runner/device_rows.py", "engine/runner/device_rows.py",
    "engine/runner/device_rows.py", "engine/runner/sampling/logits_processors.py",
    "engine/runner/sampling/sampler.py", "cluster/controller/controller.py", "cluster/worker_process/lease_keeper.py",
    "transfer/planes/rank_fan.py", "transfer/planes/direct/direct_link.py", "transfer/planes/direct/cuda_ipc.py",
    "transfer/planes/tcp/bounce_buffers.py", "transfer/planes/tcp/page_stream.py",
    "transfer/planes/tcp/data_listener.py", "transfer/planes/tcp/zmq_link.py", "transfer/planes/tcp/zmq_plane.py",
    "transfer/planes/one_sided.py", "transfer/net/sealed_stream.py", "cluster/assembly/node_shares.py",
    "cluster/serve/memory_fit.py", "contracts/config/plane_choice.py", "cache/memory/head_slices.py",
    "cache/device/device_port.py", "cache/device/cpu_device.py", "contracts/wire/frame_connection.py",
    "contracts/wire/socket_acceptor.py", "contracts/credentials/node_tls.py",
    "contracts/credentials/certificate_check.py", "contracts/credentials/certificate_files.py",
    "contracts/key_file.py", "contracts/cluster_secret.py", "cluster/worker_process/router_streams.py",
    "router/links/worker_links.py", "router/api/http_protocol.py", "router/api/router_server.py",
    "router/security/tenant_accounts.py", "router/service/admission.py",
    "router/state/ttft_prediction.py", "router/openai/tools.py", "router/openai/chat_format.py",
    "router/openai/structured_output.py", "router/openai_responses/responses_request.py",
    "router/openai_responses/responses_writer.py", "router/anthropic/messages_request.py",
    "router/anthropic/messages_writer.py", "router/parsers/json_calls.py", "router/parsers/element_calls.py",
    "router/parsers/tool_formats.py", "router/parsers/gemma_calls.py", "router/parsers/harmony_messages.py",
    "router/parsers/reasoning_parser.py", "worker/request_table.py",
)  # fmt: skip
TESTS = (
    "tests/router", "tests/cache", "tests/transfer", "tests/workers", "tests/prefill", "tests/decode", "tests/sim",
    "tests/cluster", "tests/contracts", "tests/wire",
    "tests/engine/test_sampling.py", "tests/engine/test_launched_steps.py",
    "tests/engine/test_device_block_tables.py", "tests/engine/test_token_history.py", "tests/engine/test_replay.py",
    "tests/repository/test_hazards.py", "tests/repository/test_complaints.py",
)  # fmt: skip
"""Those that run product code in their own process."""
TEST_S = 8.0
"""A test that takes longer than this is no judge."""
MEMORY_BYTES = 12 * 2**30
UNFIT = "can't be put in"
"""Of a place whose function isn't there to be replaced, or needs other names of what encloses it; it doesn't count."""


# ---------------------------------------------------------------- what is known


@dataclass
class TestRun:
    """What one test executes."""

    seconds: float
    source: str
    """Digest of its file."""
    hits: dict[str, list[int]] = field(default_factory=dict)
    """Statements, by ``path|function|digest``."""


@dataclass
class Verdict:
    """What became of one place."""

    key: str
    died: bool
    by: str = ""
    how: str = ""
    tests: int = 0
    """That were run."""
    of: int = 0
    """That execute the statement."""
    seconds: float = 0.0
    place: dict[str, Any] = field(default_factory=dict)


def read_map() -> dict[str, TestRun]:
    file = FOLDER / "map.json"
    if not file.exists():
        return {}
    return {node: TestRun(**run) for node, run in json.loads(file.read_text()).items()}


def write_map(runs: dict[str, TestRun]) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    fresh = FOLDER / "map.json.new"
    fresh.write_text(json.dumps({node: asdict(run) for node, run in runs.items()}))
    fresh.rename(FOLDER / "map.json")


def read_verdicts() -> dict[str, Verdict]:
    """The latest of each place: those of the repository, then those of this checkout."""
    lines = [line for file in (KEPT, FOLDER / "state.jsonl") if file.exists() for line in file.read_text().splitlines()]
    return {verdict.key: verdict for verdict in (Verdict(**json.loads(line)) for line in lines)}


def keep_verdicts(chosen: list[Place]) -> None:
    """Put what is known of these places into the repository, so that another checkout needn't judge them again."""
    verdicts = read_verdicts()
    kept = [verdicts[key] for key in sorted(place.key for place in chosen) if key in verdicts]
    KEPT.write_text("".join(json.dumps({"key": v.key, "died": v.died, "by": v.by, "how": v.how}) + "\n" for v in kept))


def add_verdict(verdict: Verdict) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "state.jsonl").open("a") as file:
        file.write(json.dumps(asdict(verdict)) + "\n")


def chosen_places(count: int, seed: int, targets: tuple[str, ...] = TARGETS) -> list[Place]:
    """`count` places, a file's share growing with the root of how many it has; the same for the same seed and code.
    Those that were judged before, and kept, come first."""
    judged = {json.loads(line)["key"] for line in KEPT.read_text().splitlines()} if KEPT.exists() else set()
    found = {path: places(path, (ROOT / path).read_text()) for path in targets}
    weights = {path: math.sqrt(len(some)) for path, some in found.items()}
    out = []
    for path, some in found.items():
        share = math.ceil(count * weights[path] / sum(weights.values()))
        drawn = {p.key: hashlib.sha1(f"{seed}:{p.key}".encode()).digest() for p in some}
        out += sorted(some, key=lambda p: (p.key not in judged, drawn[p.key]))[:share]
    return out


def judges(place: Place, runs: dict[str, TestRun], source: dict[str, str]) -> list[str]:
    """The tests that execute the place, in the order in which they are tried. Of a function that changed since, or is
    new, those that execute any of it, or any of its file."""
    exact, name, file = f"{place.path}|{place.function}|{place.digest}", f"{place.path}|{place.function}|", place.path

    def executes(run: TestRun) -> bool:
        """Of a test that was mapped when the function was another one, all of it counts."""
        if exact in run.hits:
            return place.statement in run.hits[exact]
        return any(key.startswith(name) for key in run.hits)

    found = [node for node, run in runs.items() if executes(run)]
    if not found and not any(exact in run.hits for run in runs.values()):
        found = [node for node, run in runs.items() if any(key.startswith(file + "|") for key in run.hits)]
    found = [node for node in found if node in source and runs[node].seconds <= TEST_S]
    by_file: dict[str, list[str]] = defaultdict(list)
    for node in sorted(found, key=lambda n: runs[n].seconds):
        by_file[node.split("::")[0]].append(node)
    rank = {node: at for nodes in by_file.values() for at, node in enumerate(nodes)}
    return sorted(found, key=lambda n: (rank[n], runs[n].seconds))


def equivalents() -> dict[tuple[str, str, str, str], str]:
    """Why nobody can tell, by file, function, operator and line."""
    rows = [line.split("\t") for line in EQUIVALENT.read_text().splitlines() if not line.startswith("#")]
    return {(path, function, operator, text): why for path, function, operator, text, why in rows}


def told_by(place: Place) -> tuple[str, str, str, str]:
    """What a place is called in the table of equivalents."""
    return place.path, place.function, place.operator, place.text


def report(chosen: list[Place], out: Callable[[str], None] = print) -> int:
    """Prints what is known of these places; the share that died of those that aren't equivalent, in percent."""
    verdicts, same = read_verdicts(), equivalents()
    alike = [place for place in chosen if told_by(place) in same]
    for place in alike:
        out(f"the same  {place.path}:{place.line}  {place.function}  [{place.operator}]  {same[told_by(place)]}")
    chosen = [place for place in chosen if place not in alike]
    known = [(p, verdicts[p.key]) for p in chosen if p.key in verdicts and verdicts[p.key].how != UNFIT]
    dead = sum(v.died for _, v in known)
    by_file: dict[str, list[bool]] = defaultdict(list)
    for place, verdict in known:
        by_file[place.path].append(verdict.died)
        if not verdict.died:
            out(f"survives  {place.path}:{place.line}  {place.function}  [{place.operator}]  {place.text}")
            out(f"          {verdict.tests} of {verdict.of} tests ran  {verdict.how}  {place.key}")
    for path, died in sorted(by_file.items()):
        out(f"{path:28} {sum(died):3} of {len(died):3}")
    percent = 100 * dead / max(1, len(known))
    out(f"{dead} of {len(known)} mutants died: {percent:.1f} %; {len(chosen) - len(known)} are not judged")
    out(f"{len(alike)} more change nothing that can be told (tests/mutants/equivalent.tsv); with these, as if they had "
        f"survived: {100 * dead / max(1, len(known) + len(alike)):.1f} %")  # fmt: skip
    return int(percent)


# ---------------------------------------------------------------- inside pytest


@dataclass
class Ran:
    """What one child did."""

    ended: list[tuple[str, str, float]] = field(default_factory=list)
    """Test, outcome and seconds, in order."""
    under_way: str = ""
    hung: bool = False
    results: Any = None


class Children:
    """Forked children that run tests of this session. They tell through a pipe, line by line."""

    def __init__(self, session: pytest.Session) -> None:
        self.items = {item.nodeid: item for item in session.items}
        self.temporary = Path(tempfile.mkdtemp(prefix="mutation-sweep-"))

    def start(self, nodes: list[str], prepare: Callable[[], None], each: Callable[[str], Any] | None) -> Child:
        return Child(self, nodes, prepare, each)

    def close(self) -> None:
        shutil.rmtree(self.temporary, ignore_errors=True)


class Child:
    """One of them. `prepare` is called in it before the first test, `each` after each test: its result is told."""

    def __init__(
        self, all_: Children, nodes: list[str], prepare: Callable[[], None], each: Callable[[str], Any] | None
    ) -> None:
        self.ran = Ran()
        self.begun = self.test_begun = time.monotonic()
        self.folder = Path(tempfile.mkdtemp(dir=all_.temporary))
        reading, writing = os.pipe()
        self._rest = b""
        self.pid = os.fork()
        if self.pid == 0:
            os.close(reading)
            self._live(all_, nodes, writing, prepare, each)
        os.close(writing)
        os.set_blocking(reading, False)
        self.fd = reading

    def _live(
        self,
        all_: Children,
        nodes: list[str],
        writing: int,
        prepare: Callable[[], None],
        each: Callable[[str], Any] | None,
    ) -> None:
        """In the child; never returns."""
        code = 1
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
            nothing = os.open(os.devnull, os.O_RDWR)
            for fd in (0, 1, 2):
                os.dup2(nothing, fd)
            os.environ["PYTEST_DEBUG_TEMPROOT"] = os.environ["TMPDIR"] = str(self.folder)
            tempfile.tempdir = None
            prepare()
            items = [all_.items[node] for node in nodes]

            def tell(**words: Any) -> None:
                os.write(writing, json.dumps(words).encode() + b"\n")

            for at, item in enumerate(items):
                tell(begins=item.nodeid)
                watch = _Outcome()
                item.config.pluginmanager.register(watch)
                begun = time.monotonic()
                following = items[at + 1] if at + 1 < len(items) else None
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                seconds = time.monotonic() - begun
                item.config.pluginmanager.unregister(watch)
                tell(ends=item.nodeid, outcome=watch.outcome, seconds=seconds, told=each(item.nodeid) if each else None)
                if each is None and watch.outcome == "failed":
                    break
            code = 0
        finally:
            os._exit(code)

    def poll(self) -> bool:
        """Takes in what it said; whether it has ended."""
        while True:
            try:
                data = os.read(self.fd, 1 << 20)
            except BlockingIOError:
                return False
            if not data:
                self._reap()
                return True
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                words = json.loads(line)
                if "begins" in words:
                    self.ran.under_way, self.test_begun = words["begins"], time.monotonic()
                else:
                    self.ran.ended.append((words["ends"], words["outcome"], words["seconds"]))
                    self.ran.under_way = ""
                    if words["told"] is not None:
                        self.ran.results = {**(self.ran.results or {}), words["ends"]: words["told"]}

    def kill(self) -> None:
        """With all that it started in its session's group."""
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(self.pid, signal.SIGKILL)
        self._reap()

    def _reap(self) -> None:
        if self.fd >= 0:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            os.close(self.fd)
            self.fd = -1
            shutil.rmtree(self.folder, ignore_errors=True)


class _Outcome:
    """Hears how a test went."""

    def __init__(self) -> None:
        self.outcome = "passed"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.outcome = "failed"
        elif report.skipped and self.outcome == "passed":
            self.outcome = "skipped"


class Sweep:
    """The plugin: what pytest would do with the collected tests is done here."""

    def __init__(self, options: argparse.Namespace, probes: Probes | None) -> None:
        self.options, self.probes = options, probes
        self.failed = 0

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            raise session.Interrupted("tests can't be collected")
        gc.collect()
        gc.freeze()
        children = Children(session)
        try:
            if self.probes is not None:
                self.map_all(children)
            else:
                self.judge_all(children)
        finally:
            children.close()
        return True

    # ------------------------------------------------------------ the map

    def map_all(self, children: Children) -> None:
        digests = {node: _digest_of(item.path) for node, item in children.items.items()}
        # Of files that weren't collected now, what is known stays.
        here = {node.split("::")[0] for node in children.items}
        stale = {n for n, run in read_map().items() if n.split("::")[0] in here and digests.get(n) != run.source}
        runs = {node: run for node, run in read_map().items() if node not in stale}
        if self.options.again:
            runs = {node: run for node, run in runs.items() if node not in digests}
        todo: dict[str, list[str]] = defaultdict(list)
        for node in children.items:
            if node not in runs:
                todo[node.split("::")[0]].append(node)
        print(f"{sum(map(len, todo.values()))} tests of {len(todo)} files to map, {len(runs)} are known", flush=True)
        end = time.monotonic() + 3600 * self.options.hours
        for file, nodes in todo.items():
            begun = time.monotonic()
            bad = self._map_file(children, nodes, digests, runs)
            write_map(runs)
            print(f"{file:60} {len(nodes):4} tests {time.monotonic() - begun:6.1f} s {' '.join(bad)}", flush=True)
            if time.monotonic() > end:
                print("out of time: say it again for the rest")
                return

    def _map_file(
        self, children: Children, nodes: list[str], digests: dict[str, str], runs: dict[str, TestRun]
    ) -> list[str]:
        assert self.probes is not None
        probes, bad, left = self.probes, [], list(nodes)

        def told(node: str) -> list[int]:
            hits = sorted(probes.hits)
            probes.hits.clear()
            return hits

        while left:
            child = children.start(left, probes.hits.clear, told)
            _wait(child, lambda _: 2 * TEST_S)
            for node, outcome, seconds in child.ran.ended:
                left.remove(node)
                if outcome != "passed":
                    bad.append(f"{outcome}: {node.split('::')[-1]}")
                    continue
                run = runs[node] = TestRun(seconds, digests[node])
                for probe in child.ran.results[node]:
                    function, statement = probes.probes[probe]
                    run.hits.setdefault("|".join(probes.functions[function]), []).append(statement)
            if child.ran.under_way:
                left.remove(child.ran.under_way)
                runs[child.ran.under_way] = TestRun(1e9, digests[child.ran.under_way])
                bad.append(f"too slow: {child.ran.under_way.split('::')[-1]}")
        return bad

    # ------------------------------------------------------------ the judging

    def judge_all(self, children: Children) -> None:
        runs, known = read_map(), read_verdicts()
        chosen = _wanted(self.options)
        if self.options.again:
            known = {key: verdict for key, verdict in known.items() if verdict.died}
        same = equivalents()
        todo = [place for place in chosen if place.key not in known and told_by(place) not in same]
        functions = _functions({place.path for place in chosen})
        # As they are now: who works on in these files doesn't disturb a sweep.
        texts = {place.path: (ROOT / place.path).read_text() for place in chosen}
        source = dict.fromkeys(children.items, "")
        end = time.monotonic() + 3600 * self.options.hours
        flaky: set[str] = set()
        under_way: list[Judging] = []
        print(f"{len(todo)} of {len(chosen)} mutants to judge", flush=True)
        while todo or under_way:
            while todo and len(under_way) < self.options.jobs and time.monotonic() < end:
                place = todo.pop(0)
                nodes = [n for n in judges(place, runs, source) if n not in flaky]
                judging = Judging(children, place, texts[place.path], nodes, runs, functions, flaky)
                judging.patience_s = self.options.patience
                under_way.append(judging)
            if not under_way:
                print("out of time: say it again for the rest")
                break
            select.select([j.child.fd for j in under_way if j.child is not None], [], [], 0.5)
            for judging in list(under_way):
                if (verdict := judging.go_on()) is not None:
                    under_way.remove(judging)
                    add_verdict(verdict)
                    p, word = judging.place, "died" if verdict.died else "SURVIVES"
                    print(
                        f"{word:8} {verdict.seconds:6.1f} s {verdict.tests:4} of {verdict.of:4}  {p.path}:{p.line} "
                        f"[{p.operator}] {p.text[:60]}  {verdict.by.split('/')[-1][:70]} {verdict.how}",
                        flush=True,
                    )


class Judging:
    """One mutant under judgement: a child with the break, then one without it for the test that noticed."""

    patience_s = 60.0
    """After so long no further test is begun for a mutant."""

    def __init__(
        self,
        children: Children,
        place: Place,
        text: str,
        nodes: list[str],
        runs: dict[str, TestRun],
        functions: dict[tuple[str, str, int], list[FunctionType]],
        flaky: set[str],
    ) -> None:
        self.children, self.place, self.nodes, self.runs, self.flaky = children, place, nodes, runs, flaky
        self.begun, self.tests, self.accused, self.how = time.monotonic(), 0, "", ""
        self.child: Child | None = None
        name, line, self.code = broken(place, text)
        self.targets = functions[str(ROOT / place.path), name, line]
        if not self.targets or any(f.__code__.co_freevars != self.code.co_freevars for f in self.targets):
            self.how = UNFIT
        elif nodes:
            self.child = children.start(nodes, self._break, None)
        else:
            self.how = "no test executes it"

    def _break(self) -> None:
        for function in self.targets:
            function.__code__ = self.code

    def go_on(self) -> Verdict | None:
        """The verdict, when there is one."""
        child = self.child
        if child is None:
            return self._verdict(died=False, how=self.how)
        ended = child.poll()
        now = time.monotonic()
        if not ended:
            node = child.ran.under_way
            allowed = 15.0 + 10 * (self.runs[node].seconds if node in self.runs else 1.0)
            if now - child.test_begun > allowed:
                child.kill()
                child.ran.hung = ended = True
            elif now - self.begun > self.patience_s and not self.accused:
                child.kill()
                self.tests = len(child.ran.ended)
                return self._verdict(died=False, how="out of time")
            else:
                return None
        if self.accused:
            return self._clean_run_ended(child)
        self.tests = len(child.ran.ended)
        failed = next((node for node, outcome, _ in child.ran.ended if outcome == "failed"), "")
        if not failed and not child.ran.under_way and self.tests == len(self.nodes):
            return self._verdict(died=False)
        self.accused = failed or child.ran.under_way or self.nodes[0]
        self.how = "" if failed else "hangs" if child.ran.hung else "ends the process"
        self.child = self.children.start([self.accused], lambda: None, None)
        return None

    def _clean_run_ended(self, child: Child) -> Verdict | None:
        if child.ran.ended and child.ran.ended[0][1] == "passed":
            return self._verdict(died=True, how=self.how)
        print(f"flaky, no longer asked: {self.accused}", flush=True)
        self.flaky.add(self.accused)
        self.nodes = [n for n in self.nodes if n not in self.flaky]
        self.accused = ""
        self.child = self.children.start(self.nodes, self._break, None) if self.nodes else None
        return None

    def _verdict(self, *, died: bool, how: str = "") -> Verdict:
        seconds = time.monotonic() - self.begun
        by = self.accused if died else ""
        return Verdict(self.place.key, died, by, how, self.tests, len(self.nodes), seconds, asdict(self.place))


def _wait(child: Child, allowed: Callable[[str], float]) -> None:
    while not child.poll():
        select.select([child.fd], [], [], 0.5)
        if time.monotonic() - child.test_begun > allowed(child.ran.under_way):
            child.kill()
            return


def _functions(paths: set[str]) -> dict[tuple[str, str, int], list[FunctionType]]:
    """All live functions of these files, by file, qualified name and first line. Modules are imported by the links of
    the package's folder."""
    files, real = {str(ROOT / path) for path in paths}, cache(os.path.realpath)
    found: dict[tuple[str, str, int], list[FunctionType]] = defaultdict(list)
    for thing in _everything():
        code = thing.__code__
        if (file := real(code.co_filename)) in files:
            found[file, code.co_qualname, code.co_firstlineno].append(thing)
    return found


def _everything() -> Iterator[FunctionType]:
    gc.unfreeze()
    yield from (thing for thing in gc.get_objects() if isinstance(thing, FunctionType))
    gc.freeze()


def _digest_of(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()[:12]


def _wanted(options: argparse.Namespace) -> list[Place]:
    targets = tuple(path for path in TARGETS if (ROOT / path).exists())
    chosen = chosen_places(options.count, options.seed, targets)
    return [p for p in chosen if not options.only or p.path.startswith(options.only) or p.key == options.only]


def run_pytest(options: argparse.Namespace, probes: Probes | None) -> int:
    hypothesis.settings.register_profile("sweep", database=None, derandomize=True, deadline=None)
    hypothesis.settings.load_profile("sweep")
    tests = options.tests or [path for path in TESTS if (ROOT / path).exists()]
    words = ["-p", "no:cacheprovider", "-p", "no:xdist", "-qq", "--capture=no", "-m", "not soak"]
    return int(pytest.main([f"--rootdir={ROOT}", *words, *tests], [Sweep(options, probes), _Xdist()]))


class _Xdist:
    """tests/conftest.py has a hook of pytest-xdist, which is not loaded here."""

    def pytest_addhooks(self, pluginmanager: pytest.PytestPluginManager) -> None:
        from xdist import newhooks

        pluginmanager.add_hookspecs(newhooks)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description="Break product code place by place, and see whether a test notices."
    )
    parser.add_argument("what", nargs="?", default="all", choices=("all", "places", "map", "judge", "report", "keep"))
    parser.add_argument("--count", type=int, default=400, help="mutants")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="mutants at a time")
    parser.add_argument("--hours", type=float, default=4.0, help="stop after so long; what is known is kept")
    parser.add_argument("--patience", type=float, default=60.0, help="seconds of tests that a mutant is worth")
    parser.add_argument("--only", default="", help="files that begin so, or one mutant's key")
    parser.add_argument("--tests", nargs="+", default=[], help="only these tests (for map)")
    parser.add_argument("--again", action="store_true", help="map: all tests; judge: survivors too")
    options = parser.parse_args(words)
    if options.what == "all":
        # The map's process has probes in its modules: the judge must be another.
        script = [sys.executable, str(Path(__file__).resolve())]
        if status := os.spawnv(os.P_WAIT, sys.executable, [*script, "map", "--hours", str(options.hours)]):
            return status
        options.what = "judge"
    if options.what == "places":
        for place in _wanted(options):
            print(f"{place.key}  {place.path}:{place.line}  {place.function}  [{place.operator}]  {place.text}")
        return 0
    if options.what == "keep":
        keep_verdicts(_wanted(options))
        return 0
    status = 0
    if options.what == "map":
        probes = Probes([path for path in TARGETS if (ROOT / path).exists()])
        probes.install()
        return 0 if run_pytest(options, probes) in (0, 5) else 1
    if options.what == "judge":
        status = run_pytest(options, None)
    percent = report(_wanted(options))
    return int(status not in (0, 5) or percent < 90)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
