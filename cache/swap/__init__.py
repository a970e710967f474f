"""Offload and restore: state of swapped out requests in host memory or on storage, and back on the device."""
