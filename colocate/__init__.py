"""Both roles on one device: prompts are computed and answers generated over one KV cache."""

from twinpool.colocate.worker import ColocatedWorker, ConditionalDecodeWorker, decode_class_for

__all__ = ["ColocatedWorker", "ConditionalDecodeWorker", "decode_class_for"]
