"""Prometheus."""
