from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class UnstoredReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    UNSTORED_REASON_UNSPECIFIED: _ClassVar[UnstoredReason]
    UNSTORED_REASON_NO_SLOT: _ClassVar[UnstoredReason]
    UNSTORED_REASON_STALE_GENERATION: _ClassVar[UnstoredReason]
    UNSTORED_REASON_NOT_COMPLETE: _ClassVar[UnstoredReason]
    UNSTORED_REASON_DRAINING: _ClassVar[UnstoredReason]
    UNSTORED_REASON_OVERLOADED: _ClassVar[UnstoredReason]
    UNSTORED_REASON_REVOKED: _ClassVar[UnstoredReason]
    UNSTORED_REASON_COPIER: _ClassVar[UnstoredReason]
    UNSTORED_REASON_DEADLINE: _ClassVar[UnstoredReason]
    UNSTORED_REASON_RANK_LOST: _ClassVar[UnstoredReason]
    UNSTORED_REASON_GENERATION_MOVED: _ClassVar[UnstoredReason]

class LoadStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOAD_STATUS_UNSPECIFIED: _ClassVar[LoadStatus]
    LOAD_STATUS_LOADED: _ClassVar[LoadStatus]
    LOAD_STATUS_LEASE_NOT_FOUND: _ClassVar[LoadStatus]
    LOAD_STATUS_STALE_GENERATION: _ClassVar[LoadStatus]
    LOAD_STATUS_REVOKED: _ClassVar[LoadStatus]
    LOAD_STATUS_COPIER: _ClassVar[LoadStatus]
    LOAD_STATUS_DEADLINE: _ClassVar[LoadStatus]
    LOAD_STATUS_DRAINING: _ClassVar[LoadStatus]
    LOAD_STATUS_OVERLOADED: _ClassVar[LoadStatus]
UNSTORED_REASON_UNSPECIFIED: UnstoredReason
UNSTORED_REASON_NO_SLOT: UnstoredReason
UNSTORED_REASON_STALE_GENERATION: UnstoredReason
UNSTORED_REASON_NOT_COMPLETE: UnstoredReason
UNSTORED_REASON_DRAINING: UnstoredReason
UNSTORED_REASON_OVERLOADED: UnstoredReason
UNSTORED_REASON_REVOKED: UnstoredReason
UNSTORED_REASON_COPIER: UnstoredReason
UNSTORED_REASON_DEADLINE: UnstoredReason
UNSTORED_REASON_RANK_LOST: UnstoredReason
UNSTORED_REASON_GENERATION_MOVED: UnstoredReason
LOAD_STATUS_UNSPECIFIED: LoadStatus
LOAD_STATUS_LOADED: LoadStatus
LOAD_STATUS_LEASE_NOT_FOUND: LoadStatus
LOAD_STATUS_STALE_GENERATION: LoadStatus
LOAD_STATUS_REVOKED: LoadStatus
LOAD_STATUS_COPIER: LoadStatus
LOAD_STATUS_DEADLINE: LoadStatus
LOAD_STATUS_DRAINING: LoadStatus
LOAD_STATUS_OVERLOADED: LoadStatus

class Instance(_message.Message):
    __slots__ = ("id", "nonce")
    ID_FIELD_NUMBER: _ClassVar[int]
    NONCE_FIELD_NUMBER: _ClassVar[int]
    id: str
    nonce: str
    def __init__(self, id: _Optional[str] = ..., nonce: _Optional[str] = ...) -> None: ...

class Namespace(_message.Message):
    __slots__ = ("fields",)
    FIELDS_FIELD_NUMBER: _ClassVar[int]
    fields: _containers.RepeatedCompositeFieldContainer[NamespaceField]
    def __init__(self, fields: _Optional[_Iterable[_Union[NamespaceField, _Mapping]]] = ...) -> None: ...

