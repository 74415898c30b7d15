"""The gRPC server: one unix socket, our two services, health and reflection.

Owns the server and the health it reports. Runs on the loop thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from kvoffd.rpc import permissions
from kvoffd.rpc.methods import handlers
from kvoffd_proto.v1 import admin_pb2, offload_pb2

if TYPE_CHECKING:
    from kvoffd.rpc.admin import AdminServicer
    from kvoffd.rpc.offload import OffloadServicer
    from kvoffd.rpc.options import RpcOptions
    from kvoffd.service.sessions import Sessions

OFFLOAD = offload_pb2.DESCRIPTOR.services_by_name["Offload"]
ADMIN = admin_pb2.DESCRIPTOR.services_by_name["Admin"]
METADATA_BYTES_MAX = 16 * 1024


class RpcServer:
    """Serves from start() to stop()."""

    def __init__(
        self,
        options: RpcOptions,
        sessions: Sessions,
        offload: OffloadServicer,
        admin: AdminServicer,
    ) -> None:
        self._options = options
        self._health = health.aio.HealthServicer()
        self._server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", options.message_bytes_max),
                ("grpc.max_metadata_size", METADATA_BYTES_MAX),
                ("grpc.so_reuseport", 0),
            ]
        )
        self._server.add_generic_rpc_handlers(
            [handlers(OFFLOAD, offload, sessions), handlers(ADMIN, admin, sessions)]
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            [
                OFFLOAD.full_name,
                ADMIN.full_name,
                health.SERVICE_NAME,
                reflection.SERVICE_NAME,
            ],
            self._server,
        )

    async def start(self) -> None:
        """Listens. The socket's path must be free. Raises OSError."""
        path = self._options.socket
        with permissions.private_files():
            try:
                bound = self._server.add_insecure_port(f"unix:{path}")
            except RuntimeError as error:
                raise OSError(f"{path} cannot be listened on: {error}") from error
        if not bound:
            raise OSError(f"{path} cannot be listened on.")
        permissions.open_to_group(path, self._options.socket_gid)
        await self._server.start()

    async def report_health(self, *, offload: bool, admin: bool) -> None:
        """What grpc.health.v1 says of the services; the whole is as healthy as offload."""
        for name, serves in (
            ("", offload),
            (OFFLOAD.full_name, offload),
            (ADMIN.full_name, admin),
        ):
            status = health_pb2.HealthCheckResponse.ServingStatus.Value(
                "SERVING" if serves else "NOT_SERVING"
            )
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        """Lets calls end within the grace, then ends them."""
        await self._server.stop(grace_s)
