"""The command line: what can be typed, and what a mistake looks like."""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from slotpin import __version__
from slotpin import commands as do
from slotpin.checks.cost import DEFAULT_TOKENS, LEAST_TOKENS, cost
from slotpin.completion import SHELLS, script
from slotpin.errors import UserError
from slotpin.llama.launch import DEFAULT_CTX_SIZE, DEFAULT_PARALLEL
from slotpin.llama.series import choose


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the process's exit status."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who started us
            setattr(sys, name, Path(os.devnull).open("w"))  # noqa: SIM115
    try:
        status = _run(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except UserError as error:
        for line in str(error).splitlines():
            print(f"slotpin: {line}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader of our output has left, as `head` does; there is nobody to tell.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print(f"slotpin: the output can't be written: {error.strerror}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


def _run(argv: list[str]) -> int:
    arguments, after = _split(argv)
    options = build_parser().parse_args(arguments)
    if after and options.command is not do.up:
        build_parser().error(f"nothing is passed on after --: {' '.join(after)}")
    options.server_args = after
    status: int | None = options.command(options)
    return status or 0


def _split(argv: list[str]) -> tuple[list[str], list[str]]:
    """What stands after `--` belongs to llama-server."""
    if "--" not in argv:
        return argv, []
    at = argv.index("--")
    return argv[:at], argv[at + 1 :]


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="slotpin",
        description="Keeps llama-server's KV cache for the conversation that owns it.",
        epilog="Configuration: docs/configuration.md",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show what this is, and which llama.cpp it builds")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    serve_parser = _command(commands, "serve", do.serve, "run the proxy in front of a llama-server that is running")
    _add_settings(serve_parser)

    up_parser = _command(
        commands, "up", do.up, "build and start llama-server, and the proxy in front of it", "[-- LLAMA_SERVER_ARG ...]"
    )
    _add_settings(up_parser)
    _add_build(up_parser)
    up_parser.add_argument("--model", type=Path, metavar="FILE", help="GGUF model (default: Gemma 3 270M, downloaded)")
    up_parser.add_argument("--binary", type=Path, metavar="FILE", help="a llama-server of your own; nothing is built")
    up_parser.add_argument(
        "--parallel", type=_positive, default=DEFAULT_PARALLEL, metavar="N", help="slots (default: %(default)s)"
    )
    up_parser.add_argument(
        "--ctx-size",
        type=_positive,
        default=DEFAULT_CTX_SIZE,
        metavar="N",
        help="context of all slots together, in tokens (default: %(default)s)",
    )
    up_parser.add_argument(
        "--server-port", type=_port, metavar="PORT", help="llama-server's port (default: 8080, or a free one)"
    )

    build_parser = _command(commands, "build", do.build, "build llama-server into the cache folder and print its path")
    _add_build(build_parser)
    build_parser.add_argument("--check", action="store_true", help="only see whether the patches apply")

    doctor_parser = _command(commands, "doctor", do.doctor, "look for what endangers the main conversation's cache")
    _add_settings(doctor_parser)
    doctor_parser.add_argument(
        "--probe",
        action=argparse.BooleanOptionalAction,
        help="send two short prompts to slots that nobody uses, to see whether idle slots are cleared "
        "(default: only while no slot is in use)",
    )
    doctor_parser.add_argument("--json", action="store_true", help="as JSON")

    verify_parser = _command(
        commands, "verify", do.verify, "hold a short conversation and count what of its cache survives a side request"
    )
    verify_parser.epilog = (
        f"It evaluates about {cost():,} prompt tokens (3.4 times --tokens), more where a cache is lost, and "
        "uses the main slot: a conversation that is there loses its place to it, as to any other conversation. Through "
        "slotpin and then without it, where the server takes the slot that was least recently used; --no-direct leaves "
        "that out. Exit status: 0 main kept its cache, 1 it did not, 2 it could not be run."
    )
    _add_settings(verify_parser)
    verify_parser.add_argument(
        "--tokens",
        type=_verify_tokens,
        default=DEFAULT_TOKENS,
        metavar="N",
        help="length of the main prompt (default: %(default)s)",
    )
    verify_parser.add_argument("--no-direct", action="store_true", help="leave out the run without slotpin")
    verify_parser.add_argument("--json", action="store_true", help="as JSON")

    status_parser = _command(
        commands, "status", do.status, "show slots, conversations and warnings of a running slotpin"
    )
    _add_url(status_parser)
    status_parser.add_argument("--json", action="store_true", help="as JSON")

    top_parser = _command(commands, "top", do.top, "the same, live; q ends it")
    _add_url(top_parser)
    top_parser.add_argument(
        "--interval", type=_seconds, default=1.0, metavar="SECONDS", help="between two looks (default: 1)"
    )
    top_parser.add_argument("--count", type=_positive, metavar="N", help="end after so many looks")

    explain_parser = _command(
        commands, "explain", do.explain, "say why a request went where it went, and what its cache did"
    )
    explain_parser.add_argument(
        "request", nargs="?", default="latest", metavar="REQUEST_ID", help="or its beginning (default: the latest one)"
    )
    _add_url(explain_parser)
    explain_parser.add_argument("--json", action="store_true", help="as JSON")

    pi_parser = commands.add_parser("pi", help="set Pi up for slotpin, or undo that")
    pi_commands = pi_parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    setup_parser = _command(
        pi_commands, "setup", do.pi_setup, "add the running slotpin and its companion extension to Pi's agent folder"
    )
    _add_settings(setup_parser)
    setup_parser.add_argument(
        "--api-key",
        metavar="KEY",
        help="what Pi sends as llama-server's API key; '$NAME' names a variable (default: none)",
    )
    _add_pi_files(setup_parser)
    setup_parser.add_argument("--print", action="store_true", help="print the files as they would be, change nothing")
    remove_parser = _command(pi_commands, "remove", do.pi_remove, "undo slotpin pi setup")
    _add_pi_files(remove_parser)

    config_parser = commands.add_parser("config", help="check or show the configuration")
    config_commands = config_parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    check_parser = _command(config_commands, "check", do.config_check, "check a configuration file")
    check_parser.add_argument("file", nargs="?", type=Path, metavar="FILE", help="default: the one in force")
    show_parser = _command(config_commands, "show", do.config_show, "show each value in force and where it came from")
    _add_settings(show_parser)
    show_parser.add_argument("--json", action="store_true", help="as JSON")

    completion_parser = _command(commands, "completion", _completion, "print what makes a shell complete this command")
    completion_parser.add_argument("shell", choices=SHELLS)
    return parser


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from slotpin.llama.source import SDIST

        stamp = choose("all").stamp(f"{SDIST.name}-{SDIST.version}")
        print(f"slotpin {__version__}\nllama.cpp {stamp}, source SHA-256 {SDIST.sha256[:12]}")
        parser.exit()


def _command(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    run: Callable[[argparse.Namespace], int | None],
    text: str,
    tail: str = "",
) -> argparse.ArgumentParser:
    usage = f"%(prog)s [options] {tail}" if tail else None
    parser = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.", usage=usage)
    parser.set_defaults(command=run)
    return parser


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="configuration file (default: ./slotpin.json)")
    parser.add_argument("--host", metavar="ADDRESS", help="listen.host")
    parser.add_argument("--port", metavar="PORT", help="listen.port")
    parser.add_argument("--upstream", metavar="URL", help="main.baseUrl")
    parser.add_argument("--enabled", metavar="MODE", help="llamaCppSlots.enabled: false, auto or true")
    parser.add_argument("--log-format", metavar="FORMAT", help="log.format: auto, console or json")
    parser.add_argument("--log-level", metavar="LEVEL", help="log.level: debug, info, warning or error")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="any key of the configuration, by its path"
    )


