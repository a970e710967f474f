"""The KV events of a prefill and a decode worker against what their trees hold, while requests come and pages go."""

from __future__ import annotations

import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.served_cluster import ROOT, environment
from tests.support.worker_pair import Pair, pair
from tests.support.worker_parts import manager_of
from twinpool.cache.manager.kv_cache_manager import KVCacheManager
from twinpool.cache.manager.tier_set import NoEvents
from twinpool.cache.prefix_cache.tree_node import IN_TREE, Tier, TokenPrefix, TreeNode, token_ids
from twinpool.cache.tiers.kv_event_publisher import KVEventLog, KVEventRecorder
from twinpool.cluster.assembly.build_parts import event_rank
from twinpool.contracts.block_hash import block_hashes
from twinpool.contracts.clock import SystemClock
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.errors import ConfigError
from twinpool.contracts.ids import Role, WorkerName
from twinpool.contracts.messages.kv_events import BlockRemoved, BlockStored, KvEvent, decode_batch
from twinpool.contracts.messages.kv_events import EventMedium as Medium
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.router.kv_indexer.event_replay import BlockEntry, KVIndex
from twinpool.router.kv_indexer.kv_event_subscriber import KVEventSubscriber

PAGE = 16
LOOPBACK = "tcp://127.0.0.1:0"
MEDIA = {Tier.DEVICE: Medium.DEVICE, Tier.HOST: Medium.HOST}
SALTS = ("", "red", "blue")


def events(**more: Any) -> dict[str, Any]:
    return {"endpoint": LOOPBACK, "replay_endpoint": LOOPBACK, **more}


def managers(both: Pair) -> list[KVCacheManager]:
    return [manager_of(both.prefill), manager_of(both.decode)]


def publisher_of(manager: KVCacheManager) -> Any:
    assert isinstance(manager.tiers.events, KVEventRecorder)
    return manager.tiers.events.publisher


def follow(manager: KVCacheManager) -> KVEventSubscriber:
    publisher = publisher_of(manager)
    return KVEventSubscriber(publisher.endpoint, SystemClock(), publisher.replay_endpoint, "kv-events")


@contextmanager
def following(both: Pair) -> Iterator[list[KVEventSubscriber]]:
    with ExitStack() as stack:
        yield [stack.enter_context(follow(manager)) for manager in managers(both)]


def held(manager: KVCacheManager) -> dict[Medium, dict[bytes, BlockEntry]]:
    """What a tree holds, walked from its roots, with the keys hashed anew from the tokens and the salt."""
    found: dict[Medium, dict[bytes, BlockEntry]] = {MEDIA[tier]: {} for tier in IN_TREE}
    for salt, root in manager.tree.accounts.roots.items():
        stack: list[tuple[TreeNode, list[int]]] = [(child, []) for child in root.children.values()]
        while stack:
            node, above = stack.pop()
            tokens = above + token_ids(node.raw)
            keys = block_hashes(tokens, PAGE, salt)
            stack += [(child, tokens) for child in node.children.values()]
            for tier in IN_TREE:
                if manager.full in node.parts[tier]:
                    for page in range(len(above) // PAGE, len(keys)):
                        entry = BlockEntry(
                            keys[page - 1] if page else None, tuple(tokens[page * PAGE : (page + 1) * PAGE])
                        )
                        found[MEDIA[tier]][keys[page]] = entry
    return found


def told(index: KVIndex) -> dict[Medium, dict[bytes, BlockEntry]]:
    return {medium: dict(index.pages[medium]) for medium in MEDIA.values()}


def catch_up(both: Pair, readers: list[KVEventSubscriber]) -> None:
    """Step and read until the readers know what the trees hold."""
    deadline = time.monotonic() + 60
    while True:
        both.step()
        for reader in readers:
            reader.poll(0.001)
        pairs = list(zip(readers, managers(both), strict=True))
        if all(r.complete and told(r.index) == held(s) for r, s in pairs):
            return
        if time.monotonic() > deadline:
            for reader, manager in pairs:
                assert reader.complete
                assert told(reader.index) == held(manager)


def conversation(both: Pair, rng: random.Random, rounds: int, readers: list[KVEventSubscriber]) -> None:
    """Requests that share prefixes in part, under several salts."""
    stems = [[rng.randrange(300) for _ in range(rng.randrange(20, 120))] for _ in range(4)]
    for _ in range(rounds):
        asked = []
        for _ in range(3):
            stem = rng.choice(stems)
            prompt = stem[: rng.randrange(8, len(stem))] + [rng.randrange(300) for _ in range(rng.randrange(1, 40))]
            sampling = SamplingParams(max_tokens=rng.randrange(1, 24), temperature=0.0)
            asked.append(both.submit(prompt, sampling, salt=rng.choice(SALTS)))
        both.run(*asked)
        for reader in readers:
            reader.poll()


SMALL: dict[str, Any] = {"device_tokens": 640, "host_bytes": 1 << 19}


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["through", "selective", "back"])
def test_events_say_exactly_what_the_trees_hold(model: Path, policy: str) -> None:
    cache = SMALL | {"write_policy": policy, "load_back": "always", "events": events()}
    with pair(model, tokens=640, cache=cache) as both, following(both) as readers:
        rng = random.Random(5)
        for _ in range(3):
            conversation(both, rng, 6, readers)
            both.settle()
            catch_up(both, readers)
        assert all(any(index.pages[Medium.DEVICE]) for index in (r.index for r in readers))
        prefill = both.prefill.status().counters
        assert prefill["pages_evicted"], "the device was too small for everything"
        assert readers[0].index.pages[Medium.HOST]
        assert [r.lost + r.damaged + r.restarts for r in readers] == [0, 0]


