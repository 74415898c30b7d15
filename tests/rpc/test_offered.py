"""Which descriptors are taken as a client's memory, and as its pidfd."""

from __future__ import annotations

import fcntl
import os
from typing import TYPE_CHECKING

import pytest

from kvoffd.errors import MemoryRefused
from kvoffd.rpc.offered import check_memory, is_pidfd_of
from tests.fakes.raw_memory import make_memfd

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZE_BYTES = 8192
SIZE_BYTES_MAX = 1 << 20


@pytest.fixture
def memfd() -> Iterator[int]:
    fd = make_memfd(SIZE_BYTES)
    yield fd
    os.close(fd)


def check(fd: int, size_bytes: int = SIZE_BYTES) -> None:
    check_memory(fd, size_bytes, SIZE_BYTES_MAX, os.geteuid())


def test_good_memory_is_taken_whole_or_in_part(memfd: int) -> None:
    check(memfd)
    check(memfd, SIZE_BYTES - 1)


@pytest.mark.parametrize("size_bytes", [0, SIZE_BYTES + 1, SIZE_BYTES_MAX + 1])
def test_size_that_is_not_there(memfd: int, size_bytes: int) -> None:
    with pytest.raises(MemoryRefused, match=str(size_bytes)):
        check(memfd, size_bytes)


def test_memory_of_another_user(memfd: int) -> None:
    with pytest.raises(MemoryRefused, match="belongs to user"):
        check_memory(memfd, SIZE_BYTES, SIZE_BYTES_MAX, os.geteuid() + 1)


@pytest.mark.parametrize(
    ("seals", "sentence"),
    [
        (0, "not sealed against shrinking"),
        (fcntl.F_SEAL_GROW, "not sealed against shrinking"),
        (fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_WRITE, "sealed against writing"),
        (fcntl.F_SEAL_SHRINK | 0x10, "sealed against writing"),
    ],
)
def test_wrong_seals(seals: int, sentence: str) -> None:
    fd = make_memfd(SIZE_BYTES, seals)
    try:
        with pytest.raises(MemoryRefused, match=sentence):
            check(fd)
    finally:
        os.close(fd)


def test_what_is_no_memfd() -> None:
    for path, flags in (("/dev/null", os.O_RDWR), ("/", os.O_RDONLY), (__file__, os.O_RDONLY)):
        fd = os.open(path, flags)
        try:
            with pytest.raises(MemoryRefused, match="no memfd"):
                check(fd)
        finally:
            os.close(fd)


def test_pidfd_is_recognised(memfd: int) -> None:
    pidfd = os.pidfd_open(os.getpid())
    try:
        assert is_pidfd_of(pidfd, os.getpid())
        assert not is_pidfd_of(pidfd, os.getppid())
        assert not is_pidfd_of(memfd, os.getpid())
    finally:
        os.close(pidfd)
