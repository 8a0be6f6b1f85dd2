"""Notices an engine that has work and makes no progress, and says where it hangs."""

from __future__ import annotations

import sys
import threading
import time
import traceback


class StepClock:
    """When the step thread last got anywhere. The step thread writes; any thread reads."""

    def __init__(self) -> None:
        self._progress_time: float | None = None  # None: nothing to do

    def begin_work(self) -> None:
        """There is work from now on, if there was none."""
        if self._progress_time is None:
            self._progress_time = time.monotonic()

    def progress(self) -> None:
        """A step is done, or the thread is about to take new work."""
        self._progress_time = time.monotonic()

    def idle(self) -> None:
        """Nothing is left to do."""
        self._progress_time = None

    def stalled_for(self) -> float:
        """Seconds since the last progress; 0 without work."""
        since = self._progress_time
        return 0.0 if since is None else time.monotonic() - since


def stack_of(thread: threading.Thread | None) -> str:
    """Where a thread is, innermost call last, as a traceback prints it; a line that says so if it is not running."""
    frame = None if thread is None or thread.ident is None else sys._current_frames().get(thread.ident)
    if frame is None:
        return "the step thread is not running"
    return "".join(traceback.format_stack(frame)).rstrip()
