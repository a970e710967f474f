"""Sockets, processes, keys."""
