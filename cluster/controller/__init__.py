"""Incarnations as leases, and restarts."""
