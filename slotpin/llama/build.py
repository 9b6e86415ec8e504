"""Configure and build llama-server with cmake, once for each combination of source, options and compiler."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from slotpin.errors import UserError
from slotpin.llama.cache import Report, cache_dir, locked, publish
from slotpin.llama.guard import guarded
from slotpin.llama.progress import Progress
from slotpin.llama.series import Series, check, choose
from slotpin.llama.source import Source, ensure_tree, file_names, find_source
from slotpin.llama.tree import lay_out

TARGET = "llama-server"
NINJA = "Ninja"

CMAKE_DEFAULTS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DCMAKE_BUILD_RPATH_USE_ORIGIN=ON",  # shared backends, if asked for, are found beside the published binary
    "-DBUILD_SHARED_LIBS=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_OPENSSL=OFF",
)

# Debian's package for each missing tool.
CMAKE_PACKAGE = "cmake"
COMPILER_PACKAGE = "build-essential"


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """What to build. `source` None: the packaged source. `jobs` None: as many as there are cores.

    `patches` is `all`, `none` or names with commas between them (`series.choose`).
    """

    source: Path | None = None
    patches: str = "all"
    cmake_args: tuple[str, ...] = ()
    jobs: int | None = None


@dataclass(frozen=True, slots=True)
class BuiltServer:
    path: Path
    key: str
    source: str
    """The source's name, for people."""
    cached: bool
    """It was there already."""


def build_server(options: BuildOptions, report: Report) -> BuiltServer:
    """The llama-server that `options` describe, from the cache or built now (many minutes, once).

    Raises UserError: exit 2 for a wrong `source` or `patches`, exit 1 for a failed download, a patch that does not
    apply, a missing tool or a failed build.
    """
    source = find_source(options.source)
    series = choose(options.patches)
    cmake_options = (*CMAKE_DEFAULTS, *options.cmake_args)
    stamp = _stamp(source, series)
    compiler = compiler_identity(options.cmake_args)
    key = server_key(source, series, (*cmake_options, *stamp), compiler)
    folder = cache_dir() / "servers" / key
    if _is_published(folder):
        return BuiltServer(folder / TARGET, key, source.name, cached=True)
    with locked("build", report):
        if not _is_published(folder):
            generator = _generator(options.cmake_args)
            build = _Build(
                tree=_tree(source, series, report),
                objects=cache_dir() / "builds" / digest(source.objects, *cmake_options, compiler, generator),
                log=cache_dir() / "logs" / f"build-{key}.log",
                generator=generator,
                cmake_options=(*cmake_options, *stamp),
                jobs=options.jobs or os.cpu_count() or 1,
            )
            build.run(report)
            if find_source(options.source) != source:
                raise UserError(f"{source.name} changed while it was built; build again", exit_code=1)
            with publish(folder) as staging:
                shutil.copytree(build.objects / "bin", staging, symlinks=True, dirs_exist_ok=True)
            report(f"built {folder / TARGET}")
    return BuiltServer(folder / TARGET, key, source.name, cached=False)


def check_patches(options: BuildOptions, report: Report) -> Series:
    """Apply the patches to the source without keeping anything. Raises UserError as `build_server` does."""
    source = find_source(options.source)
    series = choose(options.patches)
    check(series, ensure_tree(source, report))
    return series


def server_key(source: Source, series: Series, cmake_options: Sequence[str], compiler: str) -> str:
    """Names a build's result: it changes with everything that the binary depends on."""
    return digest(source.key, series.digest, *cmake_options, compiler)


def _tree(source: Source, series: Series, report: Report) -> Path:
    """Where to build: all series of a source share one tree, and so their objects. A checkout itself stays as it is."""
    pristine = ensure_tree(source, report)
    if not source.owned and not series.patches:
        return pristine
    tree = cache_dir() / "trees" / digest(source.objects)
    lay_out(series, pristine, file_names(source), tree, link=source.owned)
    return tree


def digest(*parts: str) -> str:
    """A short file name that changes with each part. Collisions: 64 bits."""
    joined = "".join(f"{len(part)}:{part}" for part in parts)
    return hashlib.sha256(joined.encode()).hexdigest()[:16]


def _is_published(folder: Path) -> bool:
    return os.access(folder / TARGET, os.X_OK)


def _stamp(source: Source, series: Series) -> tuple[str, ...]:
    """What `llama-server --version` and `build_info` of `/props` show: the source, and the patches if there are any.

    A plain checkout asks its own git.
    """
    if not source.owned and not series.patches:
        return ()
    name = source.name if source.owned else source.key[:12]
    stamp = series.stamp(name)
    return ("-DLLAMA_BUILD_NUMBER=0", f"-DLLAMA_BUILD_COMMIT={stamp}")


# --- the compiler ---------------------------------------------------------------------------------------------------


def compiler_identity(cmake_args: Sequence[str]) -> str:
    """Names the C and C++ compilers with their version and what they predefine for this machine's CPU.

    A build is for this machine's CPU (GGML_NATIVE), so a cache that moves to another machine must not be hit.
    """
    flags = [f"{name}={os.environ.get(name, '')}" for name in ("CFLAGS", "CXXFLAGS", "LDFLAGS")]
    return digest(
        *flags,
        _identify(_compiler(cmake_args, "CMAKE_C_COMPILER", "CC", ("cc", "gcc", "clang")), "c"),
        _identify(_compiler(cmake_args, "CMAKE_CXX_COMPILER", "CXX", ("c++", "g++", "clang++")), "c++"),
    )