@pytest.mark.slow
def test_a_late_joiner_gets_what_is_there_also_when_the_batches_are_gone(model: Path) -> None:
    cache = SMALL | {"events": events(buffer_batches=3)}
    with pair(model, tokens=640, cache=cache) as both:
        rng = random.Random(6)
        conversation(both, rng, 8, [])
        both.settle()
        with following(both) as readers:
            catch_up(both, readers)
            conversation(both, rng, 3, readers)
            both.settle()
            catch_up(both, readers)
            assert all(r.lost for r in readers), "they came too late for the batches, and got the truth"


@pytest.mark.slow
def test_what_is_written_to_storage_is_told(model: Path, tmp_path: Path) -> None:
    storage = {"backend": "file", "path": str(tmp_path)}
    cache = {"host_bytes": 1 << 20, "storage": storage, "events": events()}
    with pair(model, tokens=2048, cache=cache) as both, following(both) as readers:
        conversation(both, random.Random(7), 4, readers)
        deadline = time.monotonic() + 60
        while any(manager.busy for manager in managers(both)):
            assert time.monotonic() < deadline
            both.step()
        both.settle()
        catch_up(both, readers)
        for reader, manager in zip(readers, managers(both), strict=True):
            stored = reader.index.pages[Medium.STORAGE]
            assert stored
            assert stored == held(manager)[Medium.HOST], "all that is on the host was written, and nothing else"


def test_the_same_tokens_under_two_salts_are_pages_of_their_own(model: Path) -> None:
    with pair(model, cache={"events": events()}) as both, following(both) as readers:
        prompt, heard = list(range(2 * PAGE)), recording(managers(both)[0])
        for salt in SALTS:
            both.run(both.submit(prompt, SamplingParams(max_tokens=2, temperature=0.0), salt=salt))
        catch_up(both, readers)
        first = [key for key, entry in readers[0].index.pages[Medium.DEVICE].items() if entry.parent is None]
        assert sorted(first) == sorted(block_hashes(prompt, PAGE, salt)[0] for salt in SALTS)
        stored = {event.salt: list(event.hashes) for event in heard if isinstance(event, BlockStored)}
        assert stored == {salt: block_hashes(prompt, PAGE, salt) for salt in SALTS}


def recording(manager: KVCacheManager) -> list[KvEvent]:
    """What the KV cache manager's event recorder is told from now on."""
    assert isinstance(manager.tiers.events, KVEventRecorder)
    found: list[KvEvent] = []
    log = manager.tiers.events._log
    assert isinstance(log, KVEventLog)
    emit = log.emit

    def both(event: KvEvent) -> None:
        found.append(event)
        emit(event)

    log.emit = both  # type: ignore[method-assign]
    return found


def test_parents_are_told_before_their_children_and_a_split_tells_nothing(model: Path) -> None:
    greedy = SamplingParams(max_tokens=2, temperature=0.0)
    with pair(model, cache={"events": events()}) as both, following(both) as readers:
        prefill = managers(both)[0]
        heard = recording(prefill)
        long = list(range(6 * PAGE))
        both.run(both.submit(long, greedy))
        before = len(heard)
        both.run(both.submit([*long[: 3 * PAGE], *range(200, 200 + 2 * PAGE)], greedy))
        assert len(prefill.tree.walked(TokenPrefix.of(long, PAGE))) == 2, "the first node was cut"
        assert [type(e) for e in heard[before:]] == [BlockStored], "only the new branch is told"
        known: set[bytes | None] = {None}
        for event in heard:
            assert isinstance(event, BlockStored)
            assert event.parent in known
            known.update(event.hashes)
        catch_up(both, readers)


