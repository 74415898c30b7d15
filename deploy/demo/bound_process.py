"""Become another program that ends with its parent: `bound_process.py SIGNAL PROGRAM ARGS…`.

The kernel sends the signal when the parent dies, however it dies, and keeps that wish
over exec. So not even a SIGKILL of the parent leaves the program behind.
"""

from __future__ import annotations

import ctypes
import os
import sys

_PR_SET_PDEATHSIG = 1

if __name__ == "__main__":
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(sys.argv[1]), 0, 0, 0)
    if os.getppid() == parent:  # else it died before the wish was made
        os.execv(sys.argv[2], sys.argv[2:])  # noqa: S606 - no shell is the point
