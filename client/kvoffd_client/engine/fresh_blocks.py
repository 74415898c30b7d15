"""Which blocks of a request go into store runs, and which must not.

Owned by the scheduler half, on the scheduler's thread. Knows what was handed
out since the last reset; the runs themselves are the book's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvoffd_client.engine.guard import Guard
    from kvoffd_client.engine.requests import RequestState
    from kvoffd_client.engine.store_book import StoreBook


class FreshBlocks:
    """Blocks whose KV is of this generation, and the decision to store them.

    The engine's own cache may serve KV of before a reset for as long as it
    likes; such blocks, and all that was computed from them, are never stored.
    """

    def __init__(self, book: StoreBook, guard: Guard) -> None:
        self._book = book
        self._guard = guard
        #: Handed out since the last reset; None while there was none.
        self._given: set[int] | None = None

    def give(self, block_ids: Iterable[int], *, is_fresh: bool) -> None:
        """Blocks were handed out: what they will hold is computed from now on.

        Not fresh: by a request that was alive at the reset, from what was there before.
        """
        if self._given is None:
            return
        if is_fresh:
            self._given.update(block_ids)
        else:
            self._given.difference_update(block_ids)

    def reset(self) -> None:
        self._given = set()

    def decide(
        self, state: RequestState, limit: int, hashes: Sequence[bytes], generation: int
    ) -> None:
        """Put the blocks from the cursor up to `limit` into runs, and move the cursor.

        Left out are blocks that came by a load, and those that are in a run
        already: another request shares them.
        """
        if state.barred or state.load_job is not None:
            return
        given, blocks = self._given, state.blocks
        begin: int | None = None
        for at in range(state.cursor, limit):
            if given is not None and blocks[at] not in given:
                limit = at
                break
            if state.loaded_begin <= at < state.loaded_end or self._is_coming(
                blocks[at], hashes[at]
            ):
                if begin is not None:
                    self._add_run(begin, at, hashes, blocks, generation)
                begin = None
            elif begin is None:
                begin = at
        if begin is not None and begin < limit:
            self._add_run(begin, limit, hashes, blocks, generation)
        state.cursor = max(state.cursor, limit)

    def _is_coming(self, block_id: int, block_hash: bytes) -> bool:
        stored_as = self._book.hash_of(block_id)
        if stored_as is None or stored_as == block_hash:
            return stored_as is not None
        # It was handed out and nobody told us: what is under way reads somebody else's KV.
        self._guard.misuse(f"block {block_id} was handed out unseen")
        self._book.reuse((block_id,))
        return False

    def _add_run(
        self, begin: int, end: int, hashes: Sequence[bytes], blocks: Sequence[int], generation: int
    ) -> None:
        parent_hash = bytes(hashes[begin - 1]) if begin else b""
        self._book.add(parent_hash, hashes[begin:end], blocks[begin:end], generation)
