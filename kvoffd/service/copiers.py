"""Copiers: the running copiers by device, and who waits for which batch.

Owns the numbers of batches and the table of those that have not ended. Runs on the loop
thread. Every batch that was submitted calls its `ended` exactly once, from the loop,
also when its copier dies.
"""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, NamedTuple

import structlog

from kvoffd.copier.frames import LoadBatch, StoreBatch
from kvoffd.errors import BadRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kvoffd.copier.frames import BatchEnd
    from kvoffd.copier.supervisor import Copier, CopierEvents

    Ended = Callable[[BatchEnd], None]

log = structlog.get_logger(__name__)


class Copies(NamedTuple):
    """What both kinds of batches say: which blocks of which pool, under which ticket."""

    pool_id: int
    group: int
    job_id: int
    ticket_cell: int
    bell: int
    #: Packed by frames.pack_slots and frames.pack_block_ids.
    slots: bytes
    block_ids: bytes


class Copiers:
    """One copier a device, started and stopped together."""

    def __init__(self, devices: Iterable[str], make: Callable[[str, CopierEvents], Copier]) -> None:
        self._ended: dict[int, Ended] = {}
        self._batch_ids = count(1)
        self._by_device = {device: make(device, _Events(self, device)) for device in devices}
        #: Called with a copier, its incarnation and pidfd when it has come up (again).
        self.up: list[Callable[[Copier, int, int], None]] = []
        #: Called when any copier has come up or died.
        self.changed: list[Callable[[], None]] = []

    def __iter__(self) -> Iterator[Copier]:
        return iter(self._by_device.values())

    @property
    def batches_open(self) -> int:
        """Batches that have not ended."""
        return len(self._ended)

    @property
    def all_up(self) -> bool:
        """No device is without its copier."""
        return all(copier.state == "up" for copier in self)

    async def start(self) -> None:
        """Raises CopyFailed when one does not come up; stop() is due all the same."""
        for copier in self:
            await copier.start()

    async def stop(self) -> None:
        """Ends the processes; their batches end first."""
        for copier in self:
            await copier.stop()

    def get(self, device: str) -> Copier:
        """Raises BadRequest for a device that this daemon does not serve."""
        copier = self._by_device.get(device)
        if copier is None:
            raise BadRequest(
                f"Device {device!r} is not served here; there are: {', '.join(self._by_device)}."
            )
        return copier

    def store(self, copier: Copier, copies: Copies, ended: Ended) -> int:
        """Start copying blocks into slots; answers the batch's number."""
        batch_id = next(self._batch_ids)
        self._ended[batch_id] = ended
        copier.submit_store(StoreBatch(batch_id=batch_id, **copies._asdict()))
        return batch_id

    def load(self, copier: Copier, copies: Copies, deadline_ms: int, ended: Ended) -> int:
        """Start copying slots into blocks; answers the batch's number."""
        batch_id = next(self._batch_ids)
        self._ended[batch_id] = ended
        copier.submit_load(
            LoadBatch(batch_id=batch_id, deadline_ms=deadline_ms, **copies._asdict())
        )
        return batch_id

    def batch_ended(self, end: BatchEnd) -> None:
        """From a copier: the one end of a batch."""
        self._ended.pop(end.batch_id)(end)

    def came_up(self, device: str, incarnation: int, pidfd: int) -> None:
        """From a copier: a process is there and has opened all pools."""
        for listener in self.up:
            listener(self._by_device[device], incarnation, pidfd)
        for changed in self.changed:
            changed()

    def died(self, device: str, reason: str) -> None:
        """From a copier: its process is gone."""
        log.warning("copier died", device=device, reason=reason)
        for changed in self.changed:
            changed()


class _Events:
    """The events of one device."""

    def __init__(self, copiers: Copiers, device: str) -> None:
        self._copiers = copiers
        self._device = device

    def batch_ended(self, end: BatchEnd) -> None:
        self._copiers.batch_ended(end)

    def copier_up(self, incarnation: int, pidfd: int) -> None:
        self._copiers.came_up(self._device, incarnation, pidfd)

    def copier_died(self, incarnation: int, reason: str) -> None:
        del incarnation
        self._copiers.died(self._device, reason)
