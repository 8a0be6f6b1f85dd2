"""The waiting queue: order, and removal anywhere."""

from __future__ import annotations

import random

import pytest

from pyengine.engine.request import Request
from pyengine.engine.request_queue import RequestQueue
from pyengine.sampling_params import SamplingParams


def request(request_id: str, *urgency: int) -> Request:
    made = Request(request_id=request_id, prompt_token_ids=[1], sampling_params=SamplingParams())
    made.urgency = (urgency[0], urgency[1])
    return made


def test_most_urgent_first_then_first_come() -> None:
    queue = RequestQueue()
    for made in (request("c", 1, 0), request("a", 0, 2), request("b", 0, 3), request("first", -1, 9)):
        queue.push(made)
    assert [queue.pop().request_id for _ in range(4)] == ["first", "a", "b", "c"]
    assert queue.peek() is None
    with pytest.raises(IndexError):
        queue.pop()


def test_a_request_that_comes_back_goes_before_later_ones() -> None:
    queue = RequestQueue()
    first = request("first", 0, 0)
    queue.push(first)
    queue.push(request("second", 0, 1))
    assert queue.pop() is first
    queue.push(first)
    assert queue.pop() is first


def test_removal_anywhere_leaves_no_trace() -> None:
    queue = RequestQueue()
    rng = random.Random(0)
    requests = [request(f"r{i}", rng.randrange(3), i) for i in range(500)]
    for made in requests:
        queue.push(made)
    kept = [made for made in requests if rng.random() < 0.1]
    for made in requests:
        if made not in kept:
            queue.remove(made)
    assert len(queue._heap) <= 2 * len(kept) + 8, "removed requests do not pile up"
    assert "r0" not in queue or requests[0] in kept
    assert [queue.pop() for _ in range(len(queue))] == sorted(kept, key=lambda r: r.urgency)
    with pytest.raises(KeyError):
        queue.remove(kept[0])


def test_a_request_removed_and_pushed_again_comes_once() -> None:
    queue = RequestQueue()
    made = request("a", 0, 0)
    queue.push(made)
    queue.remove(made)
    queue.push(made)
    assert queue.pop() is made
    assert queue.peek() is None
    assert len(queue) == 0
