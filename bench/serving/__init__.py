"""Benches of whole clusters and of the data planes."""
