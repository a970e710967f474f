"""The device port: streams, launches and copies; and a CPU device that behaves like a GPU, for tests."""
