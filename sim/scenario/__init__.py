"""Scenarios: the plans that seeds stand for."""
