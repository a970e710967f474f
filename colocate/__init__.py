"""Both roles on one device: prompts are computed and answers generated over one KV cache."""

from twinpool.colocate.conditional_decode import ConditionalDecodeWorker
from twinpool.colocate.decode_class import decode_class_for
from twinpool.colocate.worker import ColocatedWorker

__all__ = ["ColocatedWorker", "ConditionalDecodeWorker", "decode_class_for"]
