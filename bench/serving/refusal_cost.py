"""python -m bench.serving.refusal_cost [--workers 2,64,1000]: what it costs a router to keep why it refused a request.

For each number of workers: microseconds of one refusal for a full queue, from the exception to the kept record with the
router's state, as floods of them come; the best of `ROUNDS` rounds. What the client is sent is not in it.
"""

from __future__ import annotations

import argparse
import time

from bench.common import machine
from bench.common.random_model import DEMO
from tests.router.fake_worker import FakeCluster
from twinpool.contracts.checkpoint.model_spec import read_model_spec
from twinpool.contracts.config.cluster_config import Config
from twinpool.router.openai.api_errors import QueueFull, failure_of
from twinpool.router.records.refusals import RefusedRequest
from twinpool.router.service.router_service import RouterService
from twinpool.router.state.trace_context import NO_TRACE

ROUNDS, REFUSALS = 5, 5000


def service_of(workers: int) -> RouterService:
    """A router that knows so many workers, half of each role."""
    cluster = FakeCluster(workers // 2, workers - workers // 2)
    service = RouterService(read_model_spec(DEMO), Config(), cluster)
    service.core.on_view(cluster.views())
    for entry in service.core.workers:
        service.core.on_linked(entry.key)
    return service


def measured(service: RouterService) -> float:
    """Seconds of one refusal."""
    began = time.perf_counter()
    for number in range(REFUSALS):
        error = QueueFull("the queue is full: 4096 of 4096 answers are in flight; try again later", 1)
        service.refused(RefusedRequest(f"c{number}", "acme", NO_TRACE, 0.001), failure_of(error), error.numbers)
    return (time.perf_counter() - began) / REFUSALS


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, prog="bench.serving.refusal_cost", description=__doc__)
    parser.add_argument("--workers", default="2,64,1000", help="numbers of workers, separated by commas")
    print(machine.headline())
    for workers in map(int, parser.parse_args().workers.split(",")):
        service = service_of(workers)
        best = min(measured(service) for _ in range(ROUNDS))
        one = list(service.records.kept.refusals.find(f"c{REFUSALS - 1}"))[-1]
        print(
            f"{workers:5} workers: {1e6 * best:6.1f} us a refusal, with {one.numbers['decode_workers_ready']:g} ready"
        )


if __name__ == "__main__":
    main()
