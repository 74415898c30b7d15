"""The worker side: a rank half over a session, and the engine's pool in shared memory.

One a rank, on the rank's thread. Without a half (refused, or not registered) every
hook does nothing.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

from kvoffd_client.descriptions import EngineIdentity, RankDescription
from kvoffd_client.engine.rank import RankHalf
from kvoffd_client.engine.types import RankOptions
from kvoffd_client.errors import ClientError
from kvoffd_client.rank_session import RankSession
from kvoffd_client.tickets import TicketPage
from kvoffd_client.vllm import colocated
from kvoffd_client.vllm.layout import share_pool
from kvoffd_client.vllm.metadata import RankAnnouncement
from kvoffd_client.vllm.namespace import cpu_byte_order, make_namespace
from kvoffd_client.vllm.settings import Refusal

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from kvoffd_client.memory import SharedMemory
    from kvoffd_client.vllm.start import Start

log = logging.getLogger(__name__)


class WorkerSide:
    """One rank. `half` is None as long as nothing is to be done."""

    def __init__(self, start: Start) -> None:
        self._start = start
        self._tickets: TicketPage | None = None
        self._memories: tuple[SharedMemory, ...] = ()
        self.half: RankHalf | None = None
        self.announcement: RankAnnouncement | None = None

    def register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Share the pool and begin a session. A refusal leaves the engine as it was."""
        try:
            self._register(kv_caches)
        except (Refusal, ClientError) as error:
            self._refuse(str(error))
        except Exception as error:  # a fault of ours must not end the engine
            log.exception("kvoffd: the rank could not be set up")
            self._refuse(f"{type(error).__name__}: {error}")

    def shutdown(self) -> None:
        """Hand over what is left and let go of the pool, within the session's bound."""
        half, self.half = self.half, None
        if half is not None:
            half.shutdown()
        if self._tickets is not None:
            self._tickets.close()
            self._tickets = None
        # The pool stays mapped by the engine's own storages; only our descriptors go.
        for memory in self._memories:
            memory.close()
        self._memories = ()

    def _register(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        start = self._start
        if start.refusal is not None or start.spec is None or start.kv_cache_config is None:
            # The scheduler comes to the same refusal; some engines cannot pass on a word of ours.
            return
        spec, blocks = start.spec, start.kv_cache_config.num_blocks
        order = cpu_byte_order(start.config, spec)
        pool = share_pool(kv_caches, blocks, spec.page_size_bytes, order)
        self._memories = pool.memories
        namespace = make_namespace(
            start.config, start.kv_cache_config, spec, start.settings, pool.layout
        )
        engine = EngineIdentity(start.instance_id, start.nonce, namespace, start.ranks_total)
        rank = get_tensor_model_parallel_rank()
        self._tickets = TicketPage.create(start.settings.ticket_cells)
        session = RankSession(
            start.session_options(),
            engine,
            RankDescription(rank, "cpu:0", blocks, pool.memories, pool.regions),
            self._tickets,
        )
        options = RankOptions(
            rank, strict=start.settings.strict, load_deadline_s=start.settings.load_deadline_s
        )
        self.half = RankHalf(session, self._tickets, options, time.monotonic)
        session.start()
        start.wait_for(session)
        if start.ranks_total == 1:
            colocated.announce(start.instance_id, start.nonce, self.half)
        self.announcement = RankAnnouncement(pool.layout, None)

    def _refuse(self, reason: str) -> None:
        self.announcement = RankAnnouncement(None, reason)
        log.warning("kvoffd: this engine runs without offload: %s", reason)
