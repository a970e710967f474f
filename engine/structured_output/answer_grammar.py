"""The grammar of one answer, and how far it has followed it."""

from __future__ import annotations

from collections.abc import Sequence

from twinpool.engine.structured_output.grammar_engine import GrammarMatcher, StartedGrammar


class AnswerGrammar:
    """A matcher that is brought up to the answer's tokens whenever it is asked."""

    def __init__(self, started: StartedGrammar, emitted: int) -> None:
        """`emitted`: tokens of the answer that the grammar was started behind."""
        self._matcher, self.first = started
        self._consumed = emitted

    def behind(self, answer: Sequence[int]) -> GrammarMatcher:
        """Return the matcher behind all tokens of `answer`, of which there are never fewer than before. Raises
        `GrammarError` for a token that the grammar doesn't allow."""
        assert len(answer) >= self._consumed, "tokens of an answer are never taken back"
        if fresh := answer[self._consumed :]:
            self._matcher.consume(fresh)
            self._consumed = len(answer)
        return self._matcher
