"""Weights, their shards for ranks, row-exact products, and sums over ranks."""
