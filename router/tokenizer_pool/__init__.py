"""Processes that read, check and tokenise large bodies."""
