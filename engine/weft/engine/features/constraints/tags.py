"""Structural tags: free text in which each trigger begins a tag with constrained content.

The form is vLLM's: `{"structures": [{"begin", "schema", "end"}], "triggers": [...]}`, alone or as
the object of `response_format` with its type.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

MAX_TAGS = 128


def convert_tags(text: str, json_rule: Callable[[str], str]) -> str:
    """A grammar of text with tags.

    Args:
        text: The tags, as JSON.
        json_rule: Writes the grammar's rule for a value of a JSON schema.

    Raises:
        ValueError: The tags are malformed, or a schema cannot be enforced.
    """
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from None
    structures = _field(given, "structures", list, "#")
    triggers = _field(given, "triggers", list, "#")
    if not 0 < len(structures) <= MAX_TAGS or not 0 < len(triggers) <= MAX_TAGS:
        raise ValueError(f"at #: 1 to {MAX_TAGS} structures and triggers are expected")
    for i, trigger in enumerate(triggers):
        if not isinstance(trigger, str) or not trigger:
            raise ValueError(f"at #/triggers/{i}: a text is expected")
    rules: list[str] = []
    of_trigger: dict[str, list[str]] = {trigger: [] for trigger in triggers}
    for i, structure in enumerate(structures):
        at = f"#/structures/{i}"
        begin, end = (_field(structure, name, str, at) for name in ("begin", "end"))
        schema = json.dumps(structure.get("schema", {}))
        trigger = next((one for one in triggers if begin.startswith(one)), None)
        if trigger is None:
            raise ValueError(f"at {at}/begin: it begins with none of the triggers")
        try:
            content = json_rule(schema)
        except ValueError as error:
            raise ValueError(str(error).replace("at #", f"at {at}/schema", 1)) from None
        parts = [json.dumps(begin[len(trigger) :]), content, json.dumps(end)]
        rules.append(f"tag_{i}: " + " ".join(part for part in parts if part != '""'))
        of_trigger[trigger].append(f"tag_{i}")
    used = {trigger: tags for trigger, tags in of_trigger.items() if tags}
    for i, (trigger, tags) in enumerate(used.items()):
        rules.append(f"until_{i}[lazy]: TEXT {json.dumps(trigger)}")
        rules.append(f"part_{i}: until_{i} ({' | '.join(tags)})")
    parts_ = " | ".join(f"part_{i}" for i in range(len(used)))
    return "\n".join([f"start: ({parts_})* rest", "rest: TEXT", r"TEXT: /(?s:.*)/", *rules])


def _field(given: Any, name: str, kind: type, at: str) -> Any:
    value = given.get(name) if isinstance(given, dict) else None
    if not isinstance(value, kind):
        raise ValueError(f"at {at}/{name}: {'a list' if kind is list else 'a text'} is expected")
    return value
