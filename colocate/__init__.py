"""Both roles on one device: prompts are computed and answers generated over one KV cache."""

from colocate.worker import ColocatedWorker

__all__ = ["ColocatedWorker"]
