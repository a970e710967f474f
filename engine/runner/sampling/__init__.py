"""Sampling: the draw of tokens from logits, penalties by the tokens of a request, and the replay of a known answer."""
