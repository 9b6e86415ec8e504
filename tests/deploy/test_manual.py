from __future__ import annotations

import os
import subprocess

from tests.support.needs import needed
from tools.manual import PAGE, page


def test_the_man_page_is_what_the_command_line_is() -> None:
    assert PAGE.read_text() == page(), "run: python -m tools.manual"


def test_the_man_page_is_well_formed() -> None:
    mandoc = needed("mandoc")
    command = [str(mandoc.path), "-T", "lint", "-W", "error", str(PAGE)]
    done = subprocess.run(command, env=os.environ | mandoc.environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
