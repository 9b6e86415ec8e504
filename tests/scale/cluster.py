"""Three nodes, each a real llama-server with a slotpin of its own, and the balancers of `deploy/` in front of them."""

from __future__ import annotations

import csv
import json
import os
import random
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from slotpin.llama.launch import free_port
from tests.real.client import Answer, fetch
from tests.real.prompts import prose
from tests.real.servers import Llama, llama
from tests.support.llama import HOST
from tests.support.needs import needed
from tests.support.processes import wait_until
from tests.support.program import TOP, Program

CHAT = "/v1/chat/completions"
SLOTS = 10
# What is re-used was in the slot: there is nothing else to take it from.
FLAGS = ("--parallel", str(SLOTS), "--kv-unified", "--no-cache-idle-slots", "--cache-ram", "0", "--ctx-size", "32768")
HEADERS = ("X-Slotpin-Session", "X-Session-Affinity", "session_id", "X-Claude-Code-Session-Id")
# What stands in the files of deploy/ for people to change.
ADDRESSES = ("10.0.0.11:8484", "10.0.0.12:8484", "10.0.0.13:8484")
PEERS = ("10.0.0.1:10000", "10.0.0.2:10000")
ADMIN_SOCKET = "/run/haproxy/admin.sock"


class Addressed(Protocol):
    @property
    def address(self) -> str: ...


class Node:
    """slotpin in front of one llama-server; it can be killed, and started again on the same port."""

    def __init__(self, name: str, home: Path, server: Llama) -> None:
        self.name, self.server = name, server
        self.address = f"{HOST}:{free_port(HOST, 0)}"
        self._home = home
        config = {
            "listen": {"port": int(self.address.split(":")[1])},
            "main": {"baseUrl": f"{server.url}/v1"},
            "llamaCppSlots": {"enabled": "auto"},
            "log": {"format": "json"},
        }
        home.mkdir()
        (home / "slotpin.json").write_text(json.dumps(config))
        self.start()

    def start(self) -> None:
        self.slotpin = Program(self._home, "serve", "--config", "slotpin.json")

    def ready(self) -> bool:
        return bool(self.slotpin.url)

    def kill(self) -> None:
        self.slotpin.process.kill()
        self.slotpin.process.wait()


@contextmanager
def nodes(home: Path) -> Iterator[list[Node]]:
    with ExitStack() as stack:
        started = [
            Node(f"node{number}", home / f"node{number}", stack.enter_context(llama(*FLAGS, patched=True)))
            for number in (1, 2, 3)
        ]
        try:
            assert all(node.ready() for node in started)
            yield started
        finally:
            for node in started:
                node.kill()


@dataclass
class Balancer:
    url: str
    process: subprocess.Popen[bytes]
    admin: Path
    log: Path

    def command(self, text: str) -> str:
        """HAProxy's answer on its admin socket."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self.admin))
            connection.sendall(f"{text}\n".encode())
            return b"".join(iter(lambda: connection.recv(65536), b"")).decode()

    def status(self, node: Node) -> str:
        """As the statistics name it: UP, DOWN, DRAIN, …"""
        rows = csv.DictReader(self.command("show stat").removeprefix("# ").splitlines())
        return next(row["status"] for row in rows if (row["pxname"], row["svname"]) == ("slotpin", node.name))

    @property
    def known(self) -> int:
        """Sessions in its table."""
        return self.command("show table by_session").count(" use=")


def filled_in(text: str, replacements: dict[str, str]) -> str:
    """A file of `deploy/` with this machine's addresses in the place of what people have to change."""
    for old, new in replacements.items():
        assert old in text, old
        text = text.replace(old, new)
    return text


