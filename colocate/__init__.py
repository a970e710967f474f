"""Both roles on one device: prompts are computed and answers generated over one KV cache."""

from colocate.conditional_decode import ConditionalDecodeWorker
from colocate.decode_class import decode_class_for
from colocate.worker import ColocatedWorker

__all__ = ["ColocatedWorker", "ConditionalDecodeWorker", "decode_class_for"]
