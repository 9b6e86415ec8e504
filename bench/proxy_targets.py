"""What `bench.proxy` measures: slotpin as a user starts it, and other proxies, each in front of the same stub."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
import venv
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path

import aiohttp
import psutil

from slotpin import __version__
from slotpin.llama.cache import cache_dir, locked, publish
from slotpin.llama.launch import free_port
from tests.support.debian import UnavailableError, debian_program

HOST = "127.0.0.1"
TOP = Path(__file__).parents[1]
CHAT = "/v1/chat/completions"
READY_SECONDS = 180.0
PACKAGES = {"litellm": "litellm[proxy]==1.108.7", "hearth": "hearth-llm==0.1.1"}

NGINX = """
daemon off;
master_process off;
pid {folder}/pid;
error_log {folder}/error.log;
worker_rlimit_nofile 8192;
events {{ worker_connections 8192; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body;
  proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi;
  scgi_temp_path {folder}/scgi;
  keepalive_requests 1000000;
  upstream stub {{ server 127.0.0.1:{upstream}; keepalive 256; keepalive_requests 1000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    client_max_body_size 0;
    location / {{
      proxy_pass http://stub;
      proxy_http_version 1.1;
      proxy_set_header Connection "";
      proxy_buffering off;
      proxy_request_buffering off;
      proxy_read_timeout 1h;
    }}
  }}
}}
"""
HAPROXY = """
global
  maxconn 8192
  nbthread 1
defaults
  mode http
  option abortonclose
  option http-no-delay
  http-reuse always
  timeout connect 10s
  timeout client 1h
  timeout server 1h
frontend clients
  bind 127.0.0.1:{port} backlog 4096
  default_backend stub
backend stub
  server stub 127.0.0.1:{upstream}
"""
LITELLM = """
model_list:
  - model_name: local
    litellm_params: {{model: openai/local, api_base: "http://127.0.0.1:{upstream}/v1", api_key: sk-bench}}
