"""What vLLM carries between our two halves, wrapped in the types that it asks for.

Plain picklable values; owns no state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

if TYPE_CHECKING:
    from kvoffd_client.engine.metadata import RankReport, StepMetadata


@dataclass
class KvoffdMetadata(KVConnectorMetadata):
    """A step's orders; None from an engine that runs without offload."""

    step: StepMetadata | None


@dataclass
class KvoffdReport(KVConnectorWorkerMetadata):
    """What ended on one rank, or on all of them after vLLM has aggregated."""

    report: RankReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, KvoffdReport), f"a report of another connector: {type(other)}"
        return KvoffdReport(self.report.merged(other.report))


@dataclass
class RankAnnouncement(KVConnectorHandshakeMetadata):
    """What a rank found at start-up: how its pool is laid out, or why it cannot take part."""

    layout: str | None
    refusal: str | None
