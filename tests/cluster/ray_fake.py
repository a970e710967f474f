"""Builds fake workers in Ray's processes, which import it by name."""

from __future__ import annotations

import os

from cluster.worker_process import WorkerPlan
from tests.cluster.fake_worker import FakeWorker


def build(plan: WorkerPlan) -> FakeWorker:
    return FakeWorker(plan.name, plan.role, plan.incarnation, os.getpid())
