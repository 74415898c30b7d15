"""The layout of an engine's KV pool, found from its tensors, and its move into shared memory.

At start-up, on a rank's thread, before any block is written. Knows nothing of sessions.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import json
import math
import mmap
import os
from typing import TYPE_CHECKING, NamedTuple

import torch

from kvoffd_client.descriptions import RegionDescription
from kvoffd_client.memory import SharedMemory
from kvoffd_client.vllm.namespace import dtype_name
from kvoffd_client.vllm.settings import Refusal

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


_BLOCKS_AMBIGUOUS_MAX = 2
# Of a pool that is being moved: as much memory as is needed twice for a moment.
_MOVED_BYTES = 64 << 20


class Pool(NamedTuple):
    """A pool in shared memory. `layout` is equal for equal arrangements of a block's bytes."""

    memories: tuple[SharedMemory, ...]
    regions: tuple[RegionDescription, ...]
    layout: str


class TensorLayout(NamedTuple):
    """Where the blocks of one tensor lie in its storage, in bytes."""

    offsets_bytes: tuple[int, ...]
    block_stride_bytes: int
    piece_bytes: int
    #: Sizes of the other dimensions, outermost in memory first.
    order: tuple[tuple[int, int], ...]


def find_layout(name: str, tensor: torch.Tensor, blocks: int) -> TensorLayout:
    """Pieces of a block: one, or one for each index of the dimensions around it.

    Raises:
        Refusal: no dimension has that many blocks, or pieces have holes.
    """
    candidates = [dim for dim, size in enumerate(tensor.shape) if size == blocks]
    # Two entries might as well be K and V.
    if not candidates or blocks <= _BLOCKS_AMBIGUOUS_MAX:
        raise Refusal(
            f"layer {name}: the block dimension of {tuple(tensor.shape)} is not known, with "
            f"{blocks} blocks in the pool"
        )
    # Of equal sizes the outermost in memory: engines keep the bytes of a block together.
    block_dim = max(candidates, key=tensor.stride)
    element_bytes = tensor.element_size()
    block_stride = tensor.stride(block_dim)
    others = sorted(
        (dim for dim in range(tensor.dim()) if dim != block_dim and tensor.shape[dim] > 1),
        key=tensor.stride,
        reverse=True,
    )
    outer = [dim for dim in others if tensor.stride(dim) > block_stride]
    inner = [dim for dim in others if tensor.stride(dim) <= block_stride]
    elements = math.prod(tensor.shape[dim] for dim in inner)
    span = 1 + sum((tensor.shape[dim] - 1) * tensor.stride(dim) for dim in inner)
    if span != elements or elements > block_stride:
        raise Refusal(
            f"layer {name}: the bytes of a block are not contiguous (shape "
            f"{tuple(tensor.shape)}, strides {tensor.stride()})"
        )
    starts = [
        tensor.storage_offset()
        + sum(at * tensor.stride(dim) for at, dim in zip(index, outer, strict=True))
        for index in itertools.product(*(range(tensor.shape[dim]) for dim in outer))
    ]
    return TensorLayout(
        tuple(start * element_bytes for start in starts),
        block_stride * element_bytes,
        elements * element_bytes,
        tuple((dim, tensor.shape[dim]) for dim in others),
    )


def share_pool(
    kv_caches: Mapping[str, torch.Tensor], blocks: int, layer_block_bytes: int, byte_order: str
) -> Pool:
    """Move the tensors' storages into sealed shared memory, in place.

    The engine's views follow, because the storage objects stay the same (VLLM on CPU;
    PyTorch has no public name for the swap). Content is kept.

    Raises:
        Refusal: the tensors cannot be shared, or their layout is not understood; nothing
            has been moved then.
    """
    layouts = {name: find_layout(name, tensor, blocks) for name, tensor in kv_caches.items()}
    storages: dict[int, torch.UntypedStorage] = {}
    for name, tensor in kv_caches.items():
        if tensor.device.type != "cpu":
            raise Refusal(f"layer {name} lies on {tensor.device}; only cpu is supported yet")
        block_bytes = len(layouts[name].offsets_bytes) * layouts[name].piece_bytes
        if block_bytes != layer_block_bytes:
            raise Refusal(
                f"layer {name} has {block_bytes} bytes a block and the engine says "
                f"{layer_block_bytes}"
            )
        storage = tensor.untyped_storage()
        storages.setdefault(storage.data_ptr(), storage)
    places = {address: place for place, address in enumerate(storages)}
    regions: list[RegionDescription] = []
    for name, tensor in kv_caches.items():
        found = layouts[name]
        regions += [
            RegionDescription(
                group=0,
                memory_index=places[tensor.untyped_storage().data_ptr()],
                offset_bytes=offset_bytes,
                block_stride_bytes=found.block_stride_bytes,
                block_bytes=found.piece_bytes,
            )
            for offset_bytes in found.offsets_bytes
        ]
    layout = _fingerprint(kv_caches, layouts, byte_order)
    return Pool(_move(list(storages.values())), tuple(regions), layout)


def _move(storages: Sequence[torch.UntypedStorage]) -> tuple[SharedMemory, ...]:
    memories: list[SharedMemory] = []
    shared: list[torch.UntypedStorage] = []
    try:
        for place, storage in enumerate(storages):
            memory = SharedMemory.create(f"kvoffd-pool-{place}", storage.nbytes())
            memories.append(memory)
            # The storage owns and closes the descriptor that it is given.
            new = torch.UntypedStorage._new_shared_fd_cpu(  # noqa: SLF001 - see share_pool
                os.dup(memory.fd), storage.nbytes()
            )
            shared.append(new)
    except Exception as error:
        for memory in memories:
            memory.close()
        raise Refusal(f"the KV pool cannot be moved into shared memory: {error}") from error
    for storage, new in zip(storages, shared, strict=True):
        _empty_into(storage, new)
        storage._swap_data_ptr_(new)
    return tuple(memories)


def _empty_into(storage: torch.UntypedStorage, new: torch.UntypedStorage) -> None:
    """Copy a storage piece by piece, and give back behind it what is not needed any more.

    So the engine never needs room for two pools; the old bytes are gone afterwards.
    """
    kernel = ctypes.CDLL(None, use_errno=True)
    first = storage.data_ptr()
    for begin in range(0, storage.nbytes(), _MOVED_BYTES):
        end = min(begin + _MOVED_BYTES, storage.nbytes())
        new[begin:end].copy_(storage[begin:end])
        # Whole pages alone; what is refused is merely given back later, with the storage.
        low = -(-(first + begin) // mmap.PAGESIZE) * mmap.PAGESIZE
        high = (first + end) // mmap.PAGESIZE * mmap.PAGESIZE
        if high > low:
            kernel.madvise(ctypes.c_void_p(low), ctypes.c_size_t(high - low), mmap.MADV_DONTNEED)


def _fingerprint(
    kv_caches: Mapping[str, torch.Tensor], layouts: Mapping[str, TensorLayout], byte_order: str
) -> str:
    """Of all that places a byte within a block; how many blocks there are does not matter."""
    described = [
        (
            name,
            dtype_name(tensor.dtype),
            len(layouts[name].offsets_bytes),
            layouts[name].piece_bytes,
            layouts[name].order,
        )
        for name, tensor in kv_caches.items()
    ]
    encoded = json.dumps([byte_order, described]).encode()
    return f"{byte_order} {hashlib.sha256(encoded).hexdigest()[:24]}"