litellm_settings: {{telemetry: false, request_timeout: 600}}
general_settings: {{dangerously_permit_weak_or_unset_master_key: true}}
"""


@dataclass(frozen=True, slots=True)
class Command:
    """`program` with arguments, and what it needs in its environment."""

    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class Target:
    """A proxy that runs in front of the stub on port `upstream`. `role_path`: where a request's role is known by its
    path. `process` None: there is none. `used`: it has been measured before."""

    name: str
    port: int
    upstream: int
    role_path: str = CHAT
    process: psutil.Process | None = None
    fresh_rss: int = 0
    used: bool = False

    @property
    def _processes(self) -> list[psutil.Process]:
        return [self.process, *self.process.children(recursive=True)] if self.process is not None else []

    def cpu_ns(self) -> int:
        """Nanoseconds on a CPU so far, of all its processes and of their threads, those that have ended too."""
        return sum(time.clock_gettime_ns(_cpu_clock(each.pid)) for each in self._processes)

    def rss(self) -> int:
        """Bytes in memory."""
        return sum(each.memory_info().rss for each in self._processes)

    def peak_rss(self) -> int:
        """The most since `forget_peak`."""
        return sum(_status_bytes(each.pid, "VmHWM") for each in self._processes)

    def forget_peak(self) -> None:
        for each in self._processes:
            Path(f"/proc/{each.pid}/clear_refs").write_text("5")


def _cpu_clock(pid: int) -> int:
    """What clock_getcpuclockid(3) gives on Linux (CPUCLOCK_SCHED of include/linux/posix-timers.h)."""
    return (~pid << 3) | 2


def _status_bytes(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def _slotpin(enabled: bool | str, port: int, upstream: int, folder: Path) -> Command:
    base_url = f"http://{HOST}:{upstream}/v1"
    config = {
        "listen": {"port": port},
        "main": {"baseUrl": base_url},
        "llamaCppSlots": {"enabled": enabled},
    }
    (folder / "slotpin.json").write_text(json.dumps(config))
    return Command([sys.executable, "-m", "slotpin", "serve", "--config", str(folder / "slotpin.json")])


def _nginx(port: int, upstream: int, folder: Path) -> Command:
    program = debian_program("nginx")
    (folder / "nginx.conf").write_text(NGINX.format(port=port, upstream=upstream, folder=folder))
    return Command([str(program.path), "-p", str(folder), "-c", str(folder / "nginx.conf")], program.environment)


def _haproxy(port: int, upstream: int, folder: Path) -> Command:
    program = debian_program("haproxy")
    (folder / "haproxy.cfg").write_text(HAPROXY.format(port=port, upstream=upstream))
    return Command([str(program.path), "-db", "-f", str(folder / "haproxy.cfg")], program.environment)


def _naive(port: int, upstream: int, folder: Path) -> Command:
    return Command([sys.executable, "-m", "bench.naive", str(port), str(upstream)])


def _bare(port: int, upstream: int, folder: Path) -> Command:
    return Command([sys.executable, "-m", "bench.bare", str(port), str(upstream)])


def _litellm(port: int, upstream: int, folder: Path) -> Command:
    (folder / "litellm.yaml").write_text(LITELLM.format(upstream=upstream))
    # Without it LiteLLM asks the internet for prices at its start.
    environment = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "PYTHONPATH": ""}
    where = ["--host", HOST, "--port", str(port)]
    return Command([*_installed("litellm"), "--config", f"{folder}/litellm.yaml", *where], environment)


def _hearth(port: int, upstream: int, folder: Path) -> Command:
    where = ["--upstream", f"http://{HOST}:{upstream}", "--port", str(port), "--cache-dir", str(folder.parent)]
    return Command([*_installed("hearth"), "serve", *where], {"PYTHONPATH": ""})


Start = Callable[[int, int, Path], Command]
STARTS: dict[str, Start] = {
    "slotpin": lambda *where: _slotpin("auto", *where),
    "slotpin-off": lambda *where: _slotpin(False, *where),
    "nginx": _nginx,
    "haproxy": _haproxy,
    "bare": _bare,
    "naive": _naive,
    "litellm": _litellm,
    "hearth": _hearth,
}
TARGETS = ("direct", *STARTS)
# So slow that a full run of theirs would take hours.
SLOW = frozenset({"litellm", "hearth"})
# It works with a server that has one slot, and with no other.
ONE_SLOT = frozenset({"hearth"})


@cache
def _installed(name: str) -> tuple[str, str]:
    """Interpreter and script of the program of a package, in an environment of its own. Raises UnavailableError."""
    requirement = PACKAGES[name]
    folder = cache_dir() / "bench" / f"venv-{requirement.replace('[proxy]', '').replace('==', '-')}"
    if not folder.is_dir():
        print(f"installing {requirement}", file=sys.stderr)
        with locked("bench-venv", lambda line: print(line, file=sys.stderr)), publish(folder) as staging:
            venv.create(staging, with_pip=True)
            install = [f"{staging}/bin/python", "-m", "pip", "install", "--quiet", requirement]
            done = subprocess.run(install, capture_output=True, text=True)
            if done.returncode != 0:
                raise UnavailableError(f"pip can't install {requirement}: {done.stderr.strip().splitlines()[-1]}")
    return f"{folder}/bin/python", f"{folder}/bin/{name}"


@contextlib.asynccontextmanager
async def running_target(name: str, upstream: int, folder: Path, cores: Set[int]) -> AsyncIterator[Target]:
    """In front of the stub on port `upstream`, on these cores, with a new `folder` for its files.

    Raises UnavailableError where it can't be had or doesn't start.
    """
    if name == "direct":
        yield Target(name, upstream, upstream)
        return
    port = free_port(HOST, 0)
    with _started(name, port, upstream, folder) as process:
        os.sched_setaffinity(process.pid, cores)
        await _until_ready(name, process, port, folder / "output")
        role_path = f"/main{CHAT}" if name.startswith("slotpin") else CHAT
        yield Target(name, port, upstream, role_path, psutil.Process(process.pid))


@contextlib.contextmanager
def _started(name: str, port: int, upstream: int, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Ended with the block, its children too."""
    folder.mkdir()
    command = STARTS[name](port, upstream, folder)
    environment = {**os.environ, "PYTHONPATH": str(TOP), "HOME": str(folder), **command.environment}
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(command.arguments, cwd=folder, env=environment, stdout=output, stderr=output)
    try:
        yield process
    finally:
        family = []
        if process.poll() is None:
            head = psutil.Process(process.pid)
            family = [head, *head.children(recursive=True)]
        for each in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.terminate()
        for each in psutil.wait_procs(family, timeout=5)[1]:
            each.kill()
        process.wait()


async def _until_ready(name: str, process: subprocess.Popen[bytes], port: int, output: Path) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while True:
        if process.poll() is not None or time.monotonic() > deadline:
            raise UnavailableError(f"{name} doesn't start: {_last_line(output)}")
        try:
            _, writer = await asyncio.open_connection(HOST, port)
        except OSError:
            await asyncio.sleep(0.1)
        else:
            writer.close()
            return


def _last_line(file: Path) -> str:
    lines = file.read_text(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


def version(name: str) -> str:
    """How it calls itself, for the page."""
    if name == "slotpin":
        return f"slotpin {__version__}"
    if name in PACKAGES:
        return PACKAGES[name].replace("[proxy]==", " ").replace("==", " ")
    if name == "nginx":
        return _says("nginx").removeprefix("nginx version: ").replace("/", " ")
    if name == "haproxy":
        return " ".join(_says("haproxy").split()[:3]).replace("version ", "")
    return f"uvloop {metadata.version('uvloop')}" if name == "bare" else f"aiohttp {aiohttp.__version__}"


def _says(name: str) -> str:
    """The first line of what it says of its version."""
    program = debian_program(name)
    done = subprocess.run(
        [program.path, "-v"], capture_output=True, text=True, env={**os.environ, **program.environment}
    )
    return (done.stdout + done.stderr).splitlines()[0]
