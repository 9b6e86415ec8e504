"""Memory of the KV cache: the stock llama-server against the patched one with `--slot-initial-ctx`.

Both servers run each configuration with two slots: ready, 8 tokens, 1,000 tokens, 600 tokens in the second slot, both
slots erased. Anonymous memory is the kernel's own figure (/proc/PID/smaps_rollup). The stock server has its whole KV
cache from the start, so what is not KV cache is its anonymous memory less the size that it logs, and the patched
server's KV memory is its anonymous memory less that. Linux only. Run from the repository's root:

    python -m bench.lazy_kv [--write FILE] [--contexts 16384 131072] [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import platform
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil

from slotpin.llama.build import BuildOptions, build_server
from slotpin.llama.launch import LlamaServer
from slotpin.llama.model import default_model
from tests.support.llama import running_server
from tests.support.tiny_model import Shape, tiny_model

INITIAL = 4096
MIB = 1024 * 1024
STEPS = ("ready", "8 tokens", "1,000 tokens", "600 in slot 1", "erased")
# Weights of a few MiB, a KV cache of 112 KiB a token.
HEAVY = Shape(arch="llama", layers=28, heads=8, kv_heads=8, head_dim=128, embd=128, ff=128, context=524288)


@dataclass(frozen=True, slots=True)
class Configuration:
    model: Path
    context: int
    flash_attention: bool
    unified: bool
    kv_type: str

    @property
    def flags(self) -> tuple[str, ...]:
        return (
            *("--parallel", "2", "--ctx-size", str(self.context), "--no-cache-idle-slots", "--fit", "off"),
            *("--flash-attn", "on" if self.flash_attention else "off"),
            "--kv-unified" if self.unified else "--no-kv-unified",
            *("--cache-type-k", self.kv_type, "--cache-type-v", self.kv_type),
        )

    @property
    def name(self) -> str:
        layout = "unified" if self.unified else "split"
        attention = "on" if self.flash_attention else "off"
        return f"{self.model.stem} | {self.context:,} | {attention} | {layout} | {self.kv_type}"


@dataclass(frozen=True, slots=True)
class Run:
    """Anonymous memory at each of STEPS and the size that the log gives for the KV cache, both in bytes."""

    anonymous: tuple[int, ...]
    kv_size: float


def configurations(models: Sequence[Path], contexts: Sequence[int], quick: bool) -> Iterator[Configuration]:
    for model, context, attention, unified in itertools.product(models, contexts, (True, False), (True, False)):
        # A quantised V cache needs flash attention.
        for kv_type in ("f16", "q8_0") if attention else ("f16",):
            if not quick or (unified and kv_type == "f16"):
                yield Configuration(model, context, attention, unified, kv_type)


async def measure(configuration: Configuration, binary: Path, *flags: str) -> Run:
    with tempfile.TemporaryDirectory() as slots:
        own = ("--slot-save-path", slots, "--cache-ram", "0", *flags)
        async with (
            running_server(configuration.model, *configuration.flags, *own, binary=binary) as server,
            aiohttp.ClientSession(server.base_url, timeout=aiohttp.ClientTimeout(600)) as session,
        ):
            figures = [_anonymous(server)]
            for slot, tokens in ((0, 8), (0, 1000), (1, 600)):
                await _evaluate(session, slot, tokens)
                figures.append(_anonymous(server))
            for slot in (0, 1):
                async with session.post(f"/slots/{slot}?action=erase") as answer:
                    answer.raise_for_status()
            figures.append(_anonymous(server))
            log = server.log_path.read_text(errors="replace")
    sizes = re.findall(r"KV buffer size = +([\d.]+) MiB", log)
    return Run(tuple(figures), sum(map(float, sizes)) * MIB)


async def _evaluate(session: aiohttp.ClientSession, slot: int, tokens: int) -> None:
    prompt = [1000 + (slot * 7919 + tokens * 31 + number * 17) % 20000 for number in range(tokens)]
    body = {"prompt": prompt, "n_predict": 1, "id_slot": slot, "temperature": 0}
    async with session.post("/completion", json=body) as answer:
        answer.raise_for_status()
        evaluated = (await answer.json())["timings"]["prompt_n"]
    if evaluated != tokens:
        raise SystemExit(f"slot {slot}: {evaluated} tokens evaluated, not {tokens}")


def _anonymous(server: LlamaServer) -> int:
    text = Path(f"/proc/{server.pid}/smaps_rollup").read_text()
    found = re.search(r"^Anonymous: +(\d+) kB$", text, re.MULTILINE)
    if found is None:
        raise SystemExit("no figure of anonymous memory in smaps_rollup")
    return int(found[1]) * 1024


def row(configuration: Configuration, stock: Run, patched: Run) -> str:
    other = [anonymous - stock.kv_size for anonymous in stock.anonymous]
    kv = [max(0.0, anonymous - rest) for anonymous, rest in zip(patched.anonymous, other, strict=True)]
    share = kv[0] / stock.kv_size * 100
    cells = [f"{stock.kv_size / MIB:,.0f}", *(f"{value / MIB:,.1f}" for value in kv), f"{share:.1f} %"]
    return f"| {configuration.name} | {' | '.join(cells)} |"


async def compare(configuration: Configuration, stock: Path, patched: Path) -> str:
    without = await measure(configuration, stock, "--verbosity", "4")
    with_patches = await measure(configuration, patched, "--slot-initial-ctx", str(INITIAL))
    return row(configuration, without, with_patches)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[16384, 131072, 262144], metavar="N")
    parser.add_argument("--quick", action="store_true", help="unified f16 only")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the table into a Markdown file")
    options = parser.parse_args()
    report = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
    stock = build_server(BuildOptions(patches="none"), report).path
    patched = build_server(BuildOptions(), report).path
    models = (default_model(report), tiny_model(HEAVY))
    head = ["model", "context", "flash attention", "layout", "type", "stock, always", *STEPS, "at ready, of stock"]
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * 5}{' ---: |' * (len(head) - 5)}"]
    print("\n".join(lines), flush=True)
    for configuration in configurations(models, options.contexts, options.quick):
        kv_bytes = 114688 * configuration.context if configuration.model == models[1] else 0
        if kv_bytes > psutil.virtual_memory().available * 0.8:
            lines.append(f"| {configuration.name} | does not fit into this machine's memory{' |' * 7}")
        else:
            lines.append(asyncio.run(compare(configuration, stock, patched)))
        print(lines[-1], flush=True)
    if options.write:
        options.write.write_text(page(lines))


def page(lines: Sequence[str]) -> str:
    machine = f"{platform.machine()}, {psutil.cpu_count()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB"
    return "\n".join(
        [
            "# KV memory, stock against patched",
            "",
            f"`python -m bench.lazy_kv` wrote this table on a Linux machine ({machine}). It shows the memory",
            f"that the KV cache really takes, in MiB: patched with `--slot-initial-ctx {INITIAL}`; the stock server",
            "takes all of it at any time. How it is measured stands at the head of `bench/lazy_kv.py`.",
            "",
            *lines,
            "",
        ]
    )


if __name__ == "__main__":
    main()
