"""Decode's end of the rooms: its writers, their messages, and the pages and metadata that arrive."""
