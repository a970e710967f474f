"""Prompt lookup: the draft of a request's next tokens is what followed the last time that its latest ones occurred.

The method is prompt lookup decoding (A. Saxena, 2023), n-gram speculation elsewhere: where an answer repeats its prompt
or itself, as in code, summaries and tool calls, the continuation is there to be copied. It takes no model and no
memory of the device.
"""

from __future__ import annotations

from collections.abc import Sequence

NGRAM = 3
"""Tokens that must occur again."""
_BITS = 21
"""Of a token in a key: no vocabulary has more than two million tokens."""
_REACH = 16384
"""Positions that are looked through, the latest ones: an index of them takes about 2 MB."""
_AT_ONCE = 1024
"""Positions that one look-up adds to the index, so that no step waits for a long prompt to be indexed."""


class PromptLookup:
    """The index of one request's tokens."""

    def __init__(self, tokens: Sequence[int]) -> None:
        """`tokens`: the request's own list, prompt and answer so far, which grows behind."""
        self._tokens = tokens
        self._behind: dict[int, int] = {}
        """By n-gram, the position behind its latest occurrence."""
        self._indexed = max(0, len(tokens) - _REACH)
        """The position from which on n-grams begin that aren't in the index yet."""

    def propose(self, most: int) -> list[int]:
        """Return up to `most` tokens that may come next; none where the latest ones are new, or not looked at yet."""
        tokens, last = self._tokens, len(self._tokens) - NGRAM
        if last < 0 or most <= 0:
            return []
        if len(self._behind) > 2 * _REACH:
            self._behind.clear()
            self._indexed = last - _REACH
        stop = min(last, self._indexed + _AT_ONCE)
        for at in range(self._indexed, stop):
            self._behind[self._key(at)] = at + NGRAM
        self._indexed = stop
        behind = self._behind.get(self._key(last))
        if behind is None:
            return []
        draft: list[int] = []
        for at in range(behind, behind + most):
            # A run that repeats itself up to here goes on by its own draft.
            draft.append(tokens[at] if at < len(tokens) else draft[at - len(tokens)])
        return draft

    def _key(self, at: int) -> int:
        key = 0
        for token in self._tokens[at : at + NGRAM]:
            key = key << _BITS | token
        return key
