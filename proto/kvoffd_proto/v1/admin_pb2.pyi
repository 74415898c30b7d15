from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("daemon_version", "boot_id", "uptime_s", "draining", "socket", "arena", "cache", "ledger", "copiers", "sessions", "instances", "namespaces")
    DAEMON_VERSION_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    SOCKET_FIELD_NUMBER: _ClassVar[int]
    ARENA_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    LEDGER_FIELD_NUMBER: _ClassVar[int]
    COPIERS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    daemon_version: str
    boot_id: bytes
    uptime_s: float
    draining: bool
    socket: str
    arena: ArenaStatus
    cache: CacheStatus
    ledger: BlockLedger
    copiers: _containers.RepeatedCompositeFieldContainer[CopierStatus]
    sessions: int
    instances: int
    namespaces: int
    def __init__(self, daemon_version: _Optional[str] = ..., boot_id: _Optional[bytes] = ..., uptime_s: _Optional[float] = ..., draining: bool = ..., socket: _Optional[str] = ..., arena: _Optional[_Union[ArenaStatus, _Mapping]] = ..., cache: _Optional[_Union[CacheStatus, _Mapping]] = ..., ledger: _Optional[_Union[BlockLedger, _Mapping]] = ..., copiers: _Optional[_Iterable[_Union[CopierStatus, _Mapping]]] = ..., sessions: _Optional[int] = ..., instances: _Optional[int] = ..., namespaces: _Optional[int] = ...) -> None: ...

class ArenaStatus(_message.Message):
    __slots__ = ("backing", "size_bytes", "extent_bytes", "extents_total", "extents_used", "slots_used", "bytes_used")
    BACKING_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXTENT_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    EXTENTS_USED_FIELD_NUMBER: _ClassVar[int]
    SLOTS_USED_FIELD_NUMBER: _ClassVar[int]
    BYTES_USED_FIELD_NUMBER: _ClassVar[int]
    backing: str
    size_bytes: int
    extent_bytes: int
    extents_total: int
    extents_used: int
    slots_used: int
    bytes_used: int
    def __init__(self, backing: _Optional[str] = ..., size_bytes: _Optional[int] = ..., extent_bytes: _Optional[int] = ..., extents_total: _Optional[int] = ..., extents_used: _Optional[int] = ..., slots_used: _Optional[int] = ..., bytes_used: _Optional[int] = ...) -> None: ...

class CacheStatus(_message.Message):
    __slots__ = ("blocks_ready", "blocks_pending", "leases", "holds", "loads_in_flight", "lookups", "lookup_blocks", "lookup_hit_blocks", "evicted_blocks", "loaded_blocks", "failed_load_blocks", "slots_quarantined")
    BLOCKS_READY_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_PENDING_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    HOLDS_FIELD_NUMBER: _ClassVar[int]
    LOADS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_HIT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LOADED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FAILED_LOAD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    SLOTS_QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    blocks_ready: int
    blocks_pending: int
    leases: int
    holds: int
    loads_in_flight: int
    lookups: int
    lookup_blocks: int
    lookup_hit_blocks: int
    evicted_blocks: int
    loaded_blocks: int
    failed_load_blocks: int
    slots_quarantined: int
    def __init__(self, blocks_ready: _Optional[int] = ..., blocks_pending: _Optional[int] = ..., leases: _Optional[int] = ..., holds: _Optional[int] = ..., loads_in_flight: _Optional[int] = ..., lookups: _Optional[int] = ..., lookup_blocks: _Optional[int] = ..., lookup_hit_blocks: _Optional[int] = ..., evicted_blocks: _Optional[int] = ..., loaded_blocks: _Optional[int] = ..., failed_load_blocks: _Optional[int] = ..., slots_quarantined: _Optional[int] = ...) -> None: ...

class BlockLedger(_message.Message):
    __slots__ = ("submitted", "stored", "present", "rejected", "failed", "in_flight")
    SUBMITTED_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    submitted: int
    stored: int
    present: int
    rejected: _containers.RepeatedCompositeFieldContainer[ReasonCount]
    failed: _containers.RepeatedCompositeFieldContainer[ReasonCount]
    in_flight: int
    def __init__(self, submitted: _Optional[int] = ..., stored: _Optional[int] = ..., present: _Optional[int] = ..., rejected: _Optional[_Iterable[_Union[ReasonCount, _Mapping]]] = ..., failed: _Optional[_Iterable[_Union[ReasonCount, _Mapping]]] = ..., in_flight: _Optional[int] = ...) -> None: ...