def test_parents_come_first_also_where_one_insert_brings_several_nodes(model: Path) -> None:
    """Both went from the device and are on the host still; computed again, they come back with one prompt."""
    greedy = SamplingParams(max_tokens=1, temperature=0.0)
    cache = {"host_bytes": 1 << 20, "load_back": "never", "events": events()}
    with pair(model, cache=cache) as both, following(both) as readers:
        manager = managers(both)[0]
        prompt, other = list(range(6 * PAGE)), [*range(3 * PAGE), *range(200, 200 + PAGE)]
        both.run(both.submit(prompt, greedy))
        both.run(both.submit(other, greedy))
        catch_up(both, readers)
        heard = recording(manager)
        assert manager.supply.evict(manager.full, manager.tree.accounts.sizes[Tier.DEVICE, manager.full])
        assert len(manager.tree.walked(TokenPrefix.of(prompt, PAGE))) == 2
        removed = [key for event in heard if isinstance(event, BlockRemoved) for key in event.hashes]
        assert sorted(removed) == sorted({*block_hashes(prompt, PAGE), *block_hashes(other, PAGE)})
        heard.clear()
        both.run(both.submit(prompt, greedy))
        stored = [event for event in heard if isinstance(event, BlockStored) and event.tier is Medium.DEVICE]
        assert [key for event in stored for key in event.hashes] == block_hashes(prompt, PAGE)
        assert len(stored) == 2
        catch_up(both, readers)


@pytest.mark.slow
def test_invalidated_pages_are_told_as_gone_though_a_request_still_reads_them(model: Path) -> None:
    greedy = SamplingParams(max_tokens=30, temperature=0.0)
    with pair(model, cache={"host_bytes": 1 << 20, "events": events()}) as both, following(both) as readers:
        prefill, decode = managers(both)
        prompt = list(range(4 * PAGE))
        first = both.submit([*prompt, 7], greedy)
        both.run(first)
        running = both.submit([*prompt, 8], greedy)
        while len(both.answers[running].tokens) < 2:
            both.step()
        heard = recording(decode)
        assert decode.tree.accounts.protected[Tier.DEVICE, decode.full], "a request reads them"
        assert decode.finished.invalidate(TokenPrefix.of(prompt, PAGE), 1)
        assert decode.tree.accounts.invalidated
        keys = block_hashes(prompt, PAGE)
        gone = {key for event in heard if isinstance(event, BlockRemoved) for key in event.hashes}
        assert gone >= set(keys[1:])
        assert keys[0] not in gone
        catch_up(both, readers)
        truth = KVIndex()
        assert isinstance(decode.tiers.events, KVEventRecorder)
        truth.apply(decode.tiers.events._truth())
        assert told(truth) == held(decode), "who joins now isn't told of them either"
        # The same pages come anew while the invalidated ones are still read; their end isn't told again.
        both.run(both.submit([*prompt, 9], SamplingParams(max_tokens=2, temperature=0.0)))
        both.run(running)
        both.settle()
        assert not decode.tree.accounts.invalidated
        catch_up(both, readers)
        prefill.finished.invalidate(TokenPrefix.of(prompt, PAGE))
        catch_up(both, readers)
        assert not set(keys) & set(readers[0].index.pages[Medium.DEVICE])


def test_without_an_endpoint_nothing_listens_and_nothing_is_kept(model: Path) -> None:
    with pair(model) as both:
        both.run(both.submit(list(range(40)), SamplingParams(max_tokens=2, temperature=0.0)))
        for manager in managers(both):
            assert isinstance(manager.tiers.events, NoEvents)
            manager.tree.accounts.observe_nodes(lambda *_: None)  # It takes one observer, and has none.


def test_a_replay_endpoint_without_an_endpoint_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"set cache\.events\.endpoint too"):
        config_from_dict({"cache": {"events": {"replay_endpoint": LOOPBACK}}})


def test_a_batch_bears_the_rank_that_is_added_to_the_port(model: Path) -> None:
    names = [(Role.PREFILL, 0), (Role.DECODE, 0), (Role.PREFILL, 1), (Role.DECODE, 1)]
    assert [event_rank(role, WorkerName(f"{role}-{number}")) for role, number in names] == [0, 1, 2, 3]
    with pair(model, cache={"events": events()}) as both:
        both.run(both.submit(list(range(40)), SamplingParams(max_tokens=2, temperature=0.0)))
        both.settle()
        assert [decode_batch(publisher_of(s)._buffer[-1][1]).rank for s in managers(both)] == [0, 1]


@pytest.mark.slow
def test_what_the_page_for_operators_shows_works(model: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "operating" / "tune.md").read_text()
    plain, reader = re.findall(r"^```py\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    with pair(model, cache={"events": events()}) as both:
        publisher, rng = publisher_of(managers(both)[0]), random.Random(8)
        shown = {}
        for text in (plain, reader):
            code = text.replace("tcp://127.0.0.1:5557", publisher.endpoint)
            code = code.replace("tcp://127.0.0.1:5657", publisher.replay_endpoint)
            command, env = [sys.executable, "-c", code], environment(tmp_path)
            with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as process:
                deadline = time.monotonic() + 60
                try:
                    while process.poll() is None:
                        assert time.monotonic() < deadline, "it doesn't end"
                        conversation(both, rng, 1, [])
                        both.step()
                finally:
                    process.kill()
                assert process.returncode == 0
                assert process.stdout is not None
                shown[text] = process.stdout.read()
        assert re.match(r"\d+ 0 BlockStored \['[0-9a-f]{32}'", shown[plain]), shown
        assert re.match(r"{'device': [1-9]\d*, 'host': 0, 'storage': 0}", shown[reader]), shown
