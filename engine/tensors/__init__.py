"""Weights, shards and products whose rows are exact."""
