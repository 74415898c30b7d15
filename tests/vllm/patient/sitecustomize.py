"""Engines whose ranks wait by sleeping; first on the module path of an engine, and only of a test.

vLLM's ranks wait for each other in a loop of sched_yield. On Linux 6.18 such loops, one on every
core, were seen to keep all else from running for 38 to 69 s ("workqueue lockup"), kernel
threads and the daemon included: then every deadline passes, and no test can tell why.
"""

import os
import time

_SLEEP_S = 0.0002


def _sleep_instead() -> None:
    time.sleep(_SLEEP_S)


os.sched_yield = _sleep_instead
