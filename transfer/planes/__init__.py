"""Data planes: register, describe, post, notify, poll."""
