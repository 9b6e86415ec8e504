"""What a user gets wrong costs one line each and exit status 2, never a traceback."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from tests.support.program import Program, assert_lines, run


def config(folder: Path, content: object, name: str = "slotpin.json") -> str:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / name).write_text(text)
    return name


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ({"llamaCppSlot": {}}, "$.llamaCppSlot: unknown key; did you mean llamaCppSlots?"),
        ({"llamaCppSlots": {"mainIdSlot": -1}}, "$.llamaCppSlots.mainIdSlot: -1 is not allowed; use an integer from 0"),
        ({"main": {"baseUrl": "localhost:8080/v1"}}, '$.main.baseUrl: "localhost:8080/v1" has no scheme; did you mean'),
        ({"listen": {"port": 65536}}, "$.listen.port: 65536 is not allowed; use an integer from 0 to 65535"),
        ({"llamaCppSlots": {"enabled": "true"}}, '$.llamaCppSlots.enabled: "true" is not allowed; use false, "auto"'),
    ],
)
def test_a_wrong_value_is_named_with_its_place(tmp_path: Path, content: object, line: str) -> None:
    done = run(tmp_path, "serve", "--config", config(tmp_path, content))
    assert done.returncode == 2
    assert done.stdout == ""
    assert_lines(done.stderr, f"{tmp_path / 'slotpin.json'}: {line}")


def test_up_reads_the_configuration_before_it_builds(tmp_path: Path) -> None:
    done = run(tmp_path, "up", "--config", config(tmp_path, {"listen": {"port": -1}}))
    assert done.returncode == 2
    assert_lines(done.stderr, f"{tmp_path / 'slotpin.json'}: $.listen.port: -1 is not allowed")


def test_several_problems_are_one_line_each(tmp_path: Path) -> None:
    name = config(tmp_path, {"lisen": {}, "llamaCppSlots": {"mainIdSlot": -1}, "main": {"baseUrl": "localhost"}})
    done = run(tmp_path, "serve", "--config", name, "--port", "80x", SLOTPIN_LOG_LEVEL="loud")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 5
    for part in ("lisen", "mainIdSlot: -1", "main.baseUrl", "SLOTPIN_LOG_LEVEL", "listen.port"):
        assert sum(part in line for line in lines) == 1, done.stderr
    assert all(line.startswith("slotpin: ") for line in lines)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('{"listen": {"port": 1,}}', ":1:"),
        ('{"listen":\n{"port": }}', ":2:"),
        ("", ": is empty"),
        ("[]", ": $: an array is not allowed"),
    ],
)
def test_a_file_that_is_no_json_object(tmp_path: Path, text: str, line: str) -> None:
    done = run(tmp_path, "serve", "--config", config(tmp_path, text))
    assert done.returncode == 2
    assert_lines(done.stderr, f"{tmp_path / 'slotpin.json'}{line}")


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    done = run(tmp_path, "serve", "--config", "nowhere.json")
    assert done.returncode == 2
    assert_lines(done.stderr, f"--config: {tmp_path / 'nowhere.json'} does not exist")


def test_a_folder_as_the_file(tmp_path: Path) -> None:
    done = run(tmp_path, "serve", "--config", ".")
    assert done.returncode == 2
    assert_lines(done.stderr, f"{tmp_path}: is a directory")


@pytest.mark.parametrize(
    ("assignment", "line"),
    [
        ("listen.port", "--set listen.port: write KEY=VALUE"),
        ("listen.prt=1", "command line: $.listen.prt: unknown key; did you mean listen.port?"),
        ("listen=1", "command line: $.listen: is a section; set one of its keys"),
        ("listen.port=eighty", 'command line: $.listen.port: "eighty" is not allowed; use an integer'),
        ("recognisers.custom=[", "command line: $.recognisers.custom:"),
    ],
)
def test_a_wrong_assignment(tmp_path: Path, assignment: str, line: str) -> None:
    done = run(tmp_path, "serve", "--set", assignment)
    assert done.returncode == 2
    assert_lines(done.stderr, line)


@pytest.mark.parametrize("command", ["serve", "up"])
def test_a_port_in_use(tmp_path: Path, command: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        model = tmp_path / "model.gguf"
        model.write_bytes(b"GGUF")
        more = ("--binary", "/bin/false", "--model", str(model)) if command == "up" else ()
        done = run(tmp_path, command, "--port", str(port), *more)
    assert done.returncode == 2
    assert done.stdout == ""
    assert_lines(done.stderr, f"cannot listen on 127.0.0.1:{port}: the port is in use; choose another with --port ")


def test_a_port_that_slotpin_has_already(tmp_path: Path) -> None:
    """Said before a llama-server is built or a model fetched, and for who typed `make run` as he has to type it."""
    with Program(tmp_path, "serve", "--port", "0", "--set", 'listen.apiKeys=["k"]') as program:
        port = int(program.url.rpartition(":")[2])
        done = run(tmp_path, "up", "--port", str(port), PATH="/nowhere")
        by_make = run(tmp_path, "up", "--port", str(port), PATH="/nowhere", MAKELEVEL="1")
    there = f"cannot listen on 127.0.0.1:{port}: slotpin already runs there (slotpin status shows it); "
    assert (done.returncode, done.stdout) == (2, "")
    assert_lines(done.stderr, f"{there}choose another port with --port ")
    assert_lines(by_make.stderr, f'{there}choose another port with make run ARGS="--port ')


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-name.invalid"])
def test_an_address_of_another_machine(tmp_path: Path, host: str) -> None:
    done = run(tmp_path, "serve", "--host", host, "--port", "0")
    assert done.returncode == 2
    assert_lines(done.stderr, f"cannot listen on {host}:0: ")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("serv",), "invalid choice: 'serv'"),
        ((), "the following arguments are required: COMMAND"),
        (("config",), "the following arguments are required: COMMAND"),
        (("serve", "--prot", "1"), "unrecognized arguments: --prot 1"),
        (("serve", "--", "--parallel", "3"), "--parallel 3"),
        (("up", "--parallel", "0"), "argument --parallel: '0' is not a whole number from 1"),
        (("up", "--parallel", "two"), "argument --parallel: 'two' is not a whole number"),
        (
            ("up", "--server-port", "70000", "--binary", "/bin/false", "--model", "x"),
            "argument --server-port: '70000' is not a whole number from 1 to 65535",
        ),
    ],
)
def test_a_wrong_command_line(tmp_path: Path, words: tuple[str, ...], complaint: str) -> None:
    done = run(tmp_path, *words)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert complaint in done.stderr.splitlines()[-1]


def test_a_misspelt_variable(tmp_path: Path) -> None:
    done = run(tmp_path, "serve", SLOTPIN_LISTEN_PROT="1")
    assert done.returncode == 2
    assert_lines(done.stderr, "SLOTPIN_LISTEN_PROT: ")


@pytest.mark.parametrize(
    ("model", "complaint"),
    [("missing.gguf", "No such file or directory"), (".", "Is a directory"), ("text.gguf", "not a GGUF file")],
)
def test_a_wrong_model(tmp_path: Path, model: str, complaint: str) -> None:
    (tmp_path / "text.gguf").write_text("once upon a time")
    done = run(tmp_path, "up", "--binary", "/bin/false", "--model", model)
    assert done.returncode == 2
    assert_lines(done.stderr, f"model {model}: {complaint}")


def test_a_wrong_binary(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    done = run(tmp_path, "up", "--binary", "nowhere", "--model", "model.gguf", "--port", "0")
    assert done.returncode != 0
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("slotpin: --binary nowhere: not a program")
