from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from pathlib import Path

import aiohttp
import psutil
import pytest

from slotpin.errors import UserError
from slotpin.llama import launch
from slotpin.llama.guard import guarded, tied
from slotpin.llama.launch import LlamaServer, free_port, server_args, telling_error
from tests.support.llama import HOST, running_server, stock_binary
from tests.support.processes import is_alive, read_line, start_python, wait_until
from tests.support.tiny_model import full_attention

RUN_SERVER = """
import asyncio, pathlib, sys
from slotpin.llama.launch import LlamaServer, free_port, server_args

async def main():
    binary, model, log, guard = sys.argv[1:]
    port = free_port("127.0.0.1", 0)
    args = server_args(pathlib.Path(model), "127.0.0.1", port)
    server = LlamaServer(pathlib.Path(binary), args, "127.0.0.1", port, pathlib.Path(log), guard=guard == "guard")
    await server.start()
    await server.wait_ready()
    print(server.pid, port)
    await server.wait()

asyncio.run(main())
"""

GUARDS = [False, True]


def script(folder: Path, text: str) -> Path:
    path = folder / "server"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def server_of(binary: Path, folder: Path, *args: str, guard: bool = False) -> LlamaServer:
    return LlamaServer(binary, args, HOST, free_port(HOST, 0), folder / "server.log", guard=guard)


def test_the_arguments_are_slotpins_own_and_then_the_users() -> None:
    args = server_args(Path("m.gguf"), "::1", 8080, parallel=3, ctx_size=4096, extra=["--no-kv-unified", "-np", "4"])
    assert args == [
        *("--model", "m.gguf", "--host", "::1", "--port", "8080", "--parallel", "3", "--ctx-size", "4096"),
        *("--kv-unified", "--no-cache-idle-slots", "--slots", "--no-kv-unified", "-np", "4"),
    ]


def test_a_later_flag_wins_on_the_real_server() -> None:
    async def slots(*flags: str) -> list[int]:
        async with (
            running_server(full_attention(), *flags) as server,
            aiohttp.ClientSession() as session,
            session.get(f"{server.base_url}/slots") as response,
        ):
            return [slot["n_ctx"] for slot in await response.json()]

    assert asyncio.run(slots()) == [32768, 32768]
    assert asyncio.run(slots("--parallel", "4", "--no-kv-unified", "-c", "8192")) == [2048] * 4


def test_a_free_port_is_kept_and_a_taken_one_replaced() -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        other = free_port(HOST, port)
        assert other not in (0, port)
    assert free_port(HOST, other) == other


def test_an_address_of_another_machine_is_a_users_error() -> None:
    with pytest.raises(UserError, match=r"cannot listen on 192\.0\.2\.1"):
        free_port("192.0.2.1", 8080)


@pytest.mark.parametrize("guard", GUARDS)
def test_it_dies_with_a_slotpin_that_was_killed(tmp_path: Path, guard: bool) -> None:
    arguments = [str(stock_binary()), str(full_attention()), str(tmp_path / "log"), "guard" if guard else "tied"]
    with start_python(RUN_SERVER, *arguments) as process:
        _, port = map(int, read_line(process).split())
        server = listener(port)
        assert is_alive(server)
        process.kill()
    wait_until(lambda: not is_alive(server), "llama-server is gone")


def listener(port: int) -> int:
    """The id of the process with `--port PORT`, found by its command line."""
    commands = {process.pid: process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])}
    (pid,) = (
        pid
        for pid, command in commands.items()
        if command and Path(command[0]).name == "llama-server" and f"--port {port} " in " ".join(command)
    )
    return pid


def test_tied_to_a_parent_that_is_gone_already_it_is_not_started() -> None:
    command = tied(["/bin/echo", "started"])
    command[command.index(str(os.getpid()))] = "0"
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode != 0
    assert (done.stdout, done.stderr) == ("", "error: the parent process is gone\n")


def test_guarded_by_a_life_line_that_has_ended_already_it_is_killed() -> None:
    command = guarded(["/bin/sleep", "600"])
    assert subprocess.run(command, stdin=subprocess.DEVNULL, start_new_session=True).returncode != 0


