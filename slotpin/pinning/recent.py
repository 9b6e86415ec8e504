"""A mapping with a bound, for what each request touches."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Recent(OrderedDict[K, V]):
    """Keeps the `size` entries that were set last, the latest at the end. Looking one up doesn't count.

    It looks up as fast as a dict: a cachetools.LRUCache moves the entry each time, which takes ten times as long.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self.size:
            self.popitem(last=False)
