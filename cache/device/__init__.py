"""Streams, launches and copies; and a CPU that behaves like a GPU, for tests."""
