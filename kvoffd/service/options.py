"""Limits of the service layer: every bound a client can meet, with its unit.

Plain values and no behaviour; kvoffd.main fills them in from the configuration.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServiceOptions:
    """What one daemon accepts and how long it waits. All bounds are inclusive."""

    #: Open sessions of all roles, in sessions.
    sessions_max: int = 256
    #: Instances with at least one open session.
    instances_max: int = 64
    #: Distinct namespaces in the life of this daemon.
    namespaces_max: int = 4096
    #: Ranks of one instance.
    ranks_max: int = 256
    #: Shared memories one session may offer.
    memories_max: int = 128
    #: Bytes of one offered memory.
    memory_bytes_max: int = 1 << 44
    #: Regions of one rank's pool.
    regions_max: int = 1024
    #: Blocks of one rank's pool.
    pool_blocks_max: int = 1 << 28
    #: Cells of one ticket page.
    ticket_cells_max: int = 1 << 16
    #: Blocks of one store job.
    store_blocks_max: int = 4096
    #: Blocks of one load job.
    load_blocks_max: int = 1 << 14
    #: Blocks of one lookup.
    lookup_blocks_max: int = 1 << 14
    #: Store and load jobs of one session that have no outcome yet.
    jobs_in_flight_max: int = 1024
    #: How often a client shall send a heartbeat.
    heartbeat_s: float = 1.0
    #: Life of a lease without a renewal.
    lease_ttl_s: float = 10.0
    #: Leases of all instances.
    leases_max: int = 65536
    #: A block not sealed this long after its first shard began is aborted.
    store_deadline_s: float = 30.0
    #: Store jobs of all instances that are not settled.
    open_jobs_max: int = 65536
    #: Longest deadline a load may ask for.
    load_deadline_max_s: float = 60.0
    #: A load this long past its deadline that its copier still holds kills the copier.
    overdue_kill_s: float = 2.0
    #: How often leases and deadlines are looked at.
    janitor_interval_s: float = 0.05
    #: Checks the core's invariants at each quiet turn of the janitor; for tests.
    check_invariants: bool = False
