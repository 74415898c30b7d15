"""Fences: jobs that a rank takes back. The ticket page is the proof, this is the hint.

Keeps, for each instance, the jobs that were taken back before any rank began them.
Runs on the loop thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvoffd.core.types import JobRef, UnstoredReason

if TYPE_CHECKING:
    from kvoffd.service.load import LoadService
    from kvoffd.service.seats import Seat
    from kvoffd.service.store import StoreService

#: Jobs of an instance remembered as taken back; older ones fail by their deadline.
REVOKED_MAX = 4096


class FenceService:
    """Takes jobs back, for all ranks of their instance."""

    def __init__(self, stores: StoreService, loads: LoadService) -> None:
        self._stores = stores
        self._loads = loads

    def revoke(self, seat: Seat, job_ids: list[int]) -> None:
        """Stop these jobs as early as possible; unknown ones are remembered."""
        instance = seat.instance
        for job_id in job_ids:
            if self._loads.cancel(seat, job_id):
                continue
            if job_id in instance.unsettled:
                self._stores.revoke(JobRef(instance.key, job_id), UnstoredReason.REVOKED)
                continue
            instance.revoked[job_id] = None
            if len(instance.revoked) > REVOKED_MAX:
                del instance.revoked[next(iter(instance.revoked))]
