"""Layers' kernels for NVIDIA GPUs: products, norms and activations whose rows are exact."""
