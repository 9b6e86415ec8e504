from __future__ import annotations


class UserError(Exception):
    """A mistake that its user can mend: one line on stderr, no traceback.

    `exit_code` is the process's exit status: 2 for bad input, 1 for a step that failed.
    """

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code
