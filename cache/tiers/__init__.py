"""Copies between device, host and storage, and the events that tell of them."""
