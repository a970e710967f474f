"""Attention backends: the interfaces, the plans that they are given, and implementations."""