def _add_url(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", metavar="URL", help="where slotpin listens (default: the configuration's listen)")
    _add_settings(parser)


def _add_pi_files(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--yes", action="store_true", help="don't ask")
    parser.add_argument("--dry-run", action="store_true", help="show what would change, change nothing")


def _add_build(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--source", type=Path, metavar="DIR", help="your own llama.cpp checkout")
    parser.add_argument(
        "--patches", default="all", metavar="NAMES", help="all, none, or names with commas between (default: all)"
    )
    parser.add_argument(
        "--cmake-arg",
        action="append",
        default=[],
        metavar="ARG",
        help="passed to cmake, e.g. --cmake-arg=-DGGML_CUDA=ON",
    )
    parser.add_argument("--jobs", type=_positive, metavar="N", help="compilers at once (default: one a core)")


def _positive(text: str) -> int:
    return _whole_number(text, 1, 2**31 - 1)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0.1 to 3600")
    return seconds


def _verify_tokens(text: str) -> int:
    return _whole_number(text, LEAST_TOKENS, 1_000_000)


def _port(text: str) -> int:
    return _whole_number(text, 1, 65535)


def _whole_number(text: str, least: int, most: int) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 10 and least <= int(text) <= most):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to {most}")
    return int(text)


def _completion(options: argparse.Namespace) -> None:
    print(script(build_parser(), options.shell), end="")
