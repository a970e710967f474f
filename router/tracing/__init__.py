"""Traces of requests for OpenTelemetry, made of their records."""
