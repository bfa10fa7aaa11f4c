"""Notes which functions of the product a process calls; Python imports it at each start.

`bench/chat_way.py` puts this folder on the path of a mesh. While the file CALLS_WHILE exists, each
function is noted at its first call, in order. When the file is gone, the notes are written to
CALLS_INTO as JSON, one file for each process and occasion.
"""

import json
import os
import sys
import threading
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

_LOOK_EVERY_S = 0.02
_seen: dict[CodeType, None] = {}
_is_on = False


def _note(frame: FrameType, event: str, arg: Any) -> None:
    if _is_on and event == "call":
        _seen.setdefault(frame.f_code)


def _watch(flag: Path, folder: Path) -> None:
    global _is_on
    sys.setprofile(None)
    number = 0
    while True:
        time.sleep(_LOOK_EVERY_S)
        if flag.exists() and not _is_on:
            _seen.clear()
            _is_on = True
        elif _is_on and not flag.exists():
            _is_on = False
            calls = [(one.co_filename, one.co_qualname, one.co_firstlineno) for one in list(_seen)]
            told = {"argv": sys.argv, "calls": calls}
            # Renamed when it is whole, since a reader looks for `.json`.
            written = folder / f"{os.getpid()}-{number}.part"
            written.write_text(json.dumps(told))
            written.rename(written.with_suffix(".json"))
            number += 1


if "CALLS_WHILE" in os.environ:
    places = Path(os.environ["CALLS_WHILE"]), Path(os.environ["CALLS_INTO"])
    threading.setprofile(_note)
    sys.setprofile(_note)
    threading.Thread(target=_watch, args=places, daemon=True).start()
