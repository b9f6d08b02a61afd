"""The one error of all rooms that means: the reader can mend this."""

from __future__ import annotations  # any Python from 3.7 on reads this file


class UserError(ValueError):
    """A mistake that the reader can fix, or a machine's trouble: shown as its one or two lines.

    Every room raises this class, and only this class is shown without a traceback. Any other
    exception is a bug of ours (or of a library) and keeps its traceback. The text names the file or
    the setting and says what to do.
    """

    def _render_traceback_(self) -> list[str]:
        """IPython calls this instead of printing a traceback."""
        return [f"Error: {self}"]
