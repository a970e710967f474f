"""Prefill's end of the rooms: its readers, the writes to each of them, and their messages."""
