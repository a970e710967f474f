"""The parts of a prefill worker without the worker: requests that are admitted, and the chunks chosen for them.

Nothing is computed and nothing is sent: a test says how far each request has come, and to whom decode granted pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.support.pool_sets import pool_sets
from twinpool.cache.device.cpu_device import CpuDevice
from twinpool.cache.manager.kv_cache_manager import KVCacheManager
from twinpool.cache.pool.pool_set import PoolSet
from twinpool.cache.prefix_cache.tree_node import TokenPrefix
from twinpool.contracts.block_hash import block_hashes
from twinpool.contracts.clock import ManualClock
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.ids import Incarnation, RequestId, Role, RoomId, WorkerName
from twinpool.contracts.interfaces.worker_interface import SessionId
from twinpool.contracts.messages.router_commands import PeerRef, Submit
from twinpool.contracts.messages.worker_status import WorkerLimits
from twinpool.contracts.sampling_params import SamplingParams
from twinpool.prefill.request import PrefillPages, PrefillRequest
from twinpool.prefill.scheduler import PrefillScheduler, StepCost
from twinpool.worker.request_table import RequestTable

PAGE = 4
SESSION = SessionId(1)
PEER = PeerRef(WorkerName("decode-0"), Incarnation(1), "inproc://decode-0")


class PrefillParts:
    """See the module's prose. `pages` of `page_tokens` tokens each are in each pool."""

    pools = "full"
    """The name of the set of pools."""

    def __init__(self, pages: int = 64, page_tokens: int = PAGE, **prefill: Any) -> None:
        self._page_tokens = page_tokens
        config = config_from_dict({"cache": {"page_tokens": page_tokens}, "prefill": prefill})
        spec, self.clock = pool_sets(page_tokens)[self.pools], ManualClock()
        cache = config.cache_for(Role.PREFILL)
        self.manager = KVCacheManager(PoolSet(spec, spec.even(pages)), CpuDevice(), cache, self.clock.now)
        self.requests = RequestTable[PrefillRequest](
            WorkerName("prefill-0"), WorkerLimits(page_tokens * pages, 400), self.clock
        )
        self.pages = PrefillPages(self.manager, reuse=cache.prefix_reuse)
        self.granted: set[PrefillRequest] = set()
        self._asked = 0
        self.cost = StepCost(config.prefill.chunk_tokens)
        self.scheduler = PrefillScheduler(
            self.requests, self.pages, self.granted.__contains__, config.prefill, self.clock, self.cost
        )

    def ask(
        self, name: str, prompt: int, priority: int = 0, tenant: str = "", weight: int = 1,
        begins: Sequence[int] = (), **sampling: Any,
    ) -> PrefillRequest:  # fmt: skip
        """A request that waits, of so many tokens; behind those it `begins` with they are in nobody else's prompt."""
        self._asked += 1
        tokens = (*begins, *(self._asked * 1000 + n for n in range(len(begins), prompt)))
        params = SamplingParams(max_tokens=4, temperature=0.0, **sampling)
        submit = Submit(
            RequestId(name), 0, RoomId(name), tokens, prompt, params, PEER,
            priority=priority, tenant=tenant, weight=weight,
        )  # fmt: skip
        keys = block_hashes(tokens, self._page_tokens, "")
        now = self.clock.now()
        prefix = TokenPrefix.of(tokens, self._page_tokens, "", keys)
        request = PrefillRequest(SESSION, submit, now, now + submit.deadline_s, prefix, chain=keys)
        self.requests.add(request)
        return request

    def leave(self, request: PrefillRequest) -> None:
        """Take a request out of the worker, with whatever it has."""
        self.pages.free(request)
        self.requests.remove(request)

    def step(self) -> dict[str, list[int]]:
        """Launch the next step: by request, the tokens' positions in their prompt."""
        rows = {}
        for chunk in self.scheduler.next_batch():
            request = chunk.request
            rows[str(request.submit.request_id)] = list(range(request.launched, request.planned))
            assert chunk.row.tokens == request.tokens[request.launched : request.planned]
            request.launched = request.planned
        return rows
