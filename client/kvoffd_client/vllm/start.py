"""What both sides of the connector need at start-up, worked out once a process.

Plain values and a bounded wait; owns no session.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvoffd_client.descriptions import SessionOptions
from kvoffd_client.errors import ClientError
from kvoffd_client.paths import socket_path
from kvoffd_client.vllm.admission import check_engine
from kvoffd_client.vllm.namespace import check_weights
from kvoffd_client.vllm.settings import Refusal, Settings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

    from kvoffd_client.session import Session

log = logging.getLogger(__name__)


class Start:
    """One engine's start, as seen in one of its processes. Never raises."""

    def __init__(self, config: VllmConfig, kv_cache_config: KVCacheConfig | None) -> None:
        self.config = config
        self.kv_cache_config = kv_cache_config
        self.settings = Settings()
        self.spec: FullAttentionSpec | None = None
        self.refusal: str | None = None
        self.ranks_total = config.parallel_config.tensor_parallel_size
        transfer = config.kv_transfer_config
        # Random a start unless the user sets it; vLLM hands both to every process.
        self.instance_id = str(transfer.engine_id)
        self.nonce = str(config.instance_id)
        try:
            self.settings = Settings.parse(transfer.kv_connector_extra_config)
            self._path = socket_path(self.settings.socket)
            self.spec = check_engine(config, kv_cache_config)
            check_weights(config, self.settings)
        except (Refusal, ClientError) as error:
            self.refusal = str(error)
        except Exception as error:  # a fault of ours must not end the engine
            log.exception("kvoffd: the engine could not be examined")
            self.refusal = f"{type(error).__name__}: {error}"

    def session_options(self) -> SessionOptions:
        """Where the daemon is."""
        settings = self.settings
        return SessionOptions(
            socket_path=self._path,
            heartbeat_timeout_s=settings.heartbeat_timeout_s,
            # The request's own deadline decides; this one only clears up behind it.
            lookup_timeout_s=max(settings.lookup_deadline_s, 5.0),
        )

    def wait_for(self, session: Session) -> None:
        """Let a daemon that is there answer before the first request does; bounded."""
        if session.wait_for_first_attempt(self.settings.start_wait_s):
            return
        log.warning(
            "kvoffd: no session with the daemon at %s yet (%s); the engine runs without offload "
            "until there is one",
            self._path,
            session.status.reason or session.status.state,
        )
