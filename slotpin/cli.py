"""The command line: parse, call, print."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from urllib.parse import urlsplit

from slotpin import __version__
from slotpin.checks import doctor, findings
from slotpin.checks import verify as verifying
from slotpin.checks.client import key_for_requests, own_key
from slotpin.checks.port import check_port
from slotpin.completion import SHELLS, script
from slotpin.config import Loaded, as_json, describe, find_config, load
from slotpin.errors import UserError, printable
from slotpin.greeting import Start
from slotpin.llama.build import BuildOptions, build_server, check_patches
from slotpin.llama.launch import DEFAULT_CTX_SIZE, DEFAULT_PARALLEL, free_port, lazy_kv_args, server_args
from slotpin.llama.model import check_model, default_model
from slotpin.llama.series import choose
from slotpin.llama.source import SDIST
from slotpin.loop import run
from slotpin.observe import ask
from slotpin.pi import setup as pi
from slotpin.pi.folder import agent_folder
from slotpin.pi.served import look
from slotpin.service import serve, up


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
    if after and options.command is not _up:
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

    serve_parser = _command(commands, "serve", _serve, "run the proxy in front of a llama-server that is running")
    _add_settings(serve_parser)

    up_parser = _command(
        commands, "up", _up, "build and start llama-server, and the proxy in front of it", "[-- LLAMA_SERVER_ARG ...]"
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

    build_parser = _command(commands, "build", _build, "build llama-server into the cache folder and print its path")
    _add_build(build_parser)
    build_parser.add_argument("--check", action="store_true", help="only see whether the patches apply")

    doctor_parser = _command(commands, "doctor", _doctor, "look for what endangers the main conversation's cache")
    _add_settings(doctor_parser)
    doctor_parser.add_argument(
        "--probe",
        action=argparse.BooleanOptionalAction,
        help="send two short prompts to slots that nobody uses, to see whether idle slots are cleared "
        "(default: only while no slot is in use)",
    )
    doctor_parser.add_argument("--json", action="store_true", help="as JSON")

    verify_parser = _command(
        commands, "verify", _verify, "hold a short conversation and count what of its cache survives a side request"
    )
    verify_parser.epilog = (
        f"It evaluates about {verifying.cost():,} prompt tokens (3.4 times --tokens), more where a cache is lost, and "
        "uses the main slot: a conversation that is there loses its place to it, as to any other conversation. Through "
        "slotpin and then without it, where the server takes the slot that was least recently used; --no-direct leaves "
        "that out. Exit status: 0 main kept its cache, 1 it did not, 2 it could not be run."
    )
    _add_settings(verify_parser)
    verify_parser.add_argument(
        "--tokens",
        type=_verify_tokens,
        default=verifying.DEFAULT_TOKENS,
        metavar="N",
        help="length of the main prompt (default: %(default)s)",
    )
    verify_parser.add_argument("--no-direct", action="store_true", help="leave out the run without slotpin")
    verify_parser.add_argument("--json", action="store_true", help="as JSON")

    status_parser = _command(commands, "status", _status, "show slots, conversations and warnings of a running slotpin")
    _add_url(status_parser)
    status_parser.add_argument("--json", action="store_true", help="as JSON")

    top_parser = _command(commands, "top", _top, "the same, live; q ends it")
    _add_url(top_parser)
    top_parser.add_argument(
        "--interval", type=_seconds, default=1.0, metavar="SECONDS", help="between two looks (default: 1)"
    )
    top_parser.add_argument("--count", type=_positive, metavar="N", help="end after so many looks")

    explain_parser = _command(
        commands, "explain", _explain, "say why a request went where it went, and what its cache did"
    )
    explain_parser.add_argument(
        "request", nargs="?", default="latest", metavar="REQUEST_ID", help="or its beginning (default: the latest one)"
    )
    _add_url(explain_parser)
    explain_parser.add_argument("--json", action="store_true", help="as JSON")

    pi_parser = commands.add_parser("pi", help="set Pi up for slotpin, or undo that")
    pi_commands = pi_parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    setup_parser = _command(
        pi_commands, "setup", _pi_setup, "add the running slotpin and its companion extension to Pi's agent folder"
    )
    _add_settings(setup_parser)
    setup_parser.add_argument(
        "--api-key",
        metavar="KEY",
        help="what Pi sends as llama-server's API key; '$NAME' names a variable (default: none)",
    )
    _add_pi_files(setup_parser)
    setup_parser.add_argument("--print", action="store_true", help="print the files as they would be, change nothing")
    remove_parser = _command(pi_commands, "remove", _pi_remove, "undo slotpin pi setup")
    _add_pi_files(remove_parser)

    config_parser = commands.add_parser("config", help="check or show the configuration")
    config_commands = config_parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    check_parser = _command(config_commands, "check", _config_check, "check a configuration file")
    check_parser.add_argument("file", nargs="?", type=Path, metavar="FILE", help="default: the one in force")
    show_parser = _command(config_commands, "show", _config_show, "show each value in force and where it came from")
    _add_settings(show_parser)
    show_parser.add_argument("--json", action="store_true", help="as JSON")

    completion_parser = _command(commands, "completion", _completion, "print what makes a shell complete this command")
    completion_parser.add_argument("shell", choices=SHELLS)
    return parser


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
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
    return _whole_number(text, verifying.LEAST_TOKENS, 1_000_000)


def _port(text: str) -> int:
    return _whole_number(text, 1, 65535)


def _whole_number(text: str, least: int, most: int) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) <= 10 and least <= int(text) <= most):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} to {most}")
    return int(text)


def _serve(options: argparse.Namespace) -> None:
    load_settings = _loader(options, {})
    _check_port(load_settings())
    run(serve(load_settings, Start(options.config)))


def _check_port(loaded: Loaded) -> None:
    asyncio.run(check_port(loaded.settings.listen, by_make="MAKELEVEL" in os.environ))


_SERVER_HOST = "127.0.0.1"
_SPLIT_POOL = frozenset({"--no-kv-unified", "-no-kvu"})
_ADDRESS_FLAGS = {
    "--host": "it always listens on 127.0.0.1, and slotpin's own address is set with --host before the --",
    "--port": "use --server-port before the --",
}


def _up(options: argparse.Namespace) -> None:
    for flag, instead in _ADDRESS_FLAGS.items():
        if any(argument.partition("=")[0] == flag for argument in options.server_args):
            raise UserError(f"{flag} after --: slotpin has to know where llama-server listens; {instead}")
    # What costs nothing is checked before what takes minutes.
    _check_port(_loader(options, {})())
    model = check_model(options.model) if options.model else None
    port = options.server_port or free_port(_SERVER_HOST, 8080)
    binary = _own_binary(options.binary) if options.binary else build_server(_build_options(options), _report).path
    model = model or default_model(_report)
    extra = ["--alias", model.stem, *lazy_kv_args(binary), *options.server_args]
    args = server_args(model, _SERVER_HOST, port, parallel=options.parallel, ctx_size=options.ctx_size, extra=extra)
    base_url = f"http://{_SERVER_HOST}:{port}/v1"
    forced = {"main.baseUrl": base_url, "compactor.baseUrl": base_url}
    _report(f"starting llama-server with {model.name}")
    load_settings = _loader(options, forced, unset={"llamaCppSlots.enabled": "auto"})
    start = Start(options.config, own_server=True, shared=not _SPLIT_POOL.intersection(options.server_args))
    run(up(load_settings, start, binary, args, _SERVER_HOST, port))


def _own_binary(path: Path) -> Path:
    if not os.access(path, os.X_OK) or path.is_dir():
        raise UserError(f"--binary {path}: not a program; give the path of a llama-server")
    return path.absolute()


def _build(options: argparse.Namespace) -> None:
    if options.check:
        series = check_patches(_build_options(options), _report)
        print(f"{len(series.patches)} patches apply: {', '.join(series.names) or 'none'}")
        return
    print(build_server(_build_options(options), _report).path)


def _build_options(options: argparse.Namespace) -> BuildOptions:
    return BuildOptions(options.source, options.patches, tuple(options.cmake_arg), options.jobs)


def _doctor(options: argparse.Namespace) -> int:
    file = None
    with contextlib.suppress(UserError):  # which is the first that doctor finds
        file = find_config(options.config, os.environ, _here())
    how = doctor.Options(options.probe, os.environ, file)
    found = asyncio.run(doctor.examine(lambda: _loader(options, {})(), how))
    if options.json:
        print(json.dumps(findings.as_json(found), indent=2, ensure_ascii=False))
    else:
        print("\n".join(findings.lines(found)))
    return findings.exit_code(found)


def _verify(options: argparse.Namespace) -> int:
    settings = _loader(options, {})().settings
    result = asyncio.run(verifying.verify(settings, options.tokens, compare=not options.no_direct, say=_report))
    if options.json:
        print(json.dumps(result.as_json(), indent=2, ensure_ascii=False))
    else:
        print("\n".join(verifying.lines(result)))
    return 0 if result.kept else 1


def _status(options: argparse.Namespace) -> None:
    place = _place(options)
    if options.json:
        print(json.dumps(json.loads(asyncio.run(ask.status(place))), indent=2, ensure_ascii=False))
    else:
        from slotpin.observe.top import status  # what draws is loaded by nothing else

        asyncio.run(status(place))


def _top(options: argparse.Namespace) -> None:
    from slotpin.observe.top import top

    asyncio.run(top(_place(options), options.interval, options.count))


def _explain(options: argparse.Namespace) -> None:
    found = asyncio.run(ask.explain(_place(options), options.request))
    if options.json:
        print(json.dumps(json.loads(bytes(found.request)), indent=2, ensure_ascii=False))
    else:
        print(printable("\n".join(f"{heading:<13} {text}" for heading, text in found.explained)))


def _here() -> Path:
    try:
        return Path.cwd()
    except FileNotFoundError:
        raise UserError("the current folder has been deleted; change into another one") from None


def _place(options: argparse.Namespace) -> ask.Place:
    """Where the slotpin is that a command asks."""
    listen = _loader(options, {})().settings.listen
    if options.url is None:
        return ask.Place(doctor.listen_url(listen), own_key(listen))
    url: str = options.url.rstrip("/").removesuffix("/v1")
    if not url.startswith(("http://", "https://", "unix:/")):
        raise UserError(f"--url {options.url}: write http://HOST:PORT or unix:/PATH")
    try:
        urlsplit(url).port  # noqa: B018
    except ValueError as error:
        raise UserError(f"--url {options.url}: {error}; write http://HOST:PORT") from None
    return ask.Place(url, own_key(listen))


def _pi_setup(options: argparse.Namespace) -> None:
    settings = _loader(options, {})().settings
    url, folder = doctor.listen_url(settings.listen), agent_folder(os.environ)
    key = options.api_key or pi.known_key(folder)
    if settings.listen.host.startswith("unix:"):
        raise UserError(f"Pi can't use a unix socket ({settings.listen.host}); set listen.host to 127.0.0.1")
    sent = pi.key_sent(key, os.environ) or key_for_requests(settings)
    found = asyncio.run(look(url, sent, pi_has_key=key is not None))
    plan = pi.plan_setup(folder, url, key, found)
    if options.print:
        print(pi.contents(plan), end="")
    elif _agreed(plan, options, "set up already: nothing to change"):
        print(f"done; now run: pi --model {pi.first_model(found)}")


def _pi_remove(options: argparse.Namespace) -> None:
    if _agreed(pi.plan_removal(agent_folder(os.environ)), options, "done: nothing was left to undo"):
        print("done")


def _agreed(plan: pi.Plan, options: argparse.Namespace, nothing: str) -> bool:
    """Show the plan and carry it out; whether that was done."""
    asks = not (plan.is_empty or options.yes or options.dry_run)
    if asks and not sys.stdin.isatty():
        raise UserError("this changes Pi's files: run it on a terminal, which asks first, or with --yes")
    for line in (*plan.notes, *pi.differences(plan)):
        print(line)
    if options.dry_run:
        print("nothing was changed (--dry-run)")
        return False
    if asks and not _says_yes("Change these files? [y/N] "):
        print("nothing was changed")
        return False
    pi.carry_out(plan)
    if plan.is_empty:
        print(nothing)
    return not plan.is_empty


def _says_yes(question: str) -> bool:
    try:
        return input(question).strip().lower() in ("y", "yes")
    except EOFError:
        print()
        return False


def _config_check(options: argparse.Namespace) -> None:
    path: Path | None = options.file or find_config(None, os.environ, _here())
    if path is None:
        print("no configuration file, the defaults are in force")
        return
    # The file alone: a variable must neither hide nor cause a finding.
    loaded = load(path, {}, {})
    for note in loaded.notes:
        print(f"{path}: note: {note}")
    print(f"{path}: valid")


def _config_show(options: argparse.Namespace) -> None:
    loaded = _loader(options, {})()
    if options.json:
        print(json.dumps(as_json(loaded), indent=2, ensure_ascii=False))
        return
    print(f"# file: {loaded.path or 'none'}")
    for note in loaded.notes:
        print(f"# note: {note}")
    print("\n".join(describe(loaded)))


def _completion(options: argparse.Namespace) -> None:
    print(script(build_parser(), options.shell), end="")


def _loader(
    options: argparse.Namespace, forced: Mapping[str, str], unset: Mapping[str, str] = MappingProxyType({})
) -> Callable[[], Loaded]:
    """Reads the configuration, again at each call.

    `forced` values stand above all but flags, `unset` ones below everything that the user has set.
    """
    overrides = dict(forced)
    flags = {
        "listen.host": options.host,
        "listen.port": options.port,
        "main.baseUrl": options.upstream,
        "llamaCppSlots.enabled": options.enabled,
        "log.format": options.log_format,
        "log.level": options.log_level,
    }
    overrides.update({key: value for key, value in flags.items() if value is not None})
    for assignment in options.set:
        key, equals, value = assignment.partition("=")
        if not equals:
            raise UserError(f"--set {assignment}: write KEY=VALUE, such as --set listen.port=8484")
        overrides[key] = value
    path = find_config(options.config, os.environ, _here())

    def load_now() -> Loaded:
        loaded = load(path, os.environ, overrides)
        missing = {key: value for key, value in unset.items() if loaded.origins[key] == "default"}
        return load(path, os.environ, overrides | missing) if missing else loaded

    return load_now


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
