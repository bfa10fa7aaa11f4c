"""What the scripts of this folder share. URLs and keys come from each client's own variables."""

import os
from typing import Any

MODEL = os.environ["WEFT_TEST_MODEL"]
URL = os.environ["WEFT_TEST_URL"]
"""Of the REST edge, without /v1."""
QUESTION = "What is the capital of France?"
ENOUGH = 1024
"""Tokens for any JSON of the schemas here, whose strings and whitespace are bounded."""
WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Tells the weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