def _compiler(cmake_args: Sequence[str], option: str, variable: str, usual: Sequence[str]) -> list[str]:
    """The compiler's command line, chosen as cmake chooses: option, environment, usual names."""
    options = [arg.partition("=")[2] for arg in cmake_args if re.match(rf"-D{option}(:\w+)?=", arg)]
    command = [options[-1]] if options else shlex.split(os.environ.get(variable, ""))
    candidates = [command] if command else [[name] for name in usual]
    for candidate in candidates:
        if shutil.which(candidate[0]):
            return candidate
    tried = ", ".join(candidate[0] for candidate in candidates)
    raise UserError(
        f"no compiler found (tried {tried}); install one, on Debian: apt install {COMPILER_PACKAGE}", exit_code=1
    )


def _identify(compiler: list[str], language: str) -> str:
    version = _output([*compiler, "--version"])
    macros = ["-dM", "-E", "-x", language, "/dev/null"]
    # Not every compiler knows "native" on every CPU.
    features = _output([*compiler, "-march=native", *macros]) or _output([*compiler, *macros])
    return digest(version, features)


def _output(command: list[str]) -> str:
    """What the command prints, empty if it fails."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    return done.stdout if done.returncode == 0 else ""


def _generator(cmake_args: Sequence[str]) -> str:
    """The generator to name to cmake, empty for its default or for the user's choice in `cmake_args`.

    It decides about speed, not about the result, so it is no part of a server's key.
    """
    if any(arg.startswith("-G") for arg in cmake_args):
        return ""
    return os.environ.get("CMAKE_GENERATOR", NINJA if shutil.which("ninja") else "")


# --- the build ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Build:
    """One run of cmake: configure, then build. `objects` stays in the cache, so a killed build goes on later."""

    tree: Path
    objects: Path
    log: Path
    generator: str
    cmake_options: tuple[str, ...]
    jobs: int

    def run(self, report: Report) -> None:
        if shutil.which("cmake") is None:
            raise UserError(f"no cmake found; install it, on Debian: apt install {CMAKE_PACKAGE}", exit_code=1)
        if self._running.exists() and self.generator != NINJA:
            # Ninja knows which files a killed compiler left half written; make takes them for finished.
            shutil.rmtree(self.objects)
        self.objects.mkdir(parents=True, exist_ok=True)
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.write_bytes(b"")
        report(f"configuring llama-server (log: {self.log})")
        folders = ["-S", str(self.tree), "-B", str(self.objects)]
        generator = ["-G", self.generator] if self.generator else []
        self._step("configured", [*folders, *generator, *self.cmake_options])
        title = f"building llama-server with {self.jobs} jobs"
        progress = Progress(title, report)
        self._running.touch()
        try:
            build = ["--build", str(self.objects), "--target", TARGET, "--parallel", str(self.jobs)]
            self._step("built", build, lambda line: _tell(progress, line))
        finally:
            self._running.unlink()
            progress.close()

    @property
    def _running(self) -> Path:
        """Exists while compilers write into `objects`; left behind only by a kill -9."""
        return self.objects / "slotpin-running"

    def _step(self, done: str, arguments: list[str], on_line: Callable[[str], None] = lambda line: None) -> None:
        # git must not take a repository around the tree for the tree's own.
        environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(self.tree.parent)}
        start = self.log.stat().st_size
        if run_logged(["cmake", *arguments], self.log, environment, on_line) != 0:
            with self.log.open(errors="replace") as log:
                log.seek(start)
                error = telling_error(log.read())
            raise UserError(f"llama-server could not be {done}: {error} (log: {self.log})", exit_code=1)


def _tell(progress: Progress, line: str) -> None:
    """Ninja prints `[12/206] …`, make `[ 12%] …`."""
    if steps := re.match(r"\[(\d+)/(\d+)\]", line):
        progress.update(100 * int(steps[1]) // int(steps[2]))
    elif percent := re.match(r"\[ *(\d+)%\]", line):
        progress.update(int(percent[1]))


def run_logged(command: list[str], log: Path, environment: dict[str, str], on_line: Callable[[str], None]) -> int:
    """Run `command`, append its output to `log`, and return its exit status. Its processes end with this one."""
    process = subprocess.Popen(
        guarded(command),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        start_new_session=True,
    )
    with process, log.open("a") as file:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                file.write(line)
                on_line(line)
            return process.wait()
        finally:
            _end_group(process)


def _end_group(process: subprocess.Popen[str]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            return
        os.killpg(process.pid, number)
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            continue


def telling_error(output: str) -> str:
    """The first error in a build's output, as one line: the later ones mostly follow from it."""
    lines = [line.strip() for line in output.splitlines()]
    for number, line in enumerate(lines):
        if line.startswith("CMake Error"):
            message = [text for text in lines[number + 1 : number + 4] if text]
            return " ".join([line.removesuffix(" (message):"), *message[:1]])
        if re.search(r"\berror: |undefined reference|^ninja: error|No space left", line):
            return line
    return next((line for line in reversed(lines) if line), "no output")
