"""Allocations: block tables of one request, with the leases, slots and locks behind them."""
