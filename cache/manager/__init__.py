"""The face of the KV cache: all state of one worker, request by request."""
