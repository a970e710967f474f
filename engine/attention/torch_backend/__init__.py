"""Attention and recurrences in torch: the reference, and by way of C++ kernels."""
