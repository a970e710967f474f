"""Benches of the prefix tree, the tiers and storage."""
