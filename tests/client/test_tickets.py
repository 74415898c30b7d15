"""The ticket page: what is proven of a job whatever the copier has done, or was doing when it died.

The copier here is another process, since record locks do not exclude their owner.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from kvoffd_client.tickets import CELL_BYTES, HEADER_BYTES, LoadProof, TicketPage

if TYPE_CHECKING:
    from collections.abc import Iterator

COPIER = """
import fcntl, mmap, struct, sys
fd, cell = int(sys.argv[1]), int(sys.argv[2])
memory = mmap.mmap(fd, 0)
at = 4096 + 64 * cell
def put(word, value):
    struct.pack_into("<Q", memory, at + 8 * word, value)
for line in sys.stdin:
    match line.split():
        case ["lock"]:
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, at)
                answer = "locked"
            except OSError:
                answer = "held"
        case ["unlock"]:
            fcntl.lockf(fd, fcntl.LOCK_UN, 1, at)
            answer = "unlocked"
        case ["read"]:
            answer = " ".join(str(word) for word in struct.unpack_from("<4Q", memory, at))
        case ["put", word, value]:
            put(int(word), int(value))
            answer = "put"
    sys.stdout.write(answer + "\\n")
    sys.stdout.flush()
"""


class Copier:
    """Another process that has the page mapped and obeys line by line."""

    def __init__(self, tickets: TicketPage, cell: int) -> None:
        fd = tickets.memory.fd
        self.process = subprocess.Popen(
            [sys.executable, "-c", COPIER, str(fd), str(cell)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[fd],
            text=True,
        )

    def do(self, order: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(order + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def start_load(self, incarnation: int) -> None:
        assert self.do("lock") == "locked"
        self.do(f"put 3 {incarnation}")
        self.do("put 2 1")

    def kill(self) -> None:
        self.process.kill()
        with self.process:
            self.process.wait()


@pytest.fixture
def tickets() -> Iterator[TicketPage]:
    tickets = TicketPage.create(4)
    yield tickets
    tickets.close()


@pytest.fixture
def copier(tickets: TicketPage) -> Iterator[Copier]:
    tickets.allocate(11)
    copier = Copier(tickets, 0)
    yield copier
    copier.kill()


def test_the_format_is_the_one_of_the_contract() -> None:
    """Magic, version, cells, doorbell and the four words of a cell, byte by byte."""
    tickets = TicketPage.create(3)
    tickets.ring()
    tickets.ring()
    cell = tickets.allocate(0x0102030405060708)
    tickets.revoke(0)
    raw = bytes(tickets.memory.buffer)
    assert raw[:16] == b"KVOFTKT1" + b"\x01\0\0\0" + b"\x03\0\0\0"
    assert raw[64:72] == b"\x02" + bytes(7)
    assert cell == 0
    assert raw[4096:4128] == bytes([8, 7, 6, 5, 4, 3, 2, 1]) + b"\x01" + bytes(23)
    assert len(raw) == 4096 + 3 * 64
    tickets.close()


def test_the_ticket_page_can_neither_shrink_nor_be_read_by_others(tickets: TicketPage) -> None:
    """Who maps it cannot be given SIGBUS, and the daemon refuses it otherwise."""
    fd = tickets.memory.fd
    assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    assert os.fstat(fd).st_mode & 0o077 == 0
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 4096)


def test_cells_are_given_once_and_rest_before_they_are_used_again(tickets: TicketPage) -> None:
    cells = [tickets.allocate(job_id) for job_id in range(1, 5)]
    assert cells == [0, 1, 2, 3]
    assert tickets.allocate(5) is None
    tickets.free(2)
    tickets.free(0)
    assert [tickets.allocate(6), tickets.allocate(7)] == [2, 0]
    assert tickets.job_id(2) == 6


def test_a_cell_used_again_shows_nothing_of_its_former_job(tickets: TicketPage) -> None:
    tickets.allocate(1)
    tickets.revoke(0)
    tickets.free(0)
    assert tickets.job_id(0) is None
    for job_id in (2, 3, 4, 5):
        tickets.allocate(job_id)
    assert (tickets.job_id(0), tickets.is_revoked(0), tickets.incarnation(0)) == (5, False, 0)


def test_misuse_of_cells_is_a_bug(tickets: TicketPage) -> None:
    with pytest.raises(AssertionError):
        tickets.free(0)
    with pytest.raises(AssertionError):
        tickets.revoke(0)
    with pytest.raises(AssertionError):
        tickets.allocate(0)


def test_the_doorbell_only_rises(tickets: TicketPage) -> None:
    assert (tickets.bell, tickets.next_bell) == (0, 1)
    assert tickets.ring() == 1
    assert (tickets.bell, tickets.next_bell) == (1, 2)


def test_a_load_that_was_not_started_never_will_be(tickets: TicketPage, copier: Copier) -> None:
    """The copier that comes later finds the cell revoked under the lock."""
    assert tickets.try_end_load(0) is LoadProof.UNTOUCHED
    assert copier.do("lock") == "locked"
    assert copier.do("read") == "11 1 0 0"


def test_a_running_load_is_not_proven_until_it_ends(tickets: TicketPage, copier: Copier) -> None:
    copier.start_load(incarnation=5)
    assert tickets.try_end_load(0) is LoadProof.RUNNING
    assert not tickets.is_loaded(0, 11)
    copier.do("put 2 2")
    assert tickets.try_end_load(0) is LoadProof.RUNNING
    copier.do("unlock")
    assert tickets.try_end_load(0) is LoadProof.LOADED
    assert tickets.is_loaded(0, 11)
    assert not tickets.is_loaded(0, 12)


def test_a_load_given_up_is_final(tickets: TicketPage, copier: Copier) -> None:
    copier.start_load(incarnation=5)
    copier.do("put 2 3")
    copier.do("unlock")
    assert tickets.try_end_load(0) is LoadProof.GIVEN_UP


def test_a_copier_that_died_over_a_load_proves_nothing(tickets: TicketPage, copier: Copier) -> None:
    """The lock falls before the kernel has torn down its device context: the pidfd decides."""
    copier.start_load(incarnation=5)
    copier.kill()
    proof = tickets.try_end_load(0)
    assert (proof, proof.is_final) == (LoadProof.INTERRUPTED, False)
    assert tickets.incarnation(0) == 5


def test_a_state_that_nobody_writes_proves_nothing(tickets: TicketPage, copier: Copier) -> None:
    copier.do("put 2 77")
    assert tickets.try_end_load(0) is LoadProof.INTERRUPTED


def test_locks_of_other_cells_do_not_matter(tickets: TicketPage, copier: Copier) -> None:
    """One byte a cell, each at the cell's own offset."""
    tickets.allocate(12)
    copier.start_load(incarnation=5)
    assert tickets.try_end_load(1) is LoadProof.UNTOUCHED
    assert HEADER_BYTES + CELL_BYTES == 4160


def test_trying_leaves_no_lock_behind(tickets: TicketPage, copier: Copier) -> None:
    tickets.try_end_load(0)
    assert copier.do("lock") == "locked"
