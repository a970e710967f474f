"""A seat's state: pools, tree and tiers, as the workers see them.

A request's way through it:

    prefetch   queued: what storage has of its prefix starts to come to the host
    claim      admitted: lock what the tiers have, lease the rest, all pools or none; loads are planned
    launch     the loads of all claims of this round begin, layer by layer; forward passes wait at the gates
    seal       a step was committed: finished pages get their digests
    share      finished pages go into the tree, and from there down the tiers
    slide      pages that the window has left go back
    snapshot   the recurrent state is copied aside at a page boundary, for the tree
    release    the one way out: locks, pages, slots and snapshots go back, whatever happened

`poll` takes in what has completed; it never waits. Only committed positions may be sealed, shared or snapshotted.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from cache.claim import NO_PAGE, Cached, Claim, Run, Snapshot
from cache.device import DEVICE, Completion, Device, Op, Span, Stream, attempt, failure
from cache.due import due, missing
from cache.eviction import POLICIES
from cache.launched import Launched
from cache.leases import Lease
from cache.loading import Loader
from cache.moves import Move, Part, copy_state
from cache.nodes import Lock, Node, Offer, Tier
from cache.pools import PoolSet
from cache.prefetch import Agree, Prefetch, Prefetcher
from cache.prefix import Prefix
from cache.registry import Kind
from cache.saving import Saver
from cache.storage import Queue
from cache.telling import Teller
from cache.tree import Match, PrefixTree
from contracts.config import CacheConfig
from contracts.errors import CapacityError

_log = logging.getLogger("twinpool.cache")
_SNAPSHOTS = 2
"""Snapshots of a request that aren't in the tree yet: they alternate."""


