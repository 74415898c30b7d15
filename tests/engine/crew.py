"""Three engine processes and one daemon: runs a seed over them and says what was wrong.

Owns the engine processes. The parent's one thread.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.engine.daemon import wait_a_little
from tests.engine.status import daemon_instances, daemon_status, ledger_differences, not_idle

if TYPE_CHECKING:
    from tests.engine.daemon import DaemonProcess
    from tests.engine.faults import Fault

ENGINES = 3
ROOT = Path(__file__).resolve().parents[2]
ANSWER_DEADLINE_S = 200.0
IDLE_DEADLINE_S = 15.0


@dataclass(slots=True)
class SeedResult:
    """What a seed came to; findings are sentences, none means all is well."""

    seed: int
    findings: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)

    def require(self) -> None:
        """Raise AssertionError that says what was found and how to see it again."""
        assert not self.findings, (
            f"seed {self.seed}; replay with: python -m tests.engine.replay {self.seed}\n"
            + "\n".join(self.findings)
        )


class EngineChild:
    """The parent's end of one engine process."""

    def __init__(self, number: int, folder: Path) -> None:
        self.number = number
        self.log_path = folder / f"engine-{number}.log"
        self.step = 0
        ours, theirs = socket.socketpair()
        self._socket = ours
        self._received = b""
        with theirs, self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.engine.process", str(theirs.fileno())],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT}/client:{ROOT}/proto"},
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def fileno(self) -> int:
        return self._socket.fileno()

    def ask(self, act: str, **fields: Any) -> None:
        self.step = 0
        self._socket.sendall(json.dumps({"act": act, **fields}).encode() + b"\n")

    def receive(self) -> dict[str, Any] | None:
        """Take what has come; the answer when it is there. Call when readable."""
        try:
            received = self._socket.recv(1 << 16)
        except ConnectionResetError:
            received = b""
        if not received:
            self.process.wait()
            return {
                "finding": "EngineGone",
                "sentence": f"exit {self.process.returncode}; log: {self.log_path}",
            }
        self._received += received
        while b"\n" in self._received:
            line, _, self._received = self._received.partition(b"\n")
            message = json.loads(line)
            if "answer" in message:
                answer: dict[str, Any] = message["answer"]
                return answer
            self.step = message["step"]
        return None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._socket.close()

    def close(self) -> None:
        """The process ends when its socket does."""
        self._socket.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class Crew:
    """Engine processes that live from seed to seed; a killed one is replaced."""

    def __init__(self, daemon: DaemonProcess, folder: Path) -> None:
        self.daemon = daemon
        self._folder = folder
        #: Counts of all seeds so far, and how many they were.
        self.totals: dict[str, int] = {}
        self.seeds = 0
        self.children = [EngineChild(number, folder) for number in range(ENGINES)]

    def close(self) -> None:
        for child in self.children:
            child.close()

    def run_seed(
        self, seed: int, fault: Fault | None = None, defect: str | None = None
    ) -> SeedResult:
        """All engines through one seed at the same time, then the accounts."""
        result = SeedResult(seed)
        before = None if fault else daemon_status(self.daemon.socket_path)
        for child in self.children:
            child.ask(
                "run",
                seed=seed,
                engine=child.number,
                socket_path=str(self.daemon.socket_path),
                defect=defect,
                faulty=fault is not None,
            )
        answers = self._gather(fault)
        if fault is not None:
            fault.end()
        for number, answer in answers.items():
            if "finding" in answer and not (fault and number in fault.killed_engines):
                result.findings.append(
                    f"engine {number}: {answer['finding']}: {answer['sentence']}\n"
                    + answer.get("traceback", "")
                    + f"\n{answer.get('statistics')}"
                )
            for name, count in answer.get("counts", {}).items():
                result.counts[name] = result.counts.get(name, 0) + count
        self._check_ledgers(result, answers, exact=fault is None)
        self._close_instances(result, fault)
        self._check_idle(result)
        if before is not None and not result.findings:
            self._check_daemon_counts(result, before)
        self.seeds += 1
        for name, count in result.counts.items():
            self.totals[name] = self.totals.get(name, 0) + count
        return result

    def _gather(self, fault: Fault | None) -> dict[int, dict[str, Any]]:
        answers: dict[int, dict[str, Any]] = {}
        ends_s = time.monotonic() + ANSWER_DEADLINE_S
        while len(answers) < len(self.children):
            open_children = [one for one in self.children if one.number not in answers]
            if fault is not None:
                fault.look(self)
                for number in fault.killed_engines - answers.keys():
                    answers[number] = {"finding": "EngineKilled", "sentence": "by the fault"}
                open_children = [one for one in open_children if one.number not in answers]
            ready, _, _ = select.select(open_children, [], [], 0.02)
            for child in ready:
                answer = child.receive()
                if answer is not None:
                    answers[child.number] = answer
            if time.monotonic() > ends_s:
                for child in open_children:
                    answers.setdefault(
                        child.number,
                        {"finding": "Hang", "sentence": f"no answer since step {child.step}"},
                    )
                    self.replace(child.number)
        return answers

    def replace(self, number: int) -> None:
        """SIGKILL an engine process and start another in its place."""
        self.children[number].kill()
        self.children[number] = EngineChild(number, self._folder)

    def _check_ledgers(
        self, result: SeedResult, answers: dict[int, dict[str, Any]], *, exact: bool
    ) -> None:
        """Each instance's own ledger against the daemon's, while both still know it."""
        instances = daemon_instances(self.daemon.socket_path)
        for number, answer in answers.items():
            if "ledger" not in answer:
                continue
            theirs = instances.get(tuple(answer["identity"]))
            result.findings += [
                f"engine {number}: {sentence}"
                for sentence in ledger_differences(answer["ledger"], theirs, exact=exact)
            ]

    def _close_instances(self, result: SeedResult, fault: Fault | None) -> None:
        killed = fault.killed_engines if fault else set()
        for child in self.children:
            if child.number in killed:
                continue
            child.ask("close")
            answer = None
            while answer is None:
                answer = child.receive()
            if "finding" in answer:
                result.findings.append(f"engine {child.number} at close: {answer['sentence']}")

    def _check_idle(self, result: SeedResult) -> None:
        ends_s = time.monotonic() + IDLE_DEADLINE_S
        while left := not_idle(daemon_status(self.daemon.socket_path)):
            if time.monotonic() > ends_s:
                result.findings.append(f"the daemon still has, with no engine left: {left}")
                return
            wait_a_little(0.02)

    def _check_daemon_counts(self, result: SeedResult, before: dict[str, Any]) -> None:
        after = daemon_status(self.daemon.socket_path)
        for name in ("evicted_blocks", "lookup_hit_blocks", "loaded_blocks"):
            result.counts[name] = after["cache"][name] - before["cache"][name]
        for reason, blocks in after["ledger"]["rejected"].items():
            gone = blocks - before["ledger"]["rejected"].get(reason, 0)
            result.counts[f"rejected {reason}"] = gone
        for name in ("stored", "present"):
            result.counts[name] = after["ledger"][name] - before["ledger"][name]
