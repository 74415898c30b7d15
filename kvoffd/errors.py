"""Exceptions that cross a module's door.

Each is a failure that the caller can handle; ordinary outcomes are fields of
results, bugs are asserts. rpc/status.py maps every class to a gRPC status.
"""

from __future__ import annotations


class KvoffdError(Exception):
    """Base of all failures. The message is a sentence for a person."""


class BadRequest(KvoffdError):
    """A field of a request is missing, out of range or contradicts another."""


class Undecodable(BadRequest):
    """Bytes that are no message of the protocol."""


class ProtocolMismatch(KvoffdError):
    """No common protocol version, or a message that must not come now."""


class Forbidden(KvoffdError):
    """The caller may not do this."""


class SessionNotFound(KvoffdError):
    """The session token is unknown, or its session has ended."""


class InstanceNotFound(KvoffdError):
    """The session has not registered with an instance."""


class InstanceConflict(KvoffdError):
    """Another live process has this place, or the instance is described differently."""


class MemoryRefused(KvoffdError):
    """Shared memory that was offered cannot be used."""


class NamespaceNotFound(KvoffdError):
    """No such namespace in this daemon."""


class LeaseNotFound(KvoffdError):
    """The lease never was, was released, or has expired."""


class LoadNotFound(KvoffdError):
    """The load has ended, or never began."""


class StoreNotFound(KvoffdError):
    """The store has ended, or never began."""


class JobConflict(KvoffdError):
    """A job id is used again, or with other blocks than on another rank."""


class StaleGeneration(KvoffdError):
    """The namespace has been reset since the caller learnt its generation."""


class Overloaded(KvoffdError):
    """A named limit is reached; try again later."""


class Draining(KvoffdError):
    """The daemon is about to exit and admits nothing new."""


class CopyFailed(KvoffdError):
    """A copier could not do its work, or died over it."""


class ArenaFailed(KvoffdError):
    """The host memory of the arena cannot be had or used."""


class SocketTaken(KvoffdError):
    """The daemon's socket path is another daemon's, or has another file."""
