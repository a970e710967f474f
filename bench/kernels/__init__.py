"""Benches of the Triton kernels: on a GPU, and by their compiled code without one."""
