"""The stop-string automaton, against a search that looks at every prefix of the text."""

from __future__ import annotations

import random

from pyengine.engine.stop_strings import StopAutomaton


def scan(stops: list[str], pieces: list[str]) -> tuple[int | None, str | None, list[int]]:
    """Feed the pieces: (where the match ends in the whole text, the match, what was held after each piece)."""
    automaton, state, position, held = StopAutomaton(stops), 0, 0, []
    for piece in pieces:
        state, match = automaton.feed(state, piece)
        if match is not None:
            return position + match.end, match.stop, held
        position += len(piece)
        held.append(automaton.held(state))
    return None, None, held


def slow_match(stops: list[str], text: str) -> tuple[int | None, str | None]:
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            return end, max(found, key=len)
    return None, None


def slow_held(stops: list[str], text: str) -> int:
    lengths = [k for stop in stops for k in range(1, len(stop)) if text.endswith(stop[:k])]
    return max(lengths, default=0)


def test_random_texts_and_cuts() -> None:
    """Rule 8: the first match to be complete wins however the text is cut; what is held is exactly what could become one."""
    rng = random.Random(0)
    matched = 0
    for _ in range(3000):
        stops = ["".join(rng.choices("ab", k=rng.randrange(1, 6))) for _ in range(rng.randrange(1, 4))]
        if rng.random() < 0.5:
            stops = [stop + "c" for stop in stops]
        text = "".join(rng.choices("aaabbbc", k=rng.randrange(1, 20)))
        cuts = sorted(rng.choices(range(len(text) + 1), k=3))
        pieces = [text[i:j] for i, j in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        end, stop, held = scan(stops, pieces)
        assert (end, stop) == slow_match(stops, text)
        matched += stop is not None
        for count, length in enumerate(held, start=1):
            assert length == slow_held(stops, "".join(pieces[:count]))
    assert 500 < matched < 2900


def test_overlapping_matches() -> None:
    assert scan(["abcd", "bc"], ["abcd"])[:2] == (3, "bc")
    assert scan(["bc", "abc"], ["ab", "c"])[:2] == (3, "abc")
    assert scan(["aab"], ["aaab"])[:2] == (4, "aab")


def test_ignored_matches_hold_only_what_may_still_become_one() -> None:
    """While min_tokens is not reached a complete stop string is text like any other."""
    automaton = StopAutomaton(["stop", "stopping", "pxy"])
    state, match = automaton.feed(0, "stop", match=False)
    assert match is None
    assert automaton.held(state) == 4  # "stopping" may come
    state, match = automaton.feed(state, "ping", match=False)
    assert match is None
    assert automaton.held(state) == 0
    state, match = automaton.feed(0, "a stop", match=False)
    state, match = automaton.feed(state, "xy")
    assert match is not None
    assert match.stop == "pxy"


def test_many_long_stop_strings_cost_one_step_a_character() -> None:
    stops = ["a" * 2000 + chr(0x100 + i) for i in range(20)]
    automaton = StopAutomaton(stops)
    state, match = automaton.feed(0, "a" * 5000 + "b")
    assert match is None
    assert automaton.held(state) == 0
    state, match = automaton.feed(state, "a" * 3000 + stops[7][-1])
    assert match is not None
    assert match.stop == stops[7]
