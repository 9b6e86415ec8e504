"""Agents that are programs of their own: alone in a folder, without a way out of the machine."""

from __future__ import annotations

import os
from pathlib import Path

# A model of random weights ends its answers with this; slotpin and the clients see ordinary ones.
SHORT = ("--grammar", 'root ::= "ok " [a-z]{3,9}')
NOWHERE = "http://127.0.0.1:9"


def environment(home: Path, **variables: str) -> dict[str, str]:
    """Nothing of the developer's. Requests for other machines end at a proxy that isn't there."""
    ways_out = {"HTTP_PROXY": NOWHERE, "HTTPS_PROXY": NOWHERE, "NO_PROXY": "127.0.0.1,localhost"}
    return {"PATH": os.environ["PATH"], "HOME": str(home), **ways_out, **variables}
