"""The yardstick of the benchmark: how fast this machine copies memory right now.

Owns two buffers of its own. Needs numpy, as the daemon does.
"""

from __future__ import annotations

import threading
import time
from itertools import pairwise

import numpy as np


class Memcpy:
    """Copies between two warm buffers; measured between the runs it is compared with."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        # Written once each, so that no pass pays for the first touch.
        self._source = np.full(size_bytes // 8, 1, dtype=np.uint64)
        self._target = np.full(size_bytes // 8, 2, dtype=np.uint64)

    def bytes_per_s(self, threads: int = 1) -> float:
        """One pass over the buffer, cut between so many threads."""
        bounds = np.linspace(0, len(self._source), threads + 1).astype(int)
        workers = [
            threading.Thread(target=self._copy, args=(int(begin), int(end)))
            for begin, end in pairwise(bounds)
        ]
        began_s = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return self._size_bytes / (time.perf_counter() - began_s)

    def _copy(self, begin: int, end: int) -> None:
        np.copyto(self._target[begin:end], self._source[begin:end])
