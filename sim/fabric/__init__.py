"""Time, network, memory, storage and engine as models."""
