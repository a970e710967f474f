"""Layers that mix tokens: attention of every kind, recurrences."""
