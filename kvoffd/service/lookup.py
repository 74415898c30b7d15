"""Lookups and leases: the scheduler half's questions, answered from the core at once.

Keeps no state. Runs on the loop thread; nothing in here waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvoffd.core.plans import LookupResult
from kvoffd.core.types import LeaseId
from kvoffd.errors import Draining, Forbidden, StaleGeneration
from kvoffd.service.sessions import Role

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvoffd.core.cache import Cache
    from kvoffd.core.plans import Effects
    from kvoffd.service.instances import Instance, Instances
    from kvoffd.service.namespaces import Namespaces, Reset
    from kvoffd.service.sessions import Session


class LookupService:
    """What a scheduler half may ask."""

    def __init__(
        self,
        cache: Cache,
        instances: Instances,
        namespaces: Namespaces,
        apply: Callable[[Effects], None],
        clock: Callable[[], float],
    ) -> None:
        self._cache = cache
        self._instances = instances
        self._namespaces = namespaces
        self._apply = apply
        self._clock = clock
        self.draining = False

    def lookup(
        self, session: Session, generation: int, group: int, hashes: Iterable[bytes]
    ) -> LookupResult:
        """How many leading blocks are ready, with a lease over them.

        Raises:
            BadRequest: no such group.
            Draining: no lease is granted any more.
            Forbidden, InstanceNotFound: the session is not a registered scheduler.
            Overloaded: there are too many leases.
            StaleGeneration: the namespace was reset since.
        """
        instance = self._scheduled(session)
        if self.draining:
            raise Draining("The daemon is draining and grants no lease.")
        namespace = self._namespaces.get(instance.digest)
        if namespace is not None:
            return self._cache.lookup(
                instance.key, namespace, generation, group, hashes, self._clock()
            )
        current = self._namespaces.generation(instance.digest)
        if generation != current:
            raise StaleGeneration(
                f"The lookup is of generation {generation}; the namespace is at {current}."
            )
        return LookupResult(0)

    def renew(self, session: Session, lease_id: int) -> float:
        """Seconds that the lease has now. Raises LeaseNotFound."""
        instance = self._scheduled(session)
        return self._cache.renew(instance.key, LeaseId(lease_id), self._clock())

    def release(self, session: Session, lease_ids: Iterable[int]) -> int:
        """Give leases back; answers how many of them there were."""
        instance = self._scheduled(session)
        released, effects = self._cache.release(
            instance.key, map(LeaseId, lease_ids), self._clock()
        )
        self._apply(effects)
        return released

    def reset(self, session: Session) -> Reset:
        """Nothing stored so far in the session's namespace can be found from now on."""
        return self._namespaces.reset(self._scheduled(session).digest)

    def _scheduled(self, session: Session) -> Instance:
        if session.role is not Role.SCHEDULER:
            raise Forbidden(f"A session of role {session.role.value} asks for no prefix.")
        return self._instances.instance(session)
