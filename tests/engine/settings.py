"""Settings of the daemon under test: little room and short deadlines, so that all happens."""

from __future__ import annotations

# 3 extents of 32 to 128 slots: every seed's blocks are a multiple of what fits.
SMALL_ARENA = {
    "KVOFFD_ARENA_BYTES": "3MiB",
    "KVOFFD_EXTENT_BYTES": "1MiB",
    # A generation that somebody else moved is to be heard of within a seed.
    "KVOFFD_HEARTBEAT_S": "0.1",
    "KVOFFD_LEASE_TTL_S": "3",
    "KVOFFD_STORE_DEADLINE_S": "4",
    "KVOFFD_CHECK_INVARIANTS": "true",
}
