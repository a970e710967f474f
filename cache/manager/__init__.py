"""The KV cache manager: all state of one worker, allocated, shared, swapped and freed request by request."""
