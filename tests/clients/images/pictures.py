"""What the scripts of this folder share: a picture that the demo model knows, and what is in it."""

import base64
import os
from pathlib import Path

MODEL = os.environ["WEFT_TEST_MODEL"]
URL = os.environ["WEFT_TEST_URL"]
"""Of the REST edge, without /v1."""
SCENES = Path(os.environ["WEFT_TEST_SCENES"])
PICTURE = (SCENES / "elephant.jpg").read_bytes()
BARE = base64.b64encode(PICTURE).decode()
DATA_URL = f"data:image/jpeg;base64,{BARE}"
QUESTION = "What is in the picture?"
ANSWER = "An elephant."


def is_named(text: str | None) -> bool:
    """Whether a text names what is in the picture."""
    return "elephant" in (text or "").lower()
