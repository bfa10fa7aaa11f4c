"""Files that an engine process leaves to explain a stall or crash.

faulthandler writes the stacks, without the interpreter lock. A thread writes the state, if the
engine's thread lets others run. Each step's plan is written before the step, into memory that
outlives the process.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from weft.engine.loop.flight import FlightRecorder

if TYPE_CHECKING:  # Servers, which import this module too, need no torch.
    from weft.engine.loop.engine import Engine

logger = logging.getLogger(__name__)

STACKS, PLAN, STATE = "stacks.txt", "plan.bin", "state.json"
STACKS_SIGNAL, STATE_SIGNAL = signal.SIGUSR2, signal.SIGUSR1
"""Signals that request the stacks, and the state."""
STATE_ENTRIES = 1000
_TRIES = 5
"""Attempts at reading the state, which the engine's thread may change meanwhile."""


class BlackBox:
    """The engine's side: process-wide signal handlers, installed once. The folder for the files
    must exist.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # The file stays open, since a crash handler cannot open files.
        self._stacks = (folder / STACKS).open("wb", buffering=0)
        faulthandler.enable(self._stacks, all_threads=True)
        # Only the stack of the engine's thread, which gets the signal. To walk the frames of
        # threads that are running, such as the one that writes the state, can crash the process.
        faulthandler.register(STACKS_SIGNAL, self._stacks, all_threads=False, chain=False)

    def watch(self, engine: Engine) -> None:
        """Records the engine's plans, and writes its state on `STATE_SIGNAL`."""
        engine.flight = FlightRecorder(self._folder / PLAN)
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        # The handler is empty: the signal's number reaches the wake-up pipe at once, even while the
        # main thread is stuck in a step.
        signal.signal(STATE_SIGNAL, lambda number, frame: None)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        threading.Thread(
            target=self._answer, args=(reader, engine), name="black-box", daemon=True
        ).start()

    def failed(self) -> None:
        """Records the exception with which the main thread ends."""
        self._stacks.write(traceback.format_exc().encode(errors="replace"))

    def _answer(self, reader: int, engine: Engine) -> None:
        while numbers := os.read(reader, 64):
            if STATE_SIGNAL in numbers:
                try:
                    self._write_state(engine)
                except Exception:
                    logger.exception("the state could not be written")

    def _write_state(self, engine: Engine) -> None:
        for attempt in range(_TRIES):
            try:
                state = json.dumps(engine.snapshot(STATE_ENTRIES))
                break
            except RuntimeError:  # a list changed while it was read
                if attempt == _TRIES - 1:
                    raise
        temporary = self._folder / f"{STATE}.tmp"
        temporary.write_text(state)
        temporary.replace(self._folder / STATE)
