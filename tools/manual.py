"""Write the man page, docs/man/slotpin.1, from the command line's own parser.

python -m tools.manual
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from slotpin import __version__
from slotpin.cli import build_parser

PAGE = Path(__file__).parents[1] / "docs" / "man" / "slotpin.1"

OPENING = """\
.TH SLOTPIN 1 "" "slotpin {version}" "User Commands"
.SH NAME
slotpin \\- reverse proxy that keeps llama-server's KV cache for the conversation that owns it
.SH SYNOPSIS
.B slotpin
.RB [ \\-\\-version ]
.I COMMAND
.RI [ option " ...]"
.SH DESCRIPTION
slotpin stands in front of llama.cpp's llama-server.
It gives the main conversation and its side requests slots of their own, streams the answers through untouched, and
refuses a side request, with a reason, rather than risk the conversation's cache.
.SH COMMANDS
"""

CLOSING = """\
.SH ENVIRONMENT
Each key of the configuration has a variable,
.B SLOTPIN_
and its name, such as
.BR SLOTPIN_LISTEN_PORT .
.TP
.B SLOTPIN_CONFIG
The configuration file.
.TP
.B SLOTPIN_CACHE_DIR
Where built servers and models are kept.
.TP
.BR NOTIFY_SOCKET ", " WATCHDOG_USEC ", " LISTEN_FDS
Set by a service manager, see
.BR sd_notify (3)
and
.BR sd_listen_fds (3).
.SH FILES
.TP
.I slotpin.json
In the current folder, else
.I slotpin/slotpin.json
in the user's configuration folder.
.SH EXIT STATUS
.TP
.B 0
Ended by a signal, or the command did its work.
.TP
.B 1
A step failed: a download, the build, llama-server.
.TP
.B 2
Bad input: the configuration, an argument, a port in use.
"""


def page() -> str:
    parser = build_parser()
    return OPENING.format(version=__version__) + "".join(_commands(parser)) + CLOSING


def _commands(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _command(inner)


def _command(parser: argparse.ArgumentParser) -> Iterator[str]:
    if any(isinstance(action, argparse._SubParsersAction) for action in parser._actions):
        yield from _commands(parser)
        return
    options = [action for action in parser._actions if not isinstance(action, argparse._HelpAction)]
    arguments = [
        f" [{_name(action)}]" if action.nargs == "?" else f" {_name(action)}"
        for action in options
        if not action.option_strings
    ]
    tail = (parser.usage or "").partition("[options]")[2]
    yield f".SS {_escaped(parser.prog + ''.join(arguments) + tail)}\n"
    yield ".PP\n".join(_lines(text) for text in (parser.description, parser.epilog) if text)
    yield from (_option(parser, action) for action in options if action.option_strings)


def _option(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    names = ", ".join(f"\\fB{_escaped(option)}\\fR" for option in action.option_strings)
    value = "" if action.nargs == 0 else f" \\fI{_escaped(_name(action))}\\fR"
    text = parser._get_formatter()._expand_help(action) if action.help else ""
    return f".TP\n{names}{value}\n{_lines(text)}"


def _name(action: argparse.Action) -> str:
    if action.choices:
        return "|".join(map(str, action.choices))
    return str(action.metavar or action.dest)


def _lines(text: str) -> str:
    """A sentence a line."""
    sentences = re.split(r"(?<=[a-z]{2}[.:;]) ", " ".join(text.split()))
    return "".join(f"{_escaped(sentence)}\n" for sentence in sentences)


def _escaped(text: str) -> str:
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{text}" if text.startswith((".", "'")) else text


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page())
