"""Speculative decoding: drafts of tokens to come, which the steps of their requests draw and so prove."""
