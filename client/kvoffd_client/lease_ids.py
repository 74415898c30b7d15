"""Lease ids as engines see them: the daemon's number and the daemon's boot id in one.

Pure. Daemons may count leases from one at each boot, so that a bare number that
outlived its daemon could name another request's blocks. A scheduler passes an id
to ranks that may be connected to another daemon by then; here that is found out.
"""

from __future__ import annotations

_NUMBER_BITS = 64


def lease_id_of(boot_id: bytes, number: int) -> int:
    """The opaque id of a lease that the daemon with this boot id has numbered."""
    assert 0 < number < 1 << _NUMBER_BITS, f"{number} is no lease number"
    return int.from_bytes(boot_id, "big") << _NUMBER_BITS | number


def lease_number(boot_id: bytes, lease_id: int) -> int | None:
    """The daemon's number of a lease; None when another daemon granted it."""
    if lease_id >> _NUMBER_BITS != int.from_bytes(boot_id, "big"):
        return None
    return lease_id & ((1 << _NUMBER_BITS) - 1)
