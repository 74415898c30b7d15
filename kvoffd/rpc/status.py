"""The one table from exceptions to gRPC status, and which of them end a session.

Pure. The message of an exception is the sentence that the client gets.
"""

from __future__ import annotations

import grpc

from kvoffd import errors

STATUS_CODES: dict[type[errors.KvoffdError], grpc.StatusCode] = {
    errors.KvoffdError: grpc.StatusCode.UNKNOWN,
    errors.BadRequest: grpc.StatusCode.INVALID_ARGUMENT,
    errors.Undecodable: grpc.StatusCode.INVALID_ARGUMENT,
    errors.ProtocolMismatch: grpc.StatusCode.FAILED_PRECONDITION,
    errors.Forbidden: grpc.StatusCode.PERMISSION_DENIED,
    errors.SessionNotFound: grpc.StatusCode.UNAUTHENTICATED,
    errors.InstanceNotFound: grpc.StatusCode.FAILED_PRECONDITION,
    errors.InstanceConflict: grpc.StatusCode.ALREADY_EXISTS,
    errors.MemoryRefused: grpc.StatusCode.INVALID_ARGUMENT,
    errors.NamespaceNotFound: grpc.StatusCode.NOT_FOUND,
    errors.LeaseNotFound: grpc.StatusCode.NOT_FOUND,
    errors.LoadNotFound: grpc.StatusCode.NOT_FOUND,
    errors.StoreNotFound: grpc.StatusCode.NOT_FOUND,
    errors.JobConflict: grpc.StatusCode.INVALID_ARGUMENT,
    errors.StaleGeneration: grpc.StatusCode.ABORTED,
    errors.Overloaded: grpc.StatusCode.RESOURCE_EXHAUSTED,
    errors.Draining: grpc.StatusCode.UNAVAILABLE,
    errors.CopyFailed: grpc.StatusCode.UNAVAILABLE,
    errors.ArenaFailed: grpc.StatusCode.INTERNAL,
    errors.SocketTaken: grpc.StatusCode.INTERNAL,
}

#: A client that causes one of these does not speak the protocol: its session ends.
PROTOCOL_BREAKS = (errors.ProtocolMismatch, errors.Undecodable)

#: On a stream of jobs there is no telling which jobs a bad message was to carry.
STREAM_BREAKS = (*PROTOCOL_BREAKS, errors.BadRequest, errors.JobConflict, errors.InstanceNotFound)


def status_code(error: errors.KvoffdError) -> grpc.StatusCode:
    """The status that stands for a failure."""
    return next(STATUS_CODES[kind] for kind in type(error).__mro__ if kind in STATUS_CODES)
