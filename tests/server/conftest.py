"""Fixtures: servers over fake engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fake_engine import FakeEngine
from running_server import RunningServer


@pytest.fixture
def start_server() -> Iterator[Callable[..., RunningServer]]:
    running: list[RunningServer] = []

    def start(engine: FakeEngine | None = None, **args: Any) -> RunningServer:
        running.append(RunningServer(engine or FakeEngine(), **args))
        return running[-1]

    yield start
    for server in running:
        server.close()


@pytest.fixture
def server(start_server: Callable[..., RunningServer]) -> RunningServer:
    return start_server()


@pytest.fixture(scope="module")
def shared_http_server() -> Iterator[RunningServer]:
    """With an HTTP port, for tests that leave nothing behind."""
    running = RunningServer(FakeEngine(), http_port=0)
    yield running
    running.close()


@pytest.fixture(scope="module")
def shared_server() -> Iterator[RunningServer]:
    """For tests that leave nothing behind."""
    running = RunningServer(FakeEngine())
    yield running
    running.close()
