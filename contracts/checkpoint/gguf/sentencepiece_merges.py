"""The merges that a SentencePiece vocabulary stands for: any two tokens that make a third, the best first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def merges_by_score(tokens: Sequence[str], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges in the order of the scores of what they make, the highest first."""
    numbers = {token: number for number, token in enumerate(tokens)}
    rated = [
        (scores[number], len(left), len(right), left, right)
        for token, number in numbers.items()
        for left, right in _splits(token, numbers)
    ]
    rated.sort(key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for *_, left, right in rated]


def merges_by_order(tokens: Sequence[str]) -> list[tuple[str, str]]:
    """The merges in the order of the vocabulary of what they make: Gemma's scores are not in the order of its merges,
    its tokens are."""
    numbers = {token: number for number, token in enumerate(tokens)}
    merges: list[tuple[str, str]] = []
    for token in tokens:
        merges += sorted(_splits(token, numbers), key=lambda pair: (len(pair[0]), len(pair[1])), reverse=True)
    return merges


def _splits(token: str, numbers: dict[str, int]) -> Iterator[tuple[str, str]]:
    """The ways in which two tokens make `token`, in the order of the vocabulary."""
    ways = [
        (left, right)
        for at in range(1, len(token))
        if (left := token[:at]) in numbers and (right := token[at:]) in numbers
    ]
    return iter(sorted(ways, key=lambda pair: (numbers[pair[0]], numbers[pair[1]])))
