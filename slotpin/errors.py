from __future__ import annotations


def printable(text: str) -> str:
    """The text as a terminal may show it: what others have said can hold escape sequences."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "\ufffd" for letter in text)


class UserError(Exception):
    """A mistake that its user can mend: one line on stderr, no traceback.

    `exit_code` is the process's exit status: 2 for bad input, 1 for a step that failed.
    """

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(printable(message))
        self.exit_code = exit_code
