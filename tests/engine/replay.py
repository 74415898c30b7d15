"""Run one seed again, alone: `python -m tests.engine.replay SEED [FAULT] [--times N]`."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.engine.crew import Crew
from tests.engine.daemon import DaemonProcess
from tests.engine.faults import FAULTS, Fault
from tests.engine.settings import SMALL_ARENA


def main() -> int:
    """Exit status 1 when something was found; logs stay in the folder that is named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("fault", nargs="?", choices=FAULTS)
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--defect")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kvoffd-replay-"))
    daemon = DaemonProcess(folder, SMALL_ARENA)
    daemon.start()
    crew = Crew(daemon, folder)
    found = 0
    try:
        for _ in range(arguments.times):
            fault = Fault(arguments.fault, arguments.seed) if arguments.fault else None
            result = crew.run_seed(arguments.seed, fault, arguments.defect)
            found += bool(result.findings)
            sys.stdout.write(f"{result.counts}\n" + "\n".join(result.findings) + "\n")
    finally:
        crew.close()
        daemon.stop()
    sys.stdout.write(f"{found} of {arguments.times} runs found something; logs: {folder}\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
