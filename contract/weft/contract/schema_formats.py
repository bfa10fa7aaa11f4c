"""Formats of strings. They are patterns where llguidance has none, or is too lenient."""

from __future__ import annotations

_LEAP = "(0[48]|[2468][048]|[13579][26])"
_YEAR = "([0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_DATE = (
    f"({_YEAR}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])"
    "|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-8]))"
    f"|([0-9]{{2}}{_LEAP}|{_LEAP}00)-02-29)"
)
_HOURS = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOURS}:[0-5][0-9](\.[0-9]{{1,9}})?(Z|[+-]{_HOURS})"
_CHARACTER = r"([A-Za-z0-9._~!$&'()*+,;=@-]|%[0-9A-Fa-f]{2})"
_HOST = r"([A-Za-z0-9_~-]([A-Za-z0-9._~-]*[A-Za-z0-9_~-])?(:[0-9]{1,5})?)"
_BEHIND_PATH = rf"(\?({_CHARACTER}|[:/?])*)?(#({_CHARACTER}|[:/?])*)?"
_REFERENCE = (
    rf"([A-Za-z][A-Za-z0-9+.-]*:)?//{_HOST}(/({_CHARACTER}|:)*)*{_BEHIND_PATH}"
    rf"|[A-Za-z][A-Za-z0-9+.-]*:(/?({_CHARACTER}|:)+(/({_CHARACTER}|:)*)*)?{_BEHIND_PATH}"
    rf"|(/?{_CHARACTER}+(/({_CHARACTER}|:)*)*|/)?{_BEHIND_PATH}"
)
_LABEL = "[A-Za-z0-9]{1,15}(-[A-Za-z0-9]{1,15}){0,2}"
_BYTE = "(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_POINTER = "(/([^~/]|~[01])*)*"
_VARIABLE = "([A-Za-z0-9_]|%[0-9A-Fa-f]{2})+(:[1-9][0-9]{0,3}|[*])?"
_TEMPLATE = rf"([A-Za-z0-9._~:/?#\[\]@!$&()*+,;=-]|\{{[+#./;?&]?{_VARIABLE}(,{_VARIABLE})*\}})*"

_CLOCK = "([0-9]{1,2}H([0-9]{1,2}M([0-9]{1,2}S)?)?|[0-9]{1,2}M([0-9]{1,2}S)?|[0-9]{1,2}S)"
_DAYS = "([0-9]{1,4}Y([0-9]{1,2}M([0-9]{1,2}D)?)?|[0-9]{1,2}M([0-9]{1,2}D)?|[0-9]{1,4}D)"

MAX_LENGTH = 256
"""Most characters of a string with a format, where the schema has no bound: some formats have no
longest text, and a model that writes at random would not end.
"""
MAX_BASE64_LENGTH = 4096
PATTERNS = {
    "duration": f"P([0-9]{{1,4}}W|{_DAYS}(T{_CLOCK})?|T{_CLOCK})",
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "hostname": rf"{_LABEL}(\.{_LABEL}){{0,4}}",
    "uri-reference": _REFERENCE,
    "iri-reference": _REFERENCE,
    "uri-template": _TEMPLATE,
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(0|[1-9][0-9]*)(#|{_POINTER})",
    "byte": "([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?",
    "base64": "([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?",
    "base64url": "[A-Za-z0-9_-]*",
    "regex": r"\^?(([A-Za-z0-9_ ]|\\[dwsDWS.]|\[\^?[A-Za-z0-9_]{1,16}\])[*+?]?){1,32}\$?",
    "e164": r"\+[1-9][0-9]{6,14}",
    "color": "#[0-9A-Fa-f]{6}",
    "cidrv4": rf"({_BYTE}\.){{3}}{_BYTE}/([12]?[0-9]|3[0-2])",
    "ulid": "[0-7][0-9A-HJKMNP-TV-Z]{25}",
}
"""Dates and times are those of RFC 3339 with the days that the calendar has, without leap seconds,
which few libraries read. References are ASCII (RFC 3986). Host names are short enough by any rule,
and not encoded.
"""
PATTERNS |= dict.fromkeys(("idn-hostname", "host-name"), PATTERNS["hostname"])
BUILT_IN = {
    **{name: name for name in ("email", "ipv4", "ipv6", "uri", "uuid")},
    **{"idn-email": "email", "iri": "uri", "url": "uri", "ip-address": "ipv4", "guid": "uuid"},
}
"""Formats that llguidance has, by their names in JSON Schema."""
OF_NAMES = {
    "email": rf"[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@{_LABEL}(\.{_LABEL})*\.[A-Za-z]{{2,8}}",
    "ipv4": rf"({_BYTE}\.){{3}}{_BYTE}",
    "uri": rf"[A-Za-z][A-Za-z0-9+.-]*://{_HOST}(/({_CHARACTER}|:)*)*{_BEHIND_PATH}",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
}
"""Patterns of built-in formats, for names of properties: these have no formats in llguidance."""
FREE = frozenset(
    {"binary", "password", "text", "string", "textarea", "multiline", "markdown", "path"}
)
"""Formats that say how a string is treated, and do not restrict it."""


def is_known(name: str) -> bool:
    """Whether a format says anything; an unknown one is an annotation."""
    return name in PATTERNS or name in BUILT_IN or name in FREE
