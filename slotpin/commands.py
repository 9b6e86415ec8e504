"""What each command does: call, and print what came of it.

`serve` stays in memory for days, so what it does not need is imported by the command that needs it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from slotpin import service
from slotpin.checks.port import check_port
from slotpin.config import Loaded, as_json, describe, find_config, load
from slotpin.errors import UserError, printable
from slotpin.greeting import Start
from slotpin.llama.launch import free_port, lazy_kv_args, server_args
from slotpin.loop import run

if TYPE_CHECKING:
    from slotpin.llama.build import BuildOptions
    from slotpin.observe.ask import Place
    from slotpin.pi.setup import Plan


def serve(options: argparse.Namespace) -> None:
    load_settings = _loader(options, {})
    _check_port(load_settings())
    run(service.serve(load_settings, Start(options.config)))


def _check_port(loaded: Loaded) -> None:
    asyncio.run(check_port(loaded.settings.listen, by_make="MAKELEVEL" in os.environ))


_SERVER_HOST = "127.0.0.1"
_SPLIT_POOL = frozenset({"--no-kv-unified", "-no-kvu"})
_ADDRESS_FLAGS = {
    "--host": "it always listens on 127.0.0.1, and slotpin's own address is set with --host before the --",
    "--port": "use --server-port before the --",
}


def up(options: argparse.Namespace) -> None:
    from slotpin.llama.build import build_server
    from slotpin.llama.model import check_model, default_model

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
    run(service.up(load_settings, start, binary, args, _SERVER_HOST, port))


def _own_binary(path: Path) -> Path:
    if not os.access(path, os.X_OK) or path.is_dir():
        raise UserError(f"--binary {path}: not a program; give the path of a llama-server")
    return path.absolute()


def build(options: argparse.Namespace) -> None:
    from slotpin.llama.build import build_server, check_patches

    if options.check:
        series = check_patches(_build_options(options), _report)
        print(f"{len(series.patches)} patches apply: {', '.join(series.names) or 'none'}")
        return
    print(build_server(_build_options(options), _report).path)


def _build_options(options: argparse.Namespace) -> BuildOptions:
    from slotpin.llama.build import BuildOptions

    return BuildOptions(options.source, options.patches, tuple(options.cmake_arg), options.jobs)


def doctor(options: argparse.Namespace) -> int:
    from slotpin.checks import doctor as examining
    from slotpin.checks import findings

    file = None
    with contextlib.suppress(UserError):  # which is the first that doctor finds
        file = find_config(options.config, os.environ, _here())
    how = examining.Options(options.probe, os.environ, file)
    found = asyncio.run(examining.examine(lambda: _loader(options, {})(), how))
    if options.json:
        print(json.dumps(findings.as_json(found), indent=2, ensure_ascii=False))
    else:
        print("\n".join(findings.lines(found)))
    return findings.exit_code(found)


def verify(options: argparse.Namespace) -> int:
    from slotpin.checks import verify as verifying

    settings = _loader(options, {})().settings
    result = asyncio.run(verifying.verify(settings, options.tokens, compare=not options.no_direct, say=_report))
    if options.json:
        print(json.dumps(result.as_json(), indent=2, ensure_ascii=False))
    else:
        print("\n".join(verifying.lines(result)))
    return 0 if result.kept else 1


def status(options: argparse.Namespace) -> None:
    from slotpin.observe import ask
    from slotpin.observe import top as screens

    place = _place(options)
    if options.json:
        print(json.dumps(json.loads(asyncio.run(ask.status(place))), indent=2, ensure_ascii=False))
    else:
        asyncio.run(screens.status(place))


def top(options: argparse.Namespace) -> None:
    from slotpin.observe import top as screens

    asyncio.run(screens.top(_place(options), options.interval, options.count))


def explain(options: argparse.Namespace) -> None:
    from slotpin.observe import ask

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


def _place(options: argparse.Namespace) -> Place:
    """Where the slotpin is that a command asks."""
    from slotpin.checks.client import own_key
    from slotpin.observe.ask import Place

    listen = _loader(options, {})().settings.listen
    if options.url is None:
        return Place(listen.url, own_key(listen))
    url: str = options.url.rstrip("/").removesuffix("/v1")
    if not url.startswith(("http://", "https://", "unix:/")):
        raise UserError(f"--url {options.url}: write http://HOST:PORT or unix:/PATH")
    try:
        urlsplit(url).port  # noqa: B018
    except ValueError as error:
        raise UserError(f"--url {options.url}: {error}; write http://HOST:PORT") from None
    return Place(url, own_key(listen))


def pi_setup(options: argparse.Namespace) -> None:
    from slotpin.checks.client import key_for_requests
    from slotpin.pi import setup as pi
    from slotpin.pi.folder import agent_folder
    from slotpin.pi.served import look

    settings = _loader(options, {})().settings
    url, folder = settings.listen.url, agent_folder(os.environ)
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


def pi_remove(options: argparse.Namespace) -> None:
    from slotpin.pi import setup as pi
    from slotpin.pi.folder import agent_folder

    if _agreed(pi.plan_removal(agent_folder(os.environ)), options, "done: nothing was left to undo"):
        print("done")


def _agreed(plan: Plan, options: argparse.Namespace, nothing: str) -> bool:
    """Show the plan and carry it out; whether that was done."""
    from slotpin.pi import setup as pi

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


def config_check(options: argparse.Namespace) -> None:
    path: Path | None = options.file or find_config(None, os.environ, _here())
    if path is None:
        print("no configuration file, the defaults are in force")
        return
    # The file alone: a variable must neither hide nor cause a finding.
    loaded = load(path, {}, {})
    for note in loaded.notes:
        print(f"{path}: note: {note}")
    print(f"{path}: valid")


def config_show(options: argparse.Namespace) -> None:
    loaded = _loader(options, {})()
    if options.json:
        print(json.dumps(as_json(loaded), indent=2, ensure_ascii=False))
        return
    print(f"# file: {loaded.path or 'none'}")
    for note in loaded.notes:
        print(f"# note: {note}")
    print("\n".join(describe(loaded)))


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
