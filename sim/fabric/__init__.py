"""The models of time, network, memory, storage and engine that stand in for the real ones."""
