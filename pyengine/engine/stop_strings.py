"""Stop strings, found character by character.

An Aho-Corasick automaton (Aho and Corasick, 1975) over all of a request's stop strings: its state after a character is the
longest suffix of the text that begins some stop string. So one state answers both questions: which stop string ends here,
and how much of the text must be held back because it may still become one. The answer does not depend on how the text is cut
into tokens: the match that is complete first wins, and of several complete at once the longest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple


class StopMatch(NamedTuple):
    """A stop string in a chunk of text."""

    stop: str
    end: int  # characters of the chunk up to and with the stop string's last one


class StopAutomaton:
    """The stop strings of one request, shared by its choices; immutable."""

    __slots__ = ("_fail", "_goto", "_hold", "_match")

    def __init__(self, stops: Sequence[str]) -> None:
        self._goto: list[dict[str, int]] = [{}]
        self._match: list[str | None] = [None]  # the longest stop string that ends in this state
        depth = [0]
        for stop in stops:
            state = 0
            for char in stop:
                following = self._goto[state].get(char)
                if following is None:
                    following = len(self._goto)
                    self._goto[state][char] = following
                    self._goto.append({})
                    self._match.append(None)
                    depth.append(depth[state] + 1)
                state = following
            self._match[state] = stop
        self._fail = [0] * len(self._goto)
        # A state where no stop string goes on holds only what the longest suffix that does go on needs.
        self._hold = [0] * len(self._goto)
        queue = deque(self._goto[0].values())
        while queue:
            state = queue.popleft()
            self._match[state] = self._match[state] or self._match[self._fail[state]]
            self._hold[state] = depth[state] if self._goto[state] else self._hold[self._fail[state]]
            for char, following in self._goto[state].items():
                self._fail[following] = self._step(self._fail[state], char)
                queue.append(following)

    def _step(self, state: int, char: str) -> int:
        while state and char not in self._goto[state]:
            state = self._fail[state]
        return self._goto[state].get(char, 0)

    def feed(self, state: int, text: str, *, match: bool = True) -> tuple[int, StopMatch | None]:
        """Go through `text` from `state` (0: the beginning).

        Args:
            state: what the last call returned.
            text: the next characters.
            match: False: a stop string that ends in `text` does not count (fewer than min_tokens tokens so far).

        Returns:
            The state after `text` and None, or the first match and the state at its end.
        """
        goto, matches = self._goto, self._match
        for position, char in enumerate(text):
            following = goto[state].get(char)
            state = self._step(state, char) if following is None else following
            found = matches[state]
            if found is not None and match:
                return state, StopMatch(found, position + 1)
        return state, None

    def held(self, state: int) -> int:
        """Characters at the end of the text that may still become a stop string."""
        return self._hold[state]
