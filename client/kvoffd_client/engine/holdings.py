"""Which request has which blocks of the engine's pool, and which blocks were somebody else's.

Owned by the scheduler half, on the scheduler's thread. It tells the book of every block
that changes hands, before anything is decided of the step; it decides nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvoffd_client.engine.requests import RequestState

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvoffd_client.engine.fresh_blocks import FreshBlocks
    from kvoffd_client.engine.guard import Guard
    from kvoffd_client.engine.store_book import StoreBook
    from kvoffd_client.engine.types import RequestProgress, StepView


class Holdings:
    """The living requests by id, and their blocks."""

    def __init__(self, book: StoreBook, fresh: FreshBlocks, guard: Guard) -> None:
        self._book = book
        self._fresh = fresh
        self._guard = guard
        self.requests: dict[str, RequestState] = {}
        #: Given at admissions of this step: the book hears of them when the step is built.
        self._reused: list[int] = []

    def find(self, request_id: str) -> RequestState:
        """The request's state, made when it is new."""
        state = self.requests.get(request_id)
        if state is None:
            state = self.requests[request_id] = RequestState(request_id)
        return state

    def admitted(
        self, request_id: str, block_ids: Sequence[int], block_tokens: int, step: int
    ) -> RequestState:
        """The engine told all blocks of a request; those it did not have were somebody else's."""
        # Perhaps never looked up: where a request has nothing to gain from it.
        state = self.find(request_id)
        if state.blocks and state.blocks != list(block_ids[: len(state.blocks)]):
            # Preempted and admitted again between two steps, without being looked up.
            state.give_up_blocks()
            known = 0
        else:
            known = len(state.blocks) or state.local_tokens // block_tokens
        state.blocks[:] = block_ids
        given = state.blocks[known:]
        self._reused += given
        self._fresh.give(given, is_fresh=not state.barred)
        state.admitted_step = step
        return state

    def take_progress(self, number: int, view: StepView) -> None:
        """Who has which blocks now. All of it comes before any store is decided."""
        if self._reused:
            self._book.reuse(self._reused)
            self._reused.clear()
        if view.copied_block_ids:
            self._book.reuse(view.copied_block_ids)
        for request_id in view.preempted_request_ids:
            state = self.requests.get(request_id)
            # Preempted and admitted again in one step: it has new blocks already.
            if state is not None and state.admitted_step != number:
                state.give_up_blocks()
        for progress in view.progress:
            state = self.find(progress.request_id)
            if state.admitted_step != number:
                self._take_new_blocks(state, progress)
            state.scheduled_tokens = max(state.scheduled_tokens, progress.computed_tokens_after)

    def _take_new_blocks(self, state: RequestState, progress: RequestProgress) -> None:
        if progress.is_resumed:
            self._guard.misuse(f"{progress.request_id} was resumed without being given blocks")
            state.give_up_blocks()
        if progress.new_block_ids:
            state.blocks.extend(progress.new_block_ids)
            self._book.reuse(progress.new_block_ids)
            self._fresh.give(progress.new_block_ids, is_fresh=not state.barred)
