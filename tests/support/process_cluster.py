"""Workers of one model in this process, each on its thread: two pools on one card, or one colocated worker.

There is no router, no HTTP and no Ray: requests go to the workers' threads (`cluster.worker_process.worker_thread`) as
a router's session would bring them, state goes over plane `local` from pool to pool on the same device, and the times
of tokens are those at which the workers deliver them. All workers share the interpreter's lock, as processes would not.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from twinpool.cluster.assembly.build_worker import build_worker
from twinpool.cluster.assembly.memory_plan import plan_memory, state_options
from twinpool.cluster.worker_process.worker_thread import WorkerThread
from twinpool.contracts.checkpoint.model_spec import read_model_spec
from twinpool.contracts.config.load_config import config_from_dict
from twinpool.contracts.ids import PAIR, Incarnation, RequestId, Role, RoomId, WorkerName
from twinpool.contracts.interfaces.worker_interface import Worker
from twinpool.contracts.messages.router_commands import PeerRef, Submit
from twinpool.contracts.messages.stream_frames import StreamEnd
from twinpool.contracts.messages.worker_events import Done, Event, LegReport, Tokens
from twinpool.contracts.sampling_params import SamplingParams

_STOP_S = 10.0


@dataclass
class Served:
    """What one request came to. Times are of `time.perf_counter`."""

    asked_at: float
    wanted: int
    """Tokens of its answer."""
    tokens: dict[int, int] = field(default_factory=dict)
    """By absolute position."""
    at_s: dict[int, float] = field(default_factory=dict)
    """When each position was there, in seconds since the request was due."""
    transfer_bytes: int = 0
    marks: dict[str, float] = field(default_factory=dict)
    """Decode's; see `LegReport`."""
    failed: str = ""

    @property
    def over(self) -> bool:
        return bool(self.failed) or len(self.tokens) >= self.wanted

    @property
    def answer(self) -> list[int]:
        return [token for _, token in sorted(self.tokens.items())]

    @property
    def times_s(self) -> list[float]:
        """When each token could be read: no sooner than those before it, as a router tells them in order."""
        return list(itertools.accumulate((at for _, at in sorted(self.at_s.items())), max))


class ProcessCluster:
    """One worker of each role of `roles`; see the module's prose."""

    def __init__(self, folder: Path, roles: Sequence[Role], tokens: int, sections: dict[str, dict[str, Any]]) -> None:
        """`tokens`: positions that each worker's pools hold. `sections` are of the configuration."""
        began = time.monotonic()
        cache = {"device_tokens": tokens, "prefix_reuse": False, **sections.get("cache", {})}
        config = config_from_dict({"transfer": {"plane": "local"}, **sections, "cache": cache})
        spec = read_model_spec(folder)
        self.name = " and ".join(roles)
        self._lock = threading.Condition()
        self._numbers = itertools.count(1)
        self._served: dict[RequestId, Served] = {}
        self._stack = ExitStack()
        self._threads: dict[Role, WorkerThread] = {}
        with ExitStack() as undo:
            for role in roles:
                worker = _build(role, folder, spec, config)
                undo.callback(worker.close)
                self._threads[role] = WorkerThread(worker)
            undo.pop_all()
        self._sessions = {role: thread.open_session(self._take, self._ended) for role, thread in self._threads.items()}
        for thread in self._threads.values():
            thread.start()
            self._stack.callback(thread.stop, _STOP_S)
        print(f"{self.name}: built in {time.monotonic() - began:.1f} s", flush=True)

    def ask(self, prompt: Sequence[int], count: int, due: float | None = None) -> Served:
        """Ask for exactly `count` greedy tokens. `due`: when it was due, if that was earlier than now."""
        number = next(self._numbers)
        request, room = RequestId(f"r{number}"), RoomId(f"room-{number}")
        served = Served(time.perf_counter() if due is None else due, count)
        sampling = SamplingParams(max_tokens=count, temperature=0.0)
        with self._lock:
            self._served[request] = served
        for role, thread in self._threads.items():
            peer = self._peer(role) if count > 1 else None
            if role is Role.DECODE and peer is None:
                continue
            command = Submit(request, 0, room, tuple(prompt), len(prompt), sampling, peer)
            thread.send(self._sessions[role], [command])
        return served

    def wait(self, served: Sequence[Served], timeout_s: float) -> bool:
        """Until all of them are over; returns whether they are."""
        with self._lock:
            return self._lock.wait_for(lambda: all(one.over for one in served), timeout_s)

    def check(self) -> list[str]:
        """What the workers' own recounts find; to be called when nothing is asked."""
        return [line for thread in self._threads.values() for line in thread.check().result(_STOP_S).violations]

    def close(self) -> None:
        self._stack.close()

    def _peer(self, role: Role) -> PeerRef | None:
        if role is Role.COLOCATED:
            return None
        other = PAIR[1 - PAIR.index(role)]
        control = self._threads[other].control if role is Role.DECODE else ""
        return PeerRef(WorkerName(f"{other}-0"), Incarnation(1), control)

    def _take(self, events: Sequence[Event]) -> None:
        """The events of a step, on a worker's thread."""
        now = time.perf_counter()
        with self._lock:
            for event in events:
                served = self._served[event.request_id]
                if isinstance(event, Tokens):
                    for position, token in enumerate(event.tokens, event.position):
                        served.tokens[position] = token
                        served.at_s.setdefault(position, now - served.asked_at)
                elif isinstance(event, LegReport) and event.role is not Role.PREFILL:
                    served.transfer_bytes += event.transfer_bytes
                    served.marks |= event.marks
                elif isinstance(event, Done) and event.error is not None:
                    served.failed = served.failed or event.message or str(event.error)
            self._lock.notify_all()

    def _ended(self, end: StreamEnd) -> None:
        with self._lock:
            for served in self._served.values():
                served.failed = served.failed or ("" if served.over else f"the worker has ended: {end.reason}")
            self._lock.notify_all()


def _build(role: Role, folder: Path, spec: Any, config: Any) -> Worker:
    from twinpool.engine.models.registry import read_model

    pool_set = read_model(folder).pool_set(state_options(spec, config, role))
    plan = plan_memory(pool_set, config, role, spec.context, 1 << 50)
    assert plan is not None, "memory is no question here"
    name = WorkerName(f"{role}-0")
    return build_worker(role, name, Incarnation(1), spec, config, host="127.0.0.1", counts=plan.counts)
