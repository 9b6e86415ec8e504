"""What `slotpin pi setup` writes, as the real Pi takes it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

from tests.real.servers import llama, slotpin
from tests.support.pi.install import installed
from tests.support.pi.rpc import SHORT
from tests.support.program import run

COMMENTED = '{\n  // mine\n  "providers": {\n    "cloud": {"baseUrl": "https://example.com/v1"}, // dear\n  },\n}\n'


def pi(home: Path, *arguments: str) -> str:
    found = installed()
    switches = {"PI_OFFLINE": "1", "PI_TELEMETRY": "0", "PI_SKIP_VERSION_CHECK": "1"}
    done = subprocess.run(
        [found.node, found.cli, "--no-session", "-nc", "-ns", *arguments],
        cwd=home,
        env={"PATH": os.environ["PATH"], "HOME": str(home), **switches},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_pi_takes_what_the_set_up_writes(tmp_path: Path) -> None:
    agent = tmp_path / ".pi" / "agent"
    agent.mkdir(parents=True)
    (agent / "models.json").write_text(COMMENTED)
    with (
        llama("--kv-unified", "--ctx-size", "16384", "--alias", "tiny") as server,
        slotpin(tmp_path, server.url) as proxy,
    ):
        done = run(tmp_path, "pi", "setup", "--yes", "--port", str(urlsplit(proxy.url).port))
        assert done.returncode == 0, done.stderr
        (row,) = (line.split() for line in pi(tmp_path, "--list-models").splitlines() if "slotpin" in line)
        assert row[:4] == ["slotpin", "tiny", "16.4K", "4.1K"]

        # A model of random weights needs a grammar to end its answer.
        text = (agent / "models.json").read_text()
        short = json.dumps({"samplingParams": {"grammar": SHORT}})[1:-1]
        (agent / "models.json").write_text(text.replace('"id": "tiny"', f'"id": "tiny", {short}'))
        assert pi(tmp_path, "-p", "-nt", "--model", "slotpin/tiny", "Hello").startswith("ok ")
        (decision,) = proxy.program.exchanges()
    # The extension is loaded from where the set-up put it: it has tagged the request.
    assert (decision["role"], decision["found_by"], decision["slot"]) == ("main", "header", 0)
