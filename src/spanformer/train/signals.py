"""Signals that end a run: it finishes the current step, saves and exits."""

from __future__ import annotations

import signal
import threading

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class SignalCatcher:
    """Records the signal it caught; a second one of the same kind ends the process at once."""

    def __init__(self) -> None:
        self.caught = 0
        """the signal's number, or 0"""
        self._handlers = {}

    def start(self) -> None:
        if threading.current_thread() is threading.main_thread():  # Python allows handlers only there
            self._handlers = {s: signal.signal(s, self._catch) for s in SIGNALS}

    def stop(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _catch(self, number: int, _frame: object) -> None:
        self.caught = number
        signal.signal(number, self._handlers[signal.Signals(number)])
