"""Rooms: hand-overs of requests between workers, with their messages and states."""