class ReasonCount(_message.Message):
    __slots__ = ("reason", "blocks")
    REASON_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    reason: str
    blocks: int
    def __init__(self, reason: _Optional[str] = ..., blocks: _Optional[int] = ...) -> None: ...

class CopierStatus(_message.Message):
    __slots__ = ("device", "incarnation", "pid", "state", "batches_in_flight", "store_bytes", "load_bytes", "restarts")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    BATCHES_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    STORE_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOAD_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    device: str
    incarnation: int
    pid: int
    state: str
    batches_in_flight: int
    store_bytes: int
    load_bytes: int
    restarts: int
    def __init__(self, device: _Optional[str] = ..., incarnation: _Optional[int] = ..., pid: _Optional[int] = ..., state: _Optional[str] = ..., batches_in_flight: _Optional[int] = ..., store_bytes: _Optional[int] = ..., load_bytes: _Optional[int] = ..., restarts: _Optional[int] = ...) -> None: ...

class InstancesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class InstancesResponse(_message.Message):
    __slots__ = ("instances",)
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    instances: _containers.RepeatedCompositeFieldContainer[InstanceStatus]
    def __init__(self, instances: _Optional[_Iterable[_Union[InstanceStatus, _Mapping]]] = ...) -> None: ...

class InstanceStatus(_message.Message):
    __slots__ = ("id", "nonce", "namespace_digest", "ranks_total", "ranks_registered", "scheduler_registered", "pids", "age_s", "leases", "jobs_in_flight", "ledger")
    ID_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    RANKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    RANKS_REGISTERED_FIELD_NUMBER: _ClassVar[int]
    SCHEDULER_REGISTERED_FIELD_NUMBER: _ClassVar[int]
    PIDS_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    JOBS_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    LEDGER_FIELD_NUMBER: _ClassVar[int]
    id: str
    nonce: str
    namespace_digest: bytes
    ranks_total: int
    ranks_registered: _containers.RepeatedScalarFieldContainer[int]
    scheduler_registered: bool
    pids: _containers.RepeatedScalarFieldContainer[int]
    age_s: float
    leases: int
    jobs_in_flight: int
    ledger: BlockLedger
    def __init__(self, id: _Optional[str] = ..., nonce: _Optional[str] = ..., namespace_digest: _Optional[bytes] = ..., ranks_total: _Optional[int] = ..., ranks_registered: _Optional[_Iterable[int]] = ..., scheduler_registered: bool = ..., pids: _Optional[_Iterable[int]] = ..., age_s: _Optional[float] = ..., leases: _Optional[int] = ..., jobs_in_flight: _Optional[int] = ..., ledger: _Optional[_Union[BlockLedger, _Mapping]] = ...) -> None: ...

class NamespacesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NamespacesResponse(_message.Message):
    __slots__ = ("namespaces",)
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceStatus]
    def __init__(self, namespaces: _Optional[_Iterable[_Union[NamespaceStatus, _Mapping]]] = ...) -> None: ...

class NamespaceStatus(_message.Message):
    __slots__ = ("digest", "generation", "ranks_total", "blocks_ready", "bytes_used", "fields")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RANKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_READY_FIELD_NUMBER: _ClassVar[int]
    BYTES_USED_FIELD_NUMBER: _ClassVar[int]
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    generation: int
    ranks_total: int
    blocks_ready: int
    bytes_used: int
    fields: _containers.RepeatedCompositeFieldContainer[NamespaceFieldStatus]
    def __init__(self, digest: _Optional[bytes] = ..., generation: _Optional[int] = ..., ranks_total: _Optional[int] = ..., blocks_ready: _Optional[int] = ..., bytes_used: _Optional[int] = ..., fields: _Optional[_Iterable[_Union[NamespaceFieldStatus, _Mapping]]] = ...) -> None: ...

class NamespaceFieldStatus(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