class Seat:
    """See the module's prose. Single-threaded. `now` is in seconds, `wall` in seconds since 1970."""

    def __init__(
        self,
        pools: PoolSet,
        device: Device,
        config: CacheConfig,
        now: Callable[[], float],
        *,
        host: PoolSet | None = None,
        storage: Queue | None = None,
        fingerprint: str = "",
        agree: Agree = lambda key, value: value,
        wall: Callable[[], float] = time.time,
        rank: int = 0,
    ) -> None:
        self.pools, self.host, self.config = pools, host, config
        self._device, self._now, self._storage = device, now, storage
        self.spec = pools.spec
        self.full = self.spec.full.name
        self.tree = PrefixTree(
            self.spec, POLICIES[config.eviction], write_back=host is not None and config.write_policy == "back"
        )
        self._runs = [p.name for p in self.spec.pools if p.kind is not Kind.STATE]
        self._slots = [p.name for p in self.spec.pools if p.kind is Kind.STATE]
        self._digester = pools.digester
        self._claims: dict[Lock, Claim] = {}
        self._fresh: list[Claim] = []
        self._launched = Launched()
        self.saver = self.loader = self.prefetcher = None
        if host is not None:
            self.saver = Saver(self.tree, pools, host, device, storage, fingerprint, config.move_chunk_bytes)
            self.loader = Loader(self.tree, pools, host, device, now, config.verify)
            if storage is not None:
                self.prefetcher = Prefetcher(self.tree, host, storage, fingerprint, config.prefetch, now, agree)
        events = config.events
        self.teller = Teller(self.tree, events, wall, rank) if events.endpoint else None
        if self.teller is not None:
            _log.info("KV events at %s", self.teller.publisher.endpoint)
        self._tokens_per_s = 0.0
        self.counters = {"pages_evicted": 0.0, "pages_condemned": 0.0, "loads_skipped": 0.0}

    # ------------------------------------------------------------ admission

    def prefetch(self, prefix: Prefix) -> Prefetch | None:
        """Start to bring what storage has of `prefix` to the host; None where there is nothing to wait for."""
        if self.prefetcher is None or not len(prefix):
            return None
        if self.saver is not None:
            # What comes from storage hangs below what is there, so that must be on the host as well.
            self.saver.save(self.tree.match(prefix).path)
        return self.prefetcher.start(prefix)

    def may_run(self, prefetch: Prefetch) -> bool:
        """Whether a request need not wait for its prefetch any longer, by the stop policy."""
        return self.prefetcher is None or self.prefetcher.may_run(prefetch)

    def due(self, prefetch: Prefetch) -> float | None:
        """When `may_run` changes although nothing arrives."""
        return self.prefetcher.deadline(prefetch) if self.prefetcher is not None else None

    def stop(self, prefetch: Prefetch) -> None:
        """Its request is gone, or has claimed what it wanted. Idempotent."""
        if self.prefetcher is not None:
            self.prefetcher.release(prefetch)

    def claim(
        self, prefix: Prefix, positions: int, owner: str, *, reusable: int, prefetch: Prefetch | None = None
    ) -> Claim | None:
        """Take state for `positions` positions: at most `reusable` pages of `prefix` from the tiers, the rest leased.

        All pools or none: None when there isn't room now, with nothing taken.
        """
        match = self.tree.match(prefix.head(reusable))
        tier = Tier.HOST if self._worth_loading(match) else Tier.DEVICE
        lock = self.tree.lock(match, owner, tier=tier)
        depth = match.depth if tier is Tier.HOST else match.device_depth
        loads = self._loads(lock)
        own = {pool: self.pools.pages_for(positions) - depth for pool in self._runs} | dict.fromkeys(self._slots, 1)
        if (
            not self._may_load(loads)
            or (leases := self._lease({pool: own[pool] + loads[pool] for pool in own}, owner)) is None
        ):
            self.tree.unlock(lock)
            return None
        self._plan(lock, loads, leases)
        loaded = depth - match.device_depth
        stored = min(loaded, prefetch.gained) if prefetch is not None else 0
        if prefetch is not None:
            self.stop(prefetch)
        size = self.spec.page_tokens
        cached = Cached((depth - loaded) * size, (loaded - stored) * size, stored * size)
        return self._open(Claim(owner, prefix, lock, depth, cached), leases)

    def _open(self, claim: Claim, leases: Mapping[str, Lease]) -> Claim:
        for pool in self._runs:
            claim.tables[pool], claim.epochs[pool] = [NO_PAGE] * claim.depth, [0] * claim.depth
            claim.digests[pool] = [None] * claim.depth
            for part in claim.lock.of(pool):
                if part.tier is Tier.DEVICE:
                    start = self.tree.start(part.node)
                    claim.put(pool, start, part.lease.indices, part.lease.epochs)
                    claim.digests[pool][start : start + len(part)] = part.digests
            claim.put(pool, claim.depth, leases[pool].indices, leases[pool].epochs)
            claim.runs[pool] = [Run(claim.depth, leases[pool])]
        claim.slots = {pool: leases[pool] for pool in self._slots}
        self._claims[claim.lock] = claim
        self._fresh.append(claim)
        return claim

    # ------------------------------------------------------------ hand-over to this seat

    def reserve(self, prefix: Prefix, prompt: int, positions: int, owner: str) -> tuple[Claim, dict[str, Lease]] | None:
        """Take state for a prompt of `prompt` positions that is handed over, and for `positions` in all.

        What the tree has on the device is kept, component by component; the leases are for what `lacking` names and
        for the answer, in that order, and belong to whoever receives until `adopt`. None without room.
        """
        wanted = due(self.spec, prompt)
        lock, held = self.tree.hold(prefix, wanted, owner, host=self.loader is not None and self._may_load_back)
        loads = self._loads(lock)
        lacking = missing(wanted, held)
        more = self.pools.pages_for(positions) - self.pools.pages_for(prompt)
        needs = {pool: len(lacking[pool]) + more for pool in self._runs} | dict.fromkeys(self._slots, 1)
        leases = (
            self._lease({pool: n + loads[pool] for pool, n in needs.items()}, owner) if self._may_load(loads) else None
        )
        if leases is None:
            self.tree.unlock(lock)
            return None
        self._plan(lock, loads, leases)
        depth = lacking[self.full].start
        size = self.spec.page_tokens
        from_host = min(loads[self.full], depth) * size
        cached = Cached(min(prompt, depth * size - from_host), from_host)
        claim = Claim(owner, prefix, lock, depth, cached, lacking=lacking)
        for pool in self._runs:
            self._enter_held(claim, pool, wanted[pool])
        self._claims[lock] = claim
        return claim, leases

    def _enter_held(self, claim: Claim, pool: str, wanted: range) -> None:
        claim.tables[pool], claim.epochs[pool], claim.digests[pool], claim.runs[pool] = [], [], [], []
        for part in (p for p in claim.lock.of(pool) if p.tier is Tier.DEVICE):
            start = self.tree.start(part.node)
            for number, index, epoch in zip(
                range(start, start + len(part)), part.lease.indices, part.lease.epochs, strict=True
            ):
                if number in wanted and number not in claim.lacking[pool]:
                    claim.put(pool, number, [index], [epoch])

    def adopt(
        self, claim: Claim, prompt: int, leases: Mapping[str, Lease], digests: Mapping[str, Mapping[int, int]]
    ) -> None:
        """Everything that was lacking has come into `leases`, verified, with these `digests` by pool and number."""
        whole = prompt // self.spec.page_tokens
        for pool in self._runs:
            lacking, lease = claim.lacking[pool], leases[pool]
            received = lease.split(len(lacking), claim.owner)
            for first, part in ((lacking.start, received), (self.pools.pages_for(prompt), lease)):
                claim.put(pool, first, part.indices, part.epochs)
                claim.runs[pool].append(Run(first, part))
            known = {**self._held_digests(claim, pool), **digests.get(pool, {})}
            claim.digests[pool] = [known.get(n) if claim.tables[pool][n] != NO_PAGE else None for n in range(whole)]
        for pool in self._slots:
            claim.slots[pool] = leases[pool]
            if not claim.lacking[pool]:
                self._start_slot(claim, pool)

    def _held_digests(self, claim: Claim, pool: str) -> dict[int, int]:
        starts = [(self.tree.start(part.node), part) for part in claim.lock.of(pool) if part.tier is Tier.DEVICE]
        return {start + i: digest for start, part in starts for i, digest in enumerate(part.digests)}

    # ------------------------------------------------------------ room

    def _worth_loading(self, match: Match) -> bool:
        """Whether what the host has below the device's anchor is loaded, rather than computed again."""
        below, policy = match.depth - match.device_depth, self.config.load_back
        if self.loader is None or not below or policy == "never":
            return False
        if policy == "always" or not self._tokens_per_s or not self.loader.bytes_per_s:
            return True
        size = sum(self.spec.unit_bytes(pool) for pool in self._runs)
        worth = below * size / self.loader.bytes_per_s < below * self.spec.page_tokens / self._tokens_per_s
        self.counters["loads_skipped"] += not worth
        return worth

    @property
    def _may_load_back(self) -> bool:
        return self.config.load_back != "never"

    def _loads(self, lock: Lock) -> Counter[str]:
        """Pages (and slots) that must come from the host before what `lock` keeps can be used."""
        loads = Counter[str]()
        for part in self.loader.missing(lock) if self.loader is not None else ():
            loads[part.component] += len(part)
        return loads

    def _plan(self, lock: Lock, loads: Counter[str], leases: Mapping[str, Lease]) -> None:
        """Let them come into the first pages of `leases`."""
        if self.loader is not None and loads:
            self.loader.plan(lock, {pool: leases[pool].split(count, lock.owner) for pool, count in loads.items()})

    def _may_load(self, loads: Counter[str]) -> bool:
        """Whether loads under way leave room for these; the first one always may."""
        if self.loader is None or not loads:
            return True
        nbytes = sum(count * self.spec.unit_bytes(pool) for pool, count in loads.items())
        return not self.loader.nbytes or self.loader.nbytes + nbytes <= self.config.load_bytes

    def _lease(self, needs: Mapping[str, int], owner: str) -> dict[str, Lease] | None:
        """All of `needs` or nothing; what the tree can spare makes room."""
        leases: dict[str, Lease] = {}
        for pool, count in needs.items():
            allocator = self.pools.allocators[pool]
            if count > allocator.free:
                self.counters["pages_evicted"] += self.evict(pool, count - allocator.free)
            try:
                leases[pool] = allocator.lease(count, owner)
            except CapacityError:
                for lease in leases.values():
                    lease.release()
                return None
        return leases

    def evict(self, pool: str, count: int) -> int:
        """Free up to `count` pages or slots of the device that only the tree holds; returns how many."""
        return self.tree.evict(Tier.DEVICE, pool, count, self._spill if self.tree.write_back else None)

    def _spill(self, node: Node) -> bool:
        assert self.saver is not None
        return self.saver.save([node]) and self.full not in node.parts[Tier.HOST]

    def launch(self) -> None:
        """Begin the loads of all claims since the last call, and put their recurrent states into their slots."""
        if self.loader is not None:
            self.loader.launch()
        fresh, self._fresh = self._fresh, []
        for claim in fresh:
            if not claim.released:
                for pool in self._slots:
                    self._start_slot(claim, pool)

    def _start_slot(self, claim: Claim, pool: str) -> None:
        (slot,) = claim.slots[pool].indices
        snapshots = [p for p in claim.lock.of(pool) if p.tier is Tier.DEVICE]
        if not snapshots:
            op = Op("zero slot", Stream.COMPUTE, writes=(Span(DEVICE, pool, (slot,)),))
            claim.started.append(attempt(self._device, op, lambda: self.pools.zero({pool: (slot,)})))
            return
        after = self.loader.completions(claim.lock) if self.loader is not None else []
        claim.started.append(self._copy_slot(pool, snapshots[0].lease.indices[0], slot, after))

    def _copy_slot(self, pool: str, source: int, target: int, after: Sequence[Completion] = ()) -> Completion:
        """On the stream of the forward passes: whatever touches a slot does so in their order."""
        op = Op("copy slot", Stream.COMPUTE, (Span(DEVICE, pool, (source,)),), (Span(DEVICE, pool, (target,)),))
        move, region, layout = Move((Part(pool, (source,), (target,)),)), self.pools.region, self.pools.layout
        return attempt(self._device, op, lambda: copy_state(move, region, layout, region, layout), after)

    # ------------------------------------------------------------ progress

    def poll(self) -> list[Claim]:
        """Take in what has completed; returns claims that relied on state which turned out damaged."""
        if self.teller is not None:
            self.teller.round()
        if self.saver is not None:
            self.saver.poll()
        if self.prefetcher is not None:
            self.prefetcher.poll()
        self._launched.sweep()
        betrayed = [c for c in self._claims.values() if not c.betrayed and _failed(c.started)]
        relied = [self._claims.get(lock) for lock in (self.loader.poll() if self.loader is not None else ())]
        betrayed += [c for c in dict.fromkeys(relied) if c is not None and not c.betrayed and c not in betrayed]
        for claim in betrayed:
            claim.betrayed = True
        return betrayed

    def settled(self, claim: Claim) -> bool:
        """Whether everything that was loaded for it has come and is what it should be: its steps may be committed."""
        if not all(c.done for c in claim.started) or _failed(claim.started):
            return False
        return not claim.betrayed and (self.loader is None or not self.loader.under_way(claim.lock))

    def completions(self, claim: Claim) -> list[Completion]:
        """What must be complete before its pages may be read without going through a gate."""
        return self.loader.completions(claim.lock) if self.loader is not None else []

    def computed(self, tokens: int, seconds: float) -> None:
        """Tell how fast a step was: it decides whether loading is worth it."""
        if seconds > 0:
            rate = tokens / seconds
            self._tokens_per_s = rate if not self._tokens_per_s else 0.8 * self._tokens_per_s + 0.2 * rate

    def stats(self) -> dict[str, float]:
        """Counters of everything that happened in the tiers, and how full they are."""
        out = dict(self.counters)
        for part in (self.saver, self.loader, self.prefetcher):
            out |= part.counters if part is not None else {}
        if self.host is not None:
            allocator = self.host.allocators[self.full]
            out |= {"host_pages_total": allocator.total, "host_pages_used": allocator.total - allocator.free}
        return out

    # ------------------------------------------------------------ what a committed step leaves

    def seal(self, finished: Sequence[tuple[Claim, int]]) -> None:
        """Digest the pages that are whole at these committed lengths (positions) and weren't before."""
        size = self.spec.page_tokens
        for pool in self._runs:
            todo: list[tuple[Claim, int]] = []
            for claim, committed in finished:
                digests, table = claim.digests[pool], claim.tables[pool]
                first = len(digests)
                digests += [None] * max(0, committed // size - first)
                todo += [(claim, page) for page in range(first, len(digests)) if table[page] != NO_PAGE]
            indices = [claim.tables[pool][page] for claim, page in todo]
            firsts = [page * size for _, page in todo]
            self._device.touch("seal", reads=[Span(DEVICE, pool, indices)])
            found = self._digester.digest(self.pools.region, pool, indices, firsts, [at + size for at in firsts])
            for (claim, page), digest in zip(todo, found, strict=True):
                claim.digests[pool][page] = digest

    def tail(self, claim: Claim, committed: int) -> dict[str, int]:
        """The digests of the last, partly filled page at `committed` positions, by pool; empty at a page boundary."""
        size = self.spec.page_tokens
        page = committed // size
        if committed % size == 0:
            return {}
        return {
            pool: self._digester.digest(
                self.pools.region, pool, [claim.tables[pool][page]], [page * size], [committed]
            )[0]
            for pool in self._runs
        }

    def share(self, claim: Claim, prefix: Prefix, priority: int = 0) -> None:
        """Give the tree the sealed pages of `prefix` that it lacks, and its snapshots; the claim keeps them locked."""
        assert not claim.betrayed, "what was computed from damaged state is nobody's to share"
        sealed = min(len(prefix), len(claim.digests[self.full]))
        prefix = prefix.head(sealed)
        offers: dict[str, list[Offer]] = {pool: self._run_offers(claim, pool, sealed) for pool in self._runs}
        offers |= {pool: self._snapshot_offers(claim, pool, sealed) for pool in self._slots}
        self.tree.insert(prefix, offers, Tier.DEVICE, priority)
        for pool in self._runs:
            claim.runs[pool] = [run for old in claim.runs[pool] for run in _regroup(old, claim.tables[pool])]
        for pool in self._slots:
            held = claim.snapshots.get(pool, [])
            claim.snapshots[pool] = [s for s in held if len(s.lease)]
            for taken in (s for s in held if not len(s.lease)):
                taken.lease.release()
        self._keep(claim, prefix)
        self._save([node for node, _ in self.tree.walked(prefix)])

    def _run_offers(self, claim: Claim, pool: str, sealed: int) -> list[Offer]:
        offers = []
        for run in claim.runs[pool]:
            digests = claim.digests[pool][run.first : min(run.end, sealed)]
            whole = [d for d in digests if d is not None]
            assert len(whole) == len(digests), f"a page of {pool} is neither sealed nor given back"
            if whole:
                offers.append(Offer(run.first, run.lease, whole))
        return offers

    def _snapshot_offers(self, claim: Claim, pool: str, sealed: int) -> list[Offer]:
        """Snapshots that are there: those under way wait for the next time, those that failed are nothing."""
        there = [s for s in claim.snapshots.get(pool, ()) if s.completion.done and s.depth <= sealed]
        there = [s for s in there if failure(s.completion) is None]
        ends = [s.depth * self.spec.page_tokens for s in there]
        slots = [s.lease.indices[0] for s in there]
        self._device.touch("seal slots", reads=[Span(DEVICE, pool, slots)])
        found = self._digester.digest(self.pools.region, pool, slots, ends, ends)
        return [Offer(s.depth, s.lease, (digest,)) for s, digest in zip(there, found, strict=True)]

    def _keep(self, claim: Claim, prefix: Prefix) -> None:
        """Lock what the tree has taken over from the claim's tables."""
        start = 0
        for node, pages in self.tree.walked(prefix):
            here = node.parts[Tier.DEVICE]
            mine = [
                part
                for pool in self._runs
                if pages == len(node) and (part := here.get(pool)) is not None and claim.lock not in part.locks
                and claim.tables[pool][start : start + pages] == list(part.lease.indices)
            ]  # fmt: skip
            full = here.get(self.full)
            if mine and full is not None and full not in mine and claim.lock not in full.locks:
                mine.insert(0, full)
            for part in mine:
                self.tree.add(claim.lock, part)
            start += pages

    def _save(self, nodes: Sequence[Node]) -> None:
        """Copy to the host what the write policy wants there by now."""
        policy = self.config.write_policy
        if self.saver is None or policy == "back":
            return
        self.saver.save(n for n in nodes if policy == "through" or n.hits >= self.config.write_hits)

    def slide(self, claim: Claim, committed: int) -> None:
        """Give back the window pages that no position from `committed` on can see."""
        for pool in self._runs:
            window = self.spec.by_name[pool].window_tokens
            if not window:
                continue
            first = max(0, committed - window + 1) // self.spec.page_tokens
            kept = []
            for run in claim.runs[pool]:
                gone = max(0, min(first, run.end) - run.first)
                run.lease.split(gone, claim.owner).release()
                if len(run.lease):
                    kept.append(Run(run.first + gone, run.lease))
                else:
                    run.lease.release()
                for page in range(run.first, run.first + gone):
                    claim.tables[pool][page], claim.epochs[pool][page] = NO_PAGE, 0
                    if page < len(claim.digests[pool]):
                        claim.digests[pool][page] = None
            claim.runs[pool] = kept

    def snapshot(self, claim: Claim, committed: int) -> bool:
        """Copy the recurrent state aside, as it is after `committed` positions (whole pages): what was launched up to
        there and nothing more has been. False, and nothing happens, without a slot to spare."""
        assert committed % self.spec.page_tokens == 0, "snapshots are taken at page boundaries"
        leases = self._lease(dict.fromkeys(self._slots, 1), f"snapshot of {claim.owner}")
        if leases is None:
            return False
        for pool, lease in leases.items():
            copied = self._copy_slot(pool, claim.slots[pool].indices[0], lease.indices[0])
            held = claim.snapshots.setdefault(pool, [])
            held.append(Snapshot(committed // self.spec.page_tokens, lease, copied))
            while len(held) > _SNAPSHOTS:
                self._give_back(held.pop(0))
        return True

    def _give_back(self, snapshot: Snapshot) -> None:
        if not snapshot.completion.done:
            self._launched.hold(snapshot.completion, snapshot.lease.pin("snapshot under way"))
        snapshot.lease.release()

    # ------------------------------------------------------------ ends

    def release(self, claim: Claim, after: Sequence[Completion] = ()) -> None:
        """Give back everything that it holds. Idempotent.

        `after`: launched operations that name its pages and slots. Nobody gets those before they are complete.
        """
        if claim.released:
            return
        claim.released = True
        snapshots = [s for held in claim.snapshots.values() for s in held]
        under_way = [c for c in [*after, *claim.started, *(s.completion for s in snapshots)] if not c.done]
        for completion in under_way:
            reason = f"launched for {claim.owner}"
            self._launched.hold(
                completion, *(self.pools.allocators[p].pin(i, reason) for p, i in claim.named().items())
            )
        del self._claims[claim.lock]
        self.tree.unlock(claim.lock)
        leases = [s.lease for s in snapshots] + list(claim.slots.values())
        for lease in leases + [run.lease for runs in claim.runs.values() for run in runs]:
            lease.release()

    def condemn(self, prefix: Prefix, page: int = 0) -> int:
        """Never again use page `page` of `prefix` nor what is below; returns the number of pages."""
        count = self.tree.condemn(prefix, page)
        self.counters["pages_condemned"] += count
        return count

    # ------------------------------------------------------------ accounts

    def free(self, pool: str) -> int:
        """Pages (or slots) of the device that are free or only kept for reuse."""
        return self.pools.allocators[pool].free + self.tree.evictable(pool)

    @property
    def claims(self) -> int:
        return len(self._claims)

    @property
    def busy(self) -> bool:
        """Whether copies, loads or reads are under way that `poll` is to take in."""
        return any((
            len(self._launched),
            self.saver is not None and self.saver.busy,
            self.loader is not None and self.loader.busy,
            self.prefetcher is not None and len(self.prefetcher),
        ))  # fmt: skip

    def check(self, others: Mapping[str, int] = {}) -> list[str]:
        """Recompute all accounts from scratch; `others` are leases of pages that the caller holds, by pool."""
        found = self.pools.check() + self.tree.check()
        for pool, allocator in self.pools.allocators.items():
            held = self.tree.sizes[Tier.DEVICE, pool] + sum(c.own(pool) for c in self._claims.values())
            found += _compare(
                allocator.total - allocator.free - allocator.quarantined, held + others.get(pool, 0), pool
            )
        for claim in self._claims.values():
            found += self._check_claim(claim)
        moves = (self.saver, self.loader, self.prefetcher)
        locks = len(self._claims) + sum(part.locks for part in moves if part is not None)
        if locks != self.tree.locks:
            found.append(f"tree: {self.tree.locks} locks, claims and moves hold {locks}")
        if self.host is None:
            return found
        assert self.saver is not None
        found += self.host.check() + self.saver.check()
        for pool, allocator in self.host.allocators.items():
            held = self.tree.sizes[Tier.HOST, pool] + self.saver.leased(pool)
            held += self.prefetcher.leased(pool) if self.prefetcher is not None else 0
            found += _compare(allocator.total - allocator.free - allocator.quarantined, held, f"host {pool}")
        return found + (self.prefetcher.check() if self.prefetcher is not None else [])

    def _check_claim(self, claim: Claim) -> list[str]:
        """Every page of its tables is its own, or one that its lock keeps, under the epoch that it was entered with."""
        found = []
        for pool in self._runs:
            mine = {i for run in claim.runs[pool] for i in run.lease.indices}
            mine |= {i for p in claim.lock.of(pool) if p.tier is Tier.DEVICE for i in p.lease.indices}
            table = claim.tables[pool]
            strangers = [i for i in table if i != NO_PAGE and i not in mine]
            if strangers:
                found.append(f"{claim.owner}: {pool} pages {strangers} of its table are neither its own nor locked")
            used = [(i, e) for i, e in zip(table, claim.epochs[pool], strict=True) if i != NO_PAGE]
            if [e for _, e in used] != list(self.pools.allocators[pool].epochs_of([i for i, _ in used])):
                found.append(f"{claim.owner}: its {pool} table has old epochs")
            for run in claim.runs[pool]:
                if not run.lease.live:
                    found.append(f"{claim.owner}: its lease has ended")
                if table[run.first : run.end] != list(run.lease.indices):
                    found.append(f"{claim.owner}: its {pool} table differs from what it leased")
        return found

    def close(self, timeout_s: float = 5.0) -> None:
        """Release every claim and end all prefetches; what storage is still busy with gets `timeout_s`."""
        if self.teller is not None:
            self.teller.close()
        if self._storage is not None and not self._storage.close(timeout_s):
            # A thread of it may still write to the host's memory: that must outlive it, and nothing is taken back.
            return
        for claim in list(self._claims.values()):
            self.release(claim)
        if self.prefetcher is not None:
            self.prefetcher.close()
        self._launched.settle()


def _failed(operations: Sequence[Completion]) -> bool:
    return any(failure(op) is not None for op in operations if op.done)


def _regroup(run: Run, table: Sequence[int]) -> list[Run]:
    """What is left of a run after parts of its lease were taken, as runs without gaps."""
    left = set(run.lease.indices)
    pages = [page for page in range(run.first, len(table)) if table[page] in left]
    assert len(pages) == len(left), "a leased page is missing from its table"
    breaks = [i for i, (a, b) in enumerate(pairwise(pages), 1) if b != a + 1]
    out = []
    for begin, end in reversed(list(zip([0, *breaks], [*breaks, len(pages)], strict=True))):
        if begin < end:
            out.append(Run(pages[begin], run.lease.split(end - begin, run.lease.owner, start=begin)))
    run.lease.release()
    return out[::-1]


def _compare(used: int, held: int, pool: str) -> list[str]:
    return [f"{pool} pages: {used} in use, {held} accounted for"] if used != held else []
