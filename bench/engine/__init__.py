"""Benches of the engine and its kernels."""
