from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SessionRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SESSION_ROLE_UNSPECIFIED: _ClassVar[SessionRole]
    SESSION_ROLE_SCHEDULER: _ClassVar[SessionRole]
    SESSION_ROLE_RANK: _ClassVar[SessionRole]
    SESSION_ROLE_ADMIN: _ClassVar[SessionRole]

class MemoryKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEMORY_KIND_UNSPECIFIED: _ClassVar[MemoryKind]
    MEMORY_KIND_POOL: _ClassVar[MemoryKind]
    MEMORY_KIND_TICKETS: _ClassVar[MemoryKind]

class CloseCode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CLOSE_CODE_UNSPECIFIED: _ClassVar[CloseCode]
    CLOSE_CODE_PROTOCOL: _ClassVar[CloseCode]
    CLOSE_CODE_VERSION: _ClassVar[CloseCode]
    CLOSE_CODE_FORBIDDEN: _ClassVar[CloseCode]
    CLOSE_CODE_LIMIT: _ClassVar[CloseCode]
    CLOSE_CODE_DRAINING: _ClassVar[CloseCode]
    CLOSE_CODE_MEMORY: _ClassVar[CloseCode]
    CLOSE_CODE_DEAD: _ClassVar[CloseCode]
SESSION_ROLE_UNSPECIFIED: SessionRole
SESSION_ROLE_SCHEDULER: SessionRole
SESSION_ROLE_RANK: SessionRole
SESSION_ROLE_ADMIN: SessionRole
MEMORY_KIND_UNSPECIFIED: MemoryKind
MEMORY_KIND_POOL: MemoryKind
MEMORY_KIND_TICKETS: MemoryKind
CLOSE_CODE_UNSPECIFIED: CloseCode
CLOSE_CODE_PROTOCOL: CloseCode
CLOSE_CODE_VERSION: CloseCode
CLOSE_CODE_FORBIDDEN: CloseCode
CLOSE_CODE_LIMIT: CloseCode
CLOSE_CODE_DRAINING: CloseCode
CLOSE_CODE_MEMORY: CloseCode
CLOSE_CODE_DEAD: CloseCode

class HandshakeRequest(_message.Message):
    __slots__ = ("hello", "offer", "goodbye", "copier_seen")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OFFER_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    COPIER_SEEN_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    offer: Offer
    goodbye: Goodbye
    copier_seen: CopierSeen
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., offer: _Optional[_Union[Offer, _Mapping]] = ..., goodbye: _Optional[_Union[Goodbye, _Mapping]] = ..., copier_seen: _Optional[_Union[CopierSeen, _Mapping]] = ...) -> None: ...

class HandshakeReply(_message.Message):
    __slots__ = ("welcome", "accepted", "closing", "copier_up")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    CLOSING_FIELD_NUMBER: _ClassVar[int]
    COPIER_UP_FIELD_NUMBER: _ClassVar[int]
    welcome: Welcome
    accepted: Accepted
    closing: Closing
    copier_up: CopierUp
    def __init__(self, welcome: _Optional[_Union[Welcome, _Mapping]] = ..., accepted: _Optional[_Union[Accepted, _Mapping]] = ..., closing: _Optional[_Union[Closing, _Mapping]] = ..., copier_up: _Optional[_Union[CopierUp, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol_min", "protocol_max", "features", "client_version", "role")
    PROTOCOL_MIN_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MAX_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    CLIENT_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    protocol_min: int
    protocol_max: int
    features: _containers.RepeatedScalarFieldContainer[str]
    client_version: str
    role: SessionRole
    def __init__(self, protocol_min: _Optional[int] = ..., protocol_max: _Optional[int] = ..., features: _Optional[_Iterable[str]] = ..., client_version: _Optional[str] = ..., role: _Optional[_Union[SessionRole, str]] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol", "features", "daemon_version", "boot_id", "session_token", "limits")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    DAEMON_VERSION_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    features: _containers.RepeatedScalarFieldContainer[str]
    daemon_version: str
    boot_id: bytes
    session_token: str
    limits: SessionLimits
    def __init__(self, protocol: _Optional[int] = ..., features: _Optional[_Iterable[str]] = ..., daemon_version: _Optional[str] = ..., boot_id: _Optional[bytes] = ..., session_token: _Optional[str] = ..., limits: _Optional[_Union[SessionLimits, _Mapping]] = ...) -> None: ...

class SessionLimits(_message.Message):
    __slots__ = ("store_blocks_max", "load_blocks_max", "lookup_blocks_max", "jobs_in_flight_max", "heartbeat_ms", "lease_ttl_ms", "memories_max")
    STORE_BLOCKS_MAX_FIELD_NUMBER: _ClassVar[int]
    LOAD_BLOCKS_MAX_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_BLOCKS_MAX_FIELD_NUMBER: _ClassVar[int]
    JOBS_IN_FLIGHT_MAX_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_MS_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    MEMORIES_MAX_FIELD_NUMBER: _ClassVar[int]
    store_blocks_max: int
    load_blocks_max: int
    lookup_blocks_max: int
    jobs_in_flight_max: int
    heartbeat_ms: int
    lease_ttl_ms: int
    memories_max: int
    def __init__(self, store_blocks_max: _Optional[int] = ..., load_blocks_max: _Optional[int] = ..., lookup_blocks_max: _Optional[int] = ..., jobs_in_flight_max: _Optional[int] = ..., heartbeat_ms: _Optional[int] = ..., lease_ttl_ms: _Optional[int] = ..., memories_max: _Optional[int] = ...) -> None: ...

class Offer(_message.Message):
    __slots__ = ("memory_index", "kind", "size_bytes")
    MEMORY_INDEX_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    memory_index: int
    kind: MemoryKind
    size_bytes: int
    def __init__(self, memory_index: _Optional[int] = ..., kind: _Optional[_Union[MemoryKind, str]] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class Accepted(_message.Message):
    __slots__ = ("memory_index",)
    MEMORY_INDEX_FIELD_NUMBER: _ClassVar[int]
    memory_index: int
    def __init__(self, memory_index: _Optional[int] = ...) -> None: ...

class Goodbye(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Closing(_message.Message):
    __slots__ = ("code", "reason")
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    code: CloseCode
    reason: str
    def __init__(self, code: _Optional[_Union[CloseCode, str]] = ..., reason: _Optional[str] = ...) -> None: ...

class CopierUp(_message.Message):
    __slots__ = ("incarnation",)
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    def __init__(self, incarnation: _Optional[int] = ...) -> None: ...

class CopierSeen(_message.Message):
    __slots__ = ("incarnation",)
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    def __init__(self, incarnation: _Optional[int] = ...) -> None: ...
