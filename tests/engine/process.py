"""One engine process of the tests: `python -m tests.engine.process FD`, driven by JSON lines.

Long-lived: it runs one new instance after another, as a node's engines come and go. Ends when
its parent closes the socket.
"""

from __future__ import annotations

import json
import logging
import socket
import sys
import traceback
from typing import Any

from tests.engine.defects import DEFECTS, Defect
from tests.engine.engine import TestEngine
from tests.engine.instance import OpenInstance
from tests.engine.workload import plan_of

# Often enough for a fault to be aimed, seldom enough to cost nothing.
PROGRESS_STEPS = 10


class EngineProcess:
    """The acts a parent may ask for."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.instance: OpenInstance | None = None

    def send(self, answer: dict[str, Any]) -> None:
        self._connection.sendall(json.dumps(answer).encode() + b"\n")

    def act_run(
        self, seed: int, engine: int, socket_path: str, defect: str | None, *, faulty: bool
    ) -> dict[str, Any]:
        """One plan to its end; the instance stays open until act_close."""
        broken = DEFECTS[defect] if defect else Defect()
        plan = broken.plan(plan_of(seed, engine))
        self.instance = OpenInstance(plan, socket_path, broken, patient=faulty)
        found = TestEngine(plan, self.instance, self._progress)
        broken.arm(found)
        found.run()
        return {
            "counts": found.counts | found.scheduler.counts,
            "ledger": self.instance.ledger(),
            "identity": self.instance.identity,
        }

    def act_close(self) -> dict[str, Any]:
        if self.instance is not None:
            self.instance.close()
            self.instance = None
        return {}

    def _progress(self, number: int) -> None:
        if number % PROGRESS_STEPS == 0:
            self.send({"step": number})


def serve(connection: socket.socket) -> None:
    process = EngineProcess(connection)
    with connection.makefile("r", encoding="utf-8") as lines:
        for line in lines:
            request = json.loads(line)
            try:
                answer = getattr(process, f"act_{request.pop('act')}")(**request)
            except BaseException as error:  # noqa: BLE001 - the parent judges it
                instance = process.instance
                answer = {
                    "statistics": instance.statistics() if instance else None,
                    "finding": type(error).__name__,
                    "sentence": str(error),
                    "traceback": traceback.format_exc(),
                }
            process.send({"answer": answer})


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(relativeCreated)d %(name)s %(message)s")
    serve(socket.socket(fileno=int(sys.argv[1])))