@contextmanager
def haproxy(home: Path, cluster: Sequence[Addressed], count: int = 1) -> Iterator[list[Balancer]]:
    """As many balancers, at most two, with deploy/haproxy/haproxy.cfg."""
    program = needed("haproxy")
    peers = [f"{HOST}:{free_port(HOST, 0)}" for _ in PEERS]
    started: list[Balancer] = []
    try:
        for number in range(count):
            port, admin = free_port(HOST, 0), home / f"lb{number + 1}.sock"
            config = filled_in(
                (TOP / "deploy/haproxy/haproxy.cfg").read_text(),
                {
                    **dict(zip(ADDRESSES, (node.address for node in cluster), strict=True)),
                    **dict(zip(PEERS, peers, strict=True)),
                    "bind :8080": f"bind {HOST}:{port}",
                    ADMIN_SOCKET: str(admin),
                    "maxconn 20000": "maxconn 500",
                },
            )
            path, log = home / f"lb{number + 1}.cfg", home / f"lb{number + 1}.log"
            path.write_text(config)
            with log.open("wb") as output:
                process = subprocess.Popen(
                    [str(program.path), "-db", "-L", f"lb{number + 1}", "-f", str(path)],
                    env=os.environ | program.environment,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
            started.append(Balancer(f"http://{HOST}:{port}", process, admin, log))
        for balancer in started:
            wait_until(lambda balancer=balancer: answers(balancer), "HAProxy answers")  # type: ignore[misc]
        yield started
    finally:
        for balancer in started:
            balancer.process.terminate()
            balancer.process.wait(30)


@contextmanager
def nginx(home: Path, cluster: Sequence[Addressed]) -> Iterator[Balancer]:
    """With deploy/nginx/nginx.conf."""
    program = needed("nginx")
    port, path = free_port(HOST, 0), home / "nginx.conf"
    folders = [f"{kind}_temp_path {home}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")]
    config = filled_in(
        (TOP / "deploy/nginx/nginx.conf").read_text(),
        {
            **dict(zip(ADDRESSES, (node.address for node in cluster), strict=True)),
            "listen 8080;": f"listen {HOST}:{port};",
            "worker_processes auto;": f"worker_processes 1;\npid {home}/nginx.pid;\ndaemon off;",
            "http {": "\n    ".join(["http {", *folders]),
        },
    )
    path.write_text(config)
    environment = os.environ | program.environment
    command = [str(program.path), "-p", str(home), "-e", "stderr", "-c", str(path)]
    checked = subprocess.run([*command, "-t"], env=environment, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    assert "[warn]" not in checked.stderr
    log = home / "nginx.log"
    with log.open("wb") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    balancer = Balancer(f"http://{HOST}:{port}", process, home / "none", log)
    try:
        wait_until(lambda: answers(balancer), "nginx answers")
        yield balancer
    finally:
        process.terminate()
        process.wait(30)


def answers(balancer: Balancer) -> bool:
    assert balancer.process.poll() is None, balancer.log.read_text()
    try:
        return fetch(f"{balancer.url}/slotpin/health").status == 200
    except OSError:
        return False


@dataclass
class Session:
    """A conversation of a client that names it in a header. `words`: length of each of its messages."""

    number: int
    words: int = 60
    header: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)
    nodes: list[str] = field(default_factory=list)
    left: int = 0
    """Tokens that its last turn left in its slot."""

    def __post_init__(self) -> None:
        self.header = self.header or HEADERS[self.number % len(HEADERS)]

    @property
    def name(self) -> str:
        return f"session-{self.number}"

    @property
    def headers(self) -> dict[str, str]:
        return {self.header: self.name}

    def body(self, tokens: int = 4, **more: object) -> dict[str, Any]:
        return {"messages": self.messages, "max_tokens": tokens, "temperature": 0, **more}

    def say(self) -> None:
        seed = 1000 * self.number + len(self.messages)
        self.messages.append({"role": "user", "content": f"{self.number}. {prose(self.words, seed)}"})

    def turn(self, url: str) -> Answer:
        self.say()
        answer = fetch(url + CHAT, self.body(), self.headers)
        assert answer.status == 200, answer
        self.messages.append(answer.json["choices"][0]["message"])
        self.nodes.append(answer.headers.get("x-slotpin-node", ""))
        timings = answer.json["timings"]
        self.left = timings["prompt_n"] + timings["cache_n"] + timings["predicted_n"]
        return answer


def mixed(sessions: Sequence[Session], turns: int, seed: int) -> list[Session]:
    """All turns of all sessions in an order in which some sessions say much in a row, as people do."""
    rng = random.Random(seed)
    waiting = [session for session in sessions for _ in range(turns)]
    rng.shuffle(waiting)
    order: list[Session] = []
    while waiting:
        session = waiting.pop()
        order.append(session)
        while session in waiting and rng.random() < 0.6:
            waiting.remove(session)
            order.append(session)
    return order
