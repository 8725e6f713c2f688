"""SIGTERM and Ctrl-C while training: the step is finished and saved before the run ends."""

import os
import signal
import threading
from types import FrameType
from typing import Any


class Interrupted(Exception):
    """A signal ended the run after its state was saved; `exit_code` is 128 and the signal's number."""

    def __init__(self, number: int, step: int) -> None:
        self.exit_code = 128 + number
        name = signal.Signals(number).name
        super().__init__(f"Stopped by {name} after step {step}, which is saved; give the same command to go on.")


class Signals:
    """Notes SIGTERM and SIGINT instead of ending the process, and `says` so on stderr; a second one acts as usual.

    Signals that are ignored stay ignored, and outside the main thread, where Python allows no handlers, all keep their
    usual effect.
    """

    def __init__(self, says: bool = True) -> None:
        self.number, self.says = 0, says
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():
            handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
            self._before = {number: handler for number, handler in handlers.items() if handler is not signal.SIG_IGN}
        for number in self._before:
            signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.number = number
        signal.signal(number, self._before[number])
        if self.says:
            name = signal.Signals(number).name
            # Past Python's buffer, in which the signal may have interrupted a line.
            os.write(2, f"\n{name}: stops after this step, once it is saved; a second {name} aborts.\n".encode())
