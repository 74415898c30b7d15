"""Every exception has a status of its own, and only breaks of the protocol end a session."""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc

from kvoffd import errors
from kvoffd.rpc.status import PROTOCOL_BREAKS, STATUS_CODES, STREAM_BREAKS, status_code

if TYPE_CHECKING:
    from collections.abc import Iterator


def descendants(kind: type[errors.KvoffdError]) -> Iterator[type[errors.KvoffdError]]:
    for child in kind.__subclasses__():
        if child.__module__ == "kvoffd.errors":
            yield child
        yield from descendants(child)


def test_table_has_every_exception() -> None:
    known = {errors.KvoffdError, *descendants(errors.KvoffdError)}
    assert set(STATUS_CODES) == known


def test_no_failure_looks_like_success() -> None:
    assert grpc.StatusCode.OK not in STATUS_CODES.values()
    assert status_code(errors.LeaseNotFound("x")) is grpc.StatusCode.NOT_FOUND


def test_subclass_elsewhere_has_its_parents_status() -> None:
    class Special(errors.BadRequest):
        """Of some module's own."""

    assert status_code(Special("x")) is grpc.StatusCode.INVALID_ARGUMENT


def test_refusals_of_one_call_end_no_session() -> None:
    assert not issubclass(errors.LeaseNotFound, STREAM_BREAKS)
    assert not issubclass(errors.Overloaded, STREAM_BREAKS)
    assert not issubclass(errors.BadRequest, PROTOCOL_BREAKS)
    assert issubclass(errors.Undecodable, PROTOCOL_BREAKS)
