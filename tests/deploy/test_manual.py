from __future__ import annotations

import subprocess

from tests.support.debian import debian_program
from tools.manual import PAGE, page


def test_the_man_page_is_what_the_command_line_is() -> None:
    assert PAGE.read_text() == page(), "run: python -m tools.manual"


def test_the_man_page_is_well_formed() -> None:
    mandoc = debian_program("mandoc")
    done = subprocess.run([mandoc.path, "-T", "lint", "-W", "error", PAGE], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
