"""The layout is found from the tensors, and the move into shared memory changes nothing of them.

Shapes are those that vLLM's releases hand over, small; every element has its own value, so a
block read through the regions is either right or visibly not.
"""

from __future__ import annotations

import fcntl
import os

import pytest
import torch

from kvoffd_client.errors import MemoryFailed
from kvoffd_client.vllm import layout
from kvoffd_client.vllm.settings import Refusal

pytestmark = [pytest.mark.vllm]

BLOCKS, HEADS, TOKENS, SIZE = 7, 2, 4, 8
BLOCK_BYTES = HEADS * TOKENS * 2 * SIZE * 4


def one_storage(layers: int = 3) -> dict[str, torch.Tensor]:
    """0.29 and later: every layer is a view of one buffer."""
    shape = (layers, BLOCKS, HEADS, TOKENS, 2 * SIZE)
    buffer = torch.arange(layers * BLOCKS * BLOCK_BYTES // 4, dtype=torch.float32).view(shape)
    return {f"layer {number}": buffer[number] for number in range(layers)}


def storage_each(layers: int = 3) -> dict[str, torch.Tensor]:
    """0.28 and before: a buffer for each layer."""
    return {
        name: tensor.clone() + 1000 * number
        for number, (name, tensor) in enumerate(one_storage(layers).items())
    }


def split_keys_and_values(layers: int = 2) -> dict[str, torch.Tensor]:
    """0.22 and before: keys and values apart, the blocks second."""
    shape = (2, BLOCKS, HEADS, TOKENS, SIZE)
    return {
        f"layer {number}": (torch.arange(2 * BLOCKS * HEADS * TOKENS * SIZE) + 5000.0 * number)
        .float()
        .view(shape)
        for number in range(layers)
    }


def interleaved_layers(layers: int = 3) -> dict[str, torch.Tensor]:
    """All layers of a block side by side: each layer's blocks have a stride."""
    shape = (BLOCKS, layers, HEADS, TOKENS, 2 * SIZE)
    buffer = torch.arange(layers * BLOCKS * BLOCK_BYTES // 4, dtype=torch.float32).view(shape)
    return {f"layer {number}": buffer[:, number] for number in range(layers)}


def tokens_before_heads() -> dict[str, torch.Tensor]:
    """Another order of the bytes within a block."""
    shape = (BLOCKS, TOKENS, HEADS, 2 * SIZE)
    values = torch.arange(BLOCKS * BLOCK_BYTES // 4, dtype=torch.float32).view(shape)
    return {"layer 0": values.permute(0, 2, 1, 3)}


def padded() -> dict[str, torch.Tensor]:
    """Something lies before the first block and between any two."""
    elements = BLOCK_BYTES // 4
    buffer = torch.arange(5 + BLOCKS * (elements + 3), dtype=torch.float32)
    rows = buffer[5:].view(BLOCKS, elements + 3)[:, :elements]
    return {"layer 0": rows.unflatten(1, (HEADS, TOKENS, 2 * SIZE))}


SHAPES = [
    one_storage,
    storage_each,
    split_keys_and_values,
    interleaved_layers,
    tokens_before_heads,
    padded,
]


def block_dim(tensor: torch.Tensor) -> int:
    return tensor.shape.index(BLOCKS)


@pytest.mark.parametrize("make", SHAPES)
def test_a_block_is_exactly_its_own_bytes_and_the_engines_views_follow(make) -> None:
    """Through the shared memory each block has the bytes that the engine's view of it has."""
    tensors = make()
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    pool = layout.share_pool(tensors, BLOCKS, BLOCK_BYTES, "vec")
    try:
        for name, tensor in tensors.items():
            assert torch.equal(tensor, before[name]), "the move keeps every byte"
        for block in range(BLOCKS):
            seen = b"".join(
                bytes(pool.memories[region.memory_index].buffer)[begin : begin + region.block_bytes]
                for region in pool.regions
                for begin in [region.offset_bytes + block * region.block_stride_bytes]
            )
            values = torch.frombuffer(bytearray(seen), dtype=torch.float32)
            expected = torch.cat(
                [tensor.select(block_dim(tensor), block).flatten() for tensor in tensors.values()]
            )
            assert torch.equal(values.sort().values, expected.sort().values)
        # What the engine writes from now on is in the shared memory.
        next(iter(tensors.values())).fill_(-1.0)
        region = pool.regions[0]
        written = bytes(pool.memories[region.memory_index].buffer)[region.offset_bytes :][:4]
        assert written == torch.tensor([-1.0]).numpy().tobytes()
    finally:
        for memory in pool.memories:
            memory.close()


@pytest.mark.parametrize(
    ("make", "memories", "regions"),
    [
        (one_storage, 1, 3),
        (storage_each, 3, 3),
        (split_keys_and_values, 2, 4),
        (interleaved_layers, 1, 3),
        (tokens_before_heads, 1, 1),
        (padded, 1, 1),
    ],
)
def test_each_storage_is_shared_once(make, memories: int, regions: int) -> None:
    pool = layout.share_pool(make(), BLOCKS, BLOCK_BYTES, "vec")
    for memory in pool.memories:
        memory.close()
    assert (len(pool.memories), len(pool.regions)) == (memories, regions)


def test_the_moved_pool_cannot_shrink_under_who_maps_it() -> None:
    """Else a peer could end a copier with SIGBUS; the daemon refuses what is not sealed so."""
    pool = layout.share_pool(storage_each(), BLOCKS, BLOCK_BYTES, "vec")
    for memory in pool.memories:
        assert fcntl.fcntl(memory.fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        with pytest.raises(PermissionError):
            os.ftruncate(memory.fd, 1)
        memory.close()


def test_views_made_before_the_move_follow_it_and_outlive_the_descriptors() -> None:
    """The engine's layers keep such views; the worker's shutdown closes descriptors alone."""
    tensors = one_storage()
    old = tensors["layer 1"][3].transpose(0, 1)
    expected = old.clone()
    pool = layout.share_pool(tensors, BLOCKS, BLOCK_BYTES, "vec")
    assert torch.equal(old, expected)
    tensors["layer 1"][3] = 9.0
    assert bool((old == 9.0).all())
    region = pool.regions[1]
    begin = region.offset_bytes + 3 * region.block_stride_bytes
    seen = pool.memories[0].buffer[begin : begin + region.block_bytes]
    assert seen == torch.full((BLOCK_BYTES // 4,), 9.0).numpy().tobytes()
    for memory in pool.memories:
        memory.close()
    tensors["layer 1"][3] = 8.0
    assert bool((old == 8.0).all())


def fingerprint(tensors: dict[str, torch.Tensor], order: str = "vec") -> str:
    pool = layout.share_pool(tensors, BLOCKS, BLOCK_BYTES, order)
    for memory in pool.memories:
        memory.close()
    return pool.layout


def test_only_what_orders_a_blocks_bytes_makes_another_layout() -> None:
    """Where a layer's buffer lies does not; the order within a block and the processor's do."""
    alike = {fingerprint(make()) for make in (one_storage, storage_each, interleaved_layers)}
    assert len(alike) == 1
    others = {
        fingerprint(split_keys_and_values(3)),
        fingerprint(one_storage(), "amx"),
        fingerprint(one_storage(2)),
        fingerprint(tokens_before_heads()),
    }
    assert len(others) == 4
    assert not alike & others


def test_more_blocks_make_the_same_layout() -> None:
    few = layout.find_layout("layer", torch.zeros(BLOCKS, HEADS, TOKENS, 2 * SIZE), BLOCKS)
    more = layout.find_layout("layer", torch.zeros(50, HEADS, TOKENS, 2 * SIZE), 50)
    assert (few.piece_bytes, few.order) == (more.piece_bytes, more.order)


@pytest.mark.parametrize(
    ("tensor", "blocks", "why"),
    [
        (torch.zeros(5, HEADS, TOKENS, SIZE), BLOCKS, "block dimension"),
        (torch.zeros(2, HEADS, TOKENS, SIZE), 2, "block dimension"),
        (torch.zeros(BLOCKS, HEADS, TOKENS, 2 * SIZE)[..., :SIZE], BLOCKS, "not contiguous"),
    ],
)
def test_what_is_not_understood_is_refused_with_the_layers_name(tensor, blocks: int, why) -> None:
    with pytest.raises(Refusal, match=f"layer odd: .*{why}"):
        layout.find_layout("odd", tensor, blocks)


def test_a_block_of_another_size_than_the_engine_says_is_refused_and_nothing_moved() -> None:
    tensors = one_storage()
    address = tensors["layer 0"].data_ptr()
    with pytest.raises(Refusal, match="bytes a block"):
        layout.share_pool(tensors, BLOCKS, BLOCK_BYTES * 2, "vec")
    assert tensors["layer 0"].data_ptr() == address


def test_a_pool_on_another_device_is_refused_and_nothing_moved() -> None:
    shape = (BLOCKS, HEADS, TOKENS, 2 * SIZE)
    tensors = storage_each() | {"layer 9": torch.zeros(shape, device="meta")}
    address = tensors["layer 0"].data_ptr()
    with pytest.raises(Refusal, match="layer 9 lies on meta; only cpu is supported"):
        layout.share_pool(tensors, BLOCKS, BLOCK_BYTES, "vec")
    assert tensors["layer 0"].data_ptr() == address


def test_a_kernel_without_sealed_memory_is_a_refusal_and_leaves_the_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Memory for the second storage is not to be had: the first is not moved either."""
    create = layout.SharedMemory.create
    made: list[layout.SharedMemory] = []

    def create_once(name: str, size_bytes: int) -> layout.SharedMemory:
        if made:
            raise MemoryFailed("no room")
        made.append(create(name, size_bytes))
        return made[0]

    monkeypatch.setattr(layout.SharedMemory, "create", create_once)
    tensors = storage_each()
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in tensors.items()}
    with pytest.raises(Refusal, match="cannot be moved into shared memory: no room"):
        layout.share_pool(tensors, BLOCKS, BLOCK_BYTES, "vec")
    for name, (address, values) in before.items():
        assert tensors[name].data_ptr() == address
        assert torch.equal(tensors[name], values)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(made[0].fd)


def test_moving_a_pool_gives_back_the_old_memory_behind_it(monkeypatch) -> None:
    """In pieces, whose ends lie in the middle of pages: no byte of a neighbour is lost."""
    monkeypatch.setattr(layout, "_MOVED_BYTES", 10_000)
    tensors = {"layer 0": torch.arange(BLOCKS * 4096, dtype=torch.float32).view(BLOCKS, 4096)}
    before = tensors["layer 0"].clone()
    pool = layout.share_pool(tensors, BLOCKS, 4096 * 4, "vec")
    assert torch.equal(tensors["layer 0"], before)
    for memory in pool.memories:
        memory.close()
