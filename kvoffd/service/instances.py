"""Instances: running engines, put together from the sessions that register with them.

Owns the table of instances and their seats, and the pools' life in the copiers. Runs on
the loop thread. A seat's memories stay open until its copier has let the pool go. Those
who keep jobs listen to `rank_lost` and `ended`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import structlog

from kvoffd.core.types import InstanceKey
from kvoffd.errors import (
    Forbidden,
    InstanceConflict,
    InstanceNotFound,
    KvoffdError,
    Overloaded,
    ProtocolMismatch,
    SessionNotFound,
)
from kvoffd.service import pools
from kvoffd.service.seats import Seat
from kvoffd.service.sessions import CloseCode, Role

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from kvoffd.copier.supervisor import Copier
    from kvoffd.service.copiers import Copiers
    from kvoffd.service.namespaces import Namespaces
    from kvoffd.service.options import ServiceOptions
    from kvoffd.service.sessions import Session, Sessions

log = structlog.get_logger(__name__)

T = TypeVar("T")

#: What the kernel calls a process that is in none of our PID namespaces.
PID_ELSEWHERE = 0


class Registration(NamedTuple):
    """What a session says that it is a part of."""

    instance_id: str
    nonce: str
    fields: tuple[tuple[str, str], ...]
    ranks_total: int
    rank: pools.RankDescription | None


class Registered(NamedTuple):
    """The answer to a registration."""

    digest: bytes
    generation: int


@dataclass(slots=True, eq=False, repr=False)
class Instance:
    """One running engine: from its first session to its last."""

    key: InstanceKey
    instance_id: str
    nonce: str
    digest: bytes
    ranks_total: int
    started_s: float
    scheduler: Session | None = None
    seats: dict[int, Seat] = field(default_factory=dict)
    #: Store jobs that have not settled (store.py).
    unsettled: set[int] = field(default_factory=set)
    #: Jobs that a rank has taken back before any began them, oldest first (fence.py).
    revoked: dict[int, None] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Every rank has a pool open."""
        return len(self.seats) == self.ranks_total and all(
            seat.pool_id is not None for seat in self.seats.values()
        )

    @property
    def sessions(self) -> list[Session]:
        """Those that are a part of it now."""
        ranks = [seat.session for _, seat in sorted(self.seats.items())]
        return ranks if self.scheduler is None else [self.scheduler, *ranks]


