"""Swap-out and swap-in: the state of whole requests off the device and back."""
