"""Settings classes whose fields say what they are, so that a page can show a table of them."""

from dataclasses import field, fields
from typing import Any


def setting(default: Any, what: str) -> Any:
    """A field of a settings class, with a text that says what it is; `described` shows it."""
    return field(default=default, metadata={"what": what})


def described(settings: Any) -> list[tuple[str, Any, str]]:
    """(name, value, what it is) of every `setting` of a settings object."""
    rows = []
    for entry in fields(settings):
        value = getattr(settings, entry.name)
        what = entry.metadata["what"]
        rows.append((entry.name, value, what))
    return rows