@pytest.mark.parametrize("guard", GUARDS)
def test_stop_ends_the_real_server_in_order_and_frees_its_port(tmp_path: Path, guard: bool) -> None:
    port = free_port(HOST, 0)
    args = server_args(full_attention(), HOST, port)
    server = LlamaServer(stock_binary(), args, HOST, port, tmp_path / "log", guard=guard)

    async def go() -> int:
        await server.start()
        await server.wait_ready()
        process = listener(port)
        await server.stop()
        return process

    process = asyncio.run(go())
    assert not is_alive(process)
    assert server.returncode == 0
    assert free_port(HOST, port) == port


@pytest.mark.parametrize("guard", GUARDS)
def test_a_server_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, guard: bool) -> None:
    monkeypatch.setattr(launch, "STOP_SECONDS", 0.2)
    pid_file = tmp_path / "pid"
    binary = script(tmp_path, f"trap '' TERM; echo $$ > {pid_file}; while :; do sleep 0.1; done")

    async def go() -> None:
        server = server_of(binary, tmp_path, guard=guard)
        await server.start()
        wait_until(lambda: pid_file.exists() and pid_file.read_text() != "", "the server runs")
        await server.stop()

    asyncio.run(go())
    wait_until(lambda: not is_alive(int(pid_file.read_text())), "the server is gone")


@pytest.mark.parametrize("guard", GUARDS)
def test_the_exit_status_is_the_servers(tmp_path: Path, guard: bool) -> None:
    async def go() -> int:
        server = server_of(script(tmp_path, "exit 7"), tmp_path, guard=guard)
        await server.start()
        return await server.wait()

    assert asyncio.run(go()) == 7


def test_stop_without_start_does_nothing(tmp_path: Path) -> None:
    asyncio.run(server_of(tmp_path / "missing", tmp_path).stop())


def start_and_fail(server: LlamaServer) -> UserError:
    async def go() -> None:
        try:
            await server.start()
            await server.wait_ready()
        finally:
            await server.stop()

    with pytest.raises(UserError) as caught:
        asyncio.run(go())
    assert caught.value.exit_code == 1
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.mark.parametrize("guard", GUARDS)
def test_a_model_that_cannot_be_loaded_is_one_line_with_the_log(tmp_path: Path, guard: bool) -> None:
    model = tmp_path / "bad.gguf"
    model.write_bytes(b"GGUF" + bytes(100))
    # It listens before it loads, so its port has to be free.
    port = str(free_port(HOST, 0))
    server = server_of(stock_binary(), tmp_path, "--model", str(model), "--port", port, guard=guard)
    message = str(start_and_fail(server))
    assert message.startswith("llama-server ended before it was ready: gguf_init")
    assert message.endswith(f"(log: {server.log_path})")
    assert "failed to load model" in server.log_path.read_text()


def test_a_flag_that_the_server_does_not_know_is_named(tmp_path: Path) -> None:
    assert "invalid argument: --bogus" in str(start_and_fail(server_of(stock_binary(), tmp_path, "--bogus")))


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        server = LlamaServer(stock_binary(), [], HOST, port, tmp_path / "log")
        assert f"{HOST}:{port}: Address already in use" in str(start_and_fail(server))


def test_a_missing_binary_is_named(tmp_path: Path) -> None:
    assert f"{tmp_path}/missing is not a program" in str(start_and_fail(server_of(tmp_path / "missing", tmp_path)))


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:1"), ("0.0.0.0", "http://127.0.0.1:1"), ("::", "http://[::1]:1")],
)
def test_the_base_url_can_be_connected_to(tmp_path: Path, host: str, url: str) -> None:
    assert LlamaServer(tmp_path, [], host, 1, tmp_path).base_url == url


@pytest.mark.parametrize(
    ("log", "error"),
    [
        ("0.00.004.437 I srv x\n0.00.004.542 E gguf: bad\n0.00.004.6 E later\n", "gguf: bad"),
        ("error: invalid argument: --x\n", "error: invalid argument: --x"),
        ("one\ntwo\n", "two"),
        ("", "it wrote nothing"),
    ],
)
def test_the_first_error_is_the_telling_one(log: str, error: str) -> None:
    assert telling_error(log) == error
