"""Requests with odd bytes in every position of head and body, thrown at a proxy over raw sockets.

    python -m bench.fuzz --requests 100000

It fails on a traceback, a hang, a malformed answer or none, a 5xx that is neither the server's nor a refusal, and on
anything that reaches the server and could be read in two ways.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import Counter

from tests.support.fuzz import clean, requests, throw_all, wrong
from tests.support.proxy import running_proxy, settings_for
from tests.support.stub_upstream import stub_upstream

# So that what proxy and stub keep for tests does not fill the memory.
_ROUND = 10_000


async def fuzz(count: int, seed: int) -> Counter[str]:
    attack = requests(count, seed)
    results: Counter[str] = Counter()
    while results.total() < count:
        async with stub_upstream(clean) as stub, running_proxy(settings_for(stub)) as running:
            some = (data for _, data in zip(range(_ROUND), attack, strict=False))
            results += await throw_all(running, some, patience=0.25)
        print(f"{results.total()} requests: {dict(sorted(results.items()))}", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000, metavar="N")
    parser.add_argument("--seed", type=int, default=1, metavar="N")
    options = parser.parse_args()
    began = time.monotonic()
    results = asyncio.run(fuzz(options.requests, options.seed))
    bad = wrong(results)
    print(f"{time.monotonic() - began:.0f} s; what should not come: {bad or 'nothing'}")
    raise SystemExit(1 if bad else 0)


if __name__ == "__main__":
    main()