class NamespaceField(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: str
    def __init__(self, name: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("instance", "namespace", "ranks_total", "rank")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    RANKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    instance: Instance
    namespace: Namespace
    ranks_total: int
    rank: RankRegistration
    def __init__(self, instance: _Optional[_Union[Instance, _Mapping]] = ..., namespace: _Optional[_Union[Namespace, _Mapping]] = ..., ranks_total: _Optional[int] = ..., rank: _Optional[_Union[RankRegistration, _Mapping]] = ...) -> None: ...

class RankRegistration(_message.Message):
    __slots__ = ("rank", "device", "ticket_memory_index", "ticket_cells", "pool_blocks", "regions")
    RANK_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    TICKET_MEMORY_INDEX_FIELD_NUMBER: _ClassVar[int]
    TICKET_CELLS_FIELD_NUMBER: _ClassVar[int]
    POOL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REGIONS_FIELD_NUMBER: _ClassVar[int]
    rank: int
    device: str
    ticket_memory_index: int
    ticket_cells: int
    pool_blocks: int
    regions: _containers.RepeatedCompositeFieldContainer[Region]
    def __init__(self, rank: _Optional[int] = ..., device: _Optional[str] = ..., ticket_memory_index: _Optional[int] = ..., ticket_cells: _Optional[int] = ..., pool_blocks: _Optional[int] = ..., regions: _Optional[_Iterable[_Union[Region, _Mapping]]] = ...) -> None: ...

class Region(_message.Message):
    __slots__ = ("group", "memory_index", "offset_bytes", "block_stride_bytes", "block_bytes")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    MEMORY_INDEX_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_STRIDE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    group: int
    memory_index: int
    offset_bytes: int
    block_stride_bytes: int
    block_bytes: int
    def __init__(self, group: _Optional[int] = ..., memory_index: _Optional[int] = ..., offset_bytes: _Optional[int] = ..., block_stride_bytes: _Optional[int] = ..., block_bytes: _Optional[int] = ...) -> None: ...

class RegisterResponse(_message.Message):
    __slots__ = ("namespace_digest", "generation")
    NAMESPACE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    namespace_digest: bytes
    generation: int
    def __init__(self, namespace_digest: _Optional[bytes] = ..., generation: _Optional[int] = ...) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ("boot_id", "instance_complete", "generation")
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_COMPLETE_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    boot_id: bytes
    instance_complete: bool
    generation: int
    def __init__(self, boot_id: _Optional[bytes] = ..., instance_complete: bool = ..., generation: _Optional[int] = ...) -> None: ...

class RankMessage(_message.Message):
    __slots__ = ("open", "step", "goodbye")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    GOODBYE_FIELD_NUMBER: _ClassVar[int]
    open: StreamOpen
    step: Step
    goodbye: StreamGoodbye
    def __init__(self, open: _Optional[_Union[StreamOpen, _Mapping]] = ..., step: _Optional[_Union[Step, _Mapping]] = ..., goodbye: _Optional[_Union[StreamGoodbye, _Mapping]] = ...) -> None: ...

class RankReply(_message.Message):
    __slots__ = ("opened", "completions", "closing")
    OPENED_FIELD_NUMBER: _ClassVar[int]
    COMPLETIONS_FIELD_NUMBER: _ClassVar[int]
    CLOSING_FIELD_NUMBER: _ClassVar[int]
    opened: StreamOpened
    completions: Completions
    closing: StreamClosing
    def __init__(self, opened: _Optional[_Union[StreamOpened, _Mapping]] = ..., completions: _Optional[_Union[Completions, _Mapping]] = ..., closing: _Optional[_Union[StreamClosing, _Mapping]] = ...) -> None: ...

class StreamOpen(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class StreamOpened(_message.Message):
    __slots__ = ("boot_id",)
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    boot_id: bytes
    def __init__(self, boot_id: _Optional[bytes] = ...) -> None: ...

class StreamGoodbye(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class StreamClosing(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class Step(_message.Message):
    __slots__ = ("stores", "loads", "revoked_job_ids")
    STORES_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    REVOKED_JOB_IDS_FIELD_NUMBER: _ClassVar[int]
    stores: _containers.RepeatedCompositeFieldContainer[StoreJob]
    loads: _containers.RepeatedCompositeFieldContainer[LoadJob]
    revoked_job_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, stores: _Optional[_Iterable[_Union[StoreJob, _Mapping]]] = ..., loads: _Optional[_Iterable[_Union[LoadJob, _Mapping]]] = ..., revoked_job_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class StoreJob(_message.Message):
    __slots__ = ("job_id", "generation", "group", "ticket_cell", "bell", "parent_hash", "blocks")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    TICKET_CELL_FIELD_NUMBER: _ClassVar[int]
    BELL_FIELD_NUMBER: _ClassVar[int]
    PARENT_HASH_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    generation: int
    group: int
    ticket_cell: int
    bell: int
    parent_hash: bytes
    blocks: _containers.RepeatedCompositeFieldContainer[BlockRef]
    def __init__(self, job_id: _Optional[int] = ..., generation: _Optional[int] = ..., group: _Optional[int] = ..., ticket_cell: _Optional[int] = ..., bell: _Optional[int] = ..., parent_hash: _Optional[bytes] = ..., blocks: _Optional[_Iterable[_Union[BlockRef, _Mapping]]] = ...) -> None: ...

class BlockRef(_message.Message):
    __slots__ = ("hash", "block_id")
    HASH_FIELD_NUMBER: _ClassVar[int]
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    hash: bytes
    block_id: int
    def __init__(self, hash: _Optional[bytes] = ..., block_id: _Optional[int] = ...) -> None: ...

class LoadJob(_message.Message):
    __slots__ = ("job_id", "generation", "ticket_cell", "bell", "lease_id", "skip_blocks", "block_ids", "deadline_ms")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TICKET_CELL_FIELD_NUMBER: _ClassVar[int]
    BELL_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    SKIP_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    generation: int
    ticket_cell: int
    bell: int
    lease_id: int
    skip_blocks: int
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    deadline_ms: int
    def __init__(self, job_id: _Optional[int] = ..., generation: _Optional[int] = ..., ticket_cell: _Optional[int] = ..., bell: _Optional[int] = ..., lease_id: _Optional[int] = ..., skip_blocks: _Optional[int] = ..., block_ids: _Optional[_Iterable[int]] = ..., deadline_ms: _Optional[int] = ...) -> None: ...

class Completions(_message.Message):
    __slots__ = ("stores", "loads")
    STORES_FIELD_NUMBER: _ClassVar[int]
    LOADS_FIELD_NUMBER: _ClassVar[int]
    stores: _containers.RepeatedCompositeFieldContainer[StoreOutcome]
    loads: _containers.RepeatedCompositeFieldContainer[LoadOutcome]
    def __init__(self, stores: _Optional[_Iterable[_Union[StoreOutcome, _Mapping]]] = ..., loads: _Optional[_Iterable[_Union[LoadOutcome, _Mapping]]] = ...) -> None: ...

class StoreOutcome(_message.Message):
    __slots__ = ("job_id", "blocks_stored", "blocks_present", "unstored")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_STORED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_PRESENT_FIELD_NUMBER: _ClassVar[int]
    UNSTORED_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    blocks_stored: int
    blocks_present: int
    unstored: _containers.RepeatedCompositeFieldContainer[UnstoredBlocks]
    def __init__(self, job_id: _Optional[int] = ..., blocks_stored: _Optional[int] = ..., blocks_present: _Optional[int] = ..., unstored: _Optional[_Iterable[_Union[UnstoredBlocks, _Mapping]]] = ...) -> None: ...

class UnstoredBlocks(_message.Message):
    __slots__ = ("reason", "blocks")
    REASON_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    reason: UnstoredReason
    blocks: int
    def __init__(self, reason: _Optional[_Union[UnstoredReason, str]] = ..., blocks: _Optional[int] = ...) -> None: ...

class LoadOutcome(_message.Message):
    __slots__ = ("job_id", "status")
    JOB_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    job_id: int
    status: LoadStatus
    def __init__(self, job_id: _Optional[int] = ..., status: _Optional[_Union[LoadStatus, str]] = ...) -> None: ...

class PrefixMessage(_message.Message):
    __slots__ = ("number", "lookup", "renew", "release")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    number: int
    lookup: LookupRequest
    renew: RenewRequest
    release: ReleaseRequest
    def __init__(self, number: _Optional[int] = ..., lookup: _Optional[_Union[LookupRequest, _Mapping]] = ..., renew: _Optional[_Union[RenewRequest, _Mapping]] = ..., release: _Optional[_Union[ReleaseRequest, _Mapping]] = ...) -> None: ...

class PrefixReply(_message.Message):
    __slots__ = ("number", "lookup", "renew", "release", "error")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_FIELD_NUMBER: _ClassVar[int]
    RENEW_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    number: int
    lookup: LookupResponse
    renew: RenewResponse
    release: ReleaseResponse
    error: CallError
    def __init__(self, number: _Optional[int] = ..., lookup: _Optional[_Union[LookupResponse, _Mapping]] = ..., renew: _Optional[_Union[RenewResponse, _Mapping]] = ..., release: _Optional[_Union[ReleaseResponse, _Mapping]] = ..., error: _Optional[_Union[CallError, _Mapping]] = ...) -> None: ...

class CallError(_message.Message):
    __slots__ = ("code", "reason")
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    code: int
    reason: str
    def __init__(self, code: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("generation", "group", "hashes", "hash_bytes")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    HASH_BYTES_FIELD_NUMBER: _ClassVar[int]
    generation: int
    group: int
    hashes: bytes
    hash_bytes: int
    def __init__(self, generation: _Optional[int] = ..., group: _Optional[int] = ..., hashes: _Optional[bytes] = ..., hash_bytes: _Optional[int] = ...) -> None: ...

class LookupResponse(_message.Message):
    __slots__ = ("hit_blocks", "lease_id", "lease_ttl_ms")
    HIT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    hit_blocks: int
    lease_id: int
    lease_ttl_ms: int
    def __init__(self, hit_blocks: _Optional[int] = ..., lease_id: _Optional[int] = ..., lease_ttl_ms: _Optional[int] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    def __init__(self, lease_id: _Optional[int] = ...) -> None: ...

class RenewResponse(_message.Message):
    __slots__ = ("lease_ttl_ms",)
    LEASE_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    lease_ttl_ms: int
    def __init__(self, lease_ttl_ms: _Optional[int] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("lease_ids",)
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    lease_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, lease_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ("released",)
    RELEASED_FIELD_NUMBER: _ClassVar[int]
    released: int
    def __init__(self, released: _Optional[int] = ...) -> None: ...

class ResetRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResetResponse(_message.Message):
    __slots__ = ("generation", "blocks_dropped")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_DROPPED_FIELD_NUMBER: _ClassVar[int]
    generation: int
    blocks_dropped: int
    def __init__(self, generation: _Optional[int] = ..., blocks_dropped: _Optional[int] = ...) -> None: ...