class Instances:
    """All living instances."""

    def __init__(
        self,
        options: ServiceOptions,
        sessions: Sessions,
        namespaces: Namespaces,
        copiers: Copiers,
        clock: Callable[[], float],
    ) -> None:
        self._options = options
        self._sessions = sessions
        self._namespaces = namespaces
        self._copiers = copiers
        self._clock = clock
        self._by_name: dict[tuple[str, str], Instance] = {}
        self._by_key: dict[InstanceKey, Instance] = {}
        self._serials = count(1)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closing_pools: dict[tuple[str, str, int], asyncio.Task[None]] = {}
        #: A seat's session has ended; its pool is about to be closed.
        self.rank_lost: list[Callable[[Seat], None]] = []
        #: The last session of an instance has ended.
        self.ended: list[Callable[[Instance], None]] = []
        sessions.closed.append(self._leave)
        copiers.up.append(self._copier_up)

    def __len__(self) -> int:
        return len(self._by_key)

    def all(self) -> list[Instance]:
        """Oldest first."""
        return list(self._by_key.values())

    def get(self, key: InstanceKey) -> Instance | None:
        """None when it has ended."""
        return self._by_key.get(key)

    def seat(self, session: Session) -> Seat:
        """Raises InstanceNotFound for a session that is not a registered rank."""
        seat = session.seat
        if seat is None or seat.pool_id is None:
            raise InstanceNotFound("The session has not registered as a rank.")
        return seat

    def instance(self, session: Session) -> Instance:
        """Raises InstanceNotFound for a session that has not registered."""
        if session.instance is None:
            raise InstanceNotFound("The session has not registered with an instance.")
        return session.instance

    async def register(self, session: Session, registration: Registration) -> Registered:
        """Make a session a part of an instance, and open a rank's pool.

        Raises:
            BadRequest: fields that are out of range or contradict each other.
            CopyFailed, MemoryRefused: the copier cannot use the pool.
            Forbidden: the session's role has no part in an instance.
            InstanceConflict: another live process has the place, or the instance is
                described differently.
            Overloaded: instances_max or namespaces_max is reached.
            ProtocolMismatch: the session has registered before.
            SessionNotFound: the session ended meanwhile.
        """
        self._check_role(session, registration)
        session.registering = True
        try:
            # A caller that loses patience must not leave half of this behind.
            return await asyncio.shield(self._spawn(self._register(session, registration)))
        finally:
            session.registering = False

    async def wait_closed(self) -> None:
        """Until no pool is being opened or closed any more."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _check_role(self, session: Session, registration: Registration) -> None:
        if session.registering or session.instance is not None:
            raise ProtocolMismatch("A session registers once.")
        if session.role is Role.ADMIN:
            raise Forbidden("A session of role admin has no part in an instance.")
        if (session.role is Role.RANK) != (registration.rank is not None):
            raise ProtocolMismatch(
                f"A session of role {session.role.value} registers "
                f"{'as a rank' if session.role is Role.RANK else 'without a rank'}."
            )

    async def _register(self, session: Session, registration: Registration) -> Registered:
        digest = self._namespaces.digest(registration.fields)
        if registration.rank is None:
            self._take_scheduler_place(session, registration, digest)
        else:
            await self._take_seat(session, registration, registration.rank, digest)
        return Registered(digest, self._namespaces.generation(digest))

    def _take_scheduler_place(
        self, session: Session, registration: Registration, digest: bytes
    ) -> None:
        found = self._find(registration, digest)
        if found is not None and found.scheduler is not None:
            self._oust(found.scheduler, session, "as the scheduler")
        instance = self._find(registration, digest) or self._make(registration, digest)
        instance.scheduler = session
        session.instance = instance

    async def _take_seat(
        self,
        session: Session,
        registration: Registration,
        rank: pools.RankDescription,
        digest: bytes,
    ) -> None:
        copier = self._copiers.get(rank.device)
        pool, fds = pools.describe(rank, session.memories, self._options)
        shard_bytes = pool.shard_bytes()
        await self._await_free_seat(session, registration, rank.rank, digest)
        self._namespaces.register(digest, registration.ranks_total, shard_bytes)
        instance = self._find(registration, digest) or self._make(registration, digest)
        seat = Seat(
            instance=instance,
            rank=rank.rank,
            session=session,
            copier=copier,
            ticket_cells=rank.ticket_cells,
            pool_blocks=rank.pool_blocks,
            shard_bytes=shard_bytes,
        )
        instance.seats[rank.rank] = seat
        session.instance = instance
        session.seat = seat
        try:
            seat.pool_id = await copier.open_pool(pool, fds)
        except (KvoffdError, OSError):
            if not session.closed:
                session.instance = session.seat = None
                self._vacate(seat)
            else:
                session.close_memories()
            raise
        if session.closed:
            self._close_pool(seat)
            raise SessionNotFound(f"The session ended meanwhile: {session.close_reason}")
        # Without a process there is nothing to tell yet: its start will be told.
        if copier.pidfd is not None:
            session.link.copier_up(copier.incarnation, copier.pidfd)
        log.info("rank registered", instance=instance.instance_id, rank=rank.rank)

    async def _await_free_seat(
        self, session: Session, registration: Registration, rank: int, digest: bytes
    ) -> None:
        """Until the former holder of this seat is gone, its pool included."""
        place = (registration.instance_id, registration.nonce, rank)
        while True:
            if session.closed:
                raise SessionNotFound(f"The session ended meanwhile: {session.close_reason}")
            found = self._find(registration, digest)
            former = found.seats.get(rank) if found is not None else None
            if former is not None:
                self._oust(former.session, session, f"as rank {rank}")
            closing = self._closing_pools.get(place)
            if closing is None:
                return
            await asyncio.wait([closing])

    def _oust(self, former: Session, session: Session, place: str) -> None:
        """End the former holder of a place if it is dead, or the same process."""
        if former.is_dead():
            self._sessions.close(former, CloseCode.DEAD, "The process has ended.")
        elif former.peer.pid == session.peer.pid != PID_ELSEWHERE:
            self._sessions.close(
                former, CloseCode.PROTOCOL, f"The same process registered again {place}."
            )
        else:
            raise InstanceConflict(
                f"Process {former.peer.pid} is alive and registered {place} of this instance."
            )

    def _find(self, registration: Registration, digest: bytes) -> Instance | None:
        found = self._by_name.get((registration.instance_id, registration.nonce))
        if found is None:
            return None
        if found.digest != digest:
            raise InstanceConflict(
                f"Instance {found.instance_id!r} is registered with another namespace."
            )
        if found.ranks_total != registration.ranks_total:
            raise InstanceConflict(
                f"Instance {found.instance_id!r} is registered with {found.ranks_total} ranks, "
                f"not {registration.ranks_total}."
            )
        return found

    def _make(self, registration: Registration, digest: bytes) -> Instance:
        if len(self._by_key) >= self._options.instances_max:
            raise Overloaded(
                f"There are {len(self._by_key)} instances, as many as instances_max allows."
            )
        # Numbered, so that the jobs of an instance that ended and came back never mix.
        name = (registration.instance_id, registration.nonce)
        instance = Instance(
            key=InstanceKey(f"{registration.instance_id}#{next(self._serials)}"),
            instance_id=registration.instance_id,
            nonce=registration.nonce,
            digest=digest,
            ranks_total=registration.ranks_total,
            started_s=self._clock(),
        )
        self._by_name[name] = instance
        self._by_key[instance.key] = instance
        return instance

    def _leave(self, session: Session) -> None:
        """A session has ended, whatever it was doing."""
        instance, seat = session.instance, session.seat
        if instance is None:
            return
        if seat is None:
            if instance.scheduler is session:
                instance.scheduler = None
            self._end_if_empty(instance)
            return
        seat.lost = True
        if seat.stream is not None:
            seat.stream.close(session.close_reason)
        for listener in self.rank_lost:
            listener(seat)
        self._vacate(seat)
        if seat.pool_id is not None:
            self._close_pool(seat)

    def _vacate(self, seat: Seat) -> None:
        if seat.instance.seats.get(seat.rank) is seat:
            del seat.instance.seats[seat.rank]
        self._end_if_empty(seat.instance)

    def _end_if_empty(self, instance: Instance) -> None:
        if instance.sessions or instance.key not in self._by_key:
            return
        del self._by_key[instance.key]
        del self._by_name[instance.instance_id, instance.nonce]
        for listener in self.ended:
            listener(instance)
        log.info("instance ended", instance=instance.instance_id)

    def _close_pool(self, seat: Seat) -> None:
        place = (seat.instance.instance_id, seat.instance.nonce, seat.rank)
        before = self._closing_pools.get(place)

        async def close() -> None:
            if before is not None:
                await asyncio.wait([before])
            assert seat.pool_id is not None, "a pool that was never opened is not closed"
            try:
                await seat.copier.close_pool(seat.pool_id)
            finally:
                seat.session.close_memories()
                if self._closing_pools.get(place) is asyncio.current_task():
                    del self._closing_pools[place]

        self._closing_pools[place] = self._spawn(close())

    def _copier_up(self, copier: Copier, incarnation: int, pidfd: int) -> None:
        for instance in self._by_key.values():
            for seat in instance.seats.values():
                if seat.copier is copier and seat.pool_id is not None:
                    seat.session.link.copier_up(incarnation, pidfd)

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        # Looked at even when nobody waits for it any more.
        if not task.cancelled() and task.exception() is not None:
            log.info("registration or pool ended badly", reason=str(task.exception()))
