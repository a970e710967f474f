"""Attention and recurrences on NVIDIA GPUs."""
