from __future__ import annotations

import io

from slotpin.llama.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_one_line_that_updates() -> None:
    terminal, lines = Terminal(), list[str]()
    progress = Progress("building", lines.append, terminal)
    for percent in (0, 1, 2, 100):
        progress.update(percent)
    progress.close()
    assert terminal.getvalue() == "\rbuilding:   0 %\rbuilding:   1 %\rbuilding:   2 %\rbuilding: 100 %\n"
    assert lines == []


def test_elsewhere_a_line_comes_every_ten_percent() -> None:
    output, lines = io.StringIO(), list[str]()
    progress = Progress("building", lines.append, output)
    for percent in (*range(36), 99, 100):
        progress.update(percent)
    progress.close()
    assert [line.split(":")[1].strip() for line in lines] == ["0 %", "10 %", "20 %", "30 %", "99 %", "100 %"]
    assert output.getvalue() == ""
