"""Benches of the autoscaler: pools that follow the load, of a model and of real workers."""
