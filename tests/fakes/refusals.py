"""How a call or a stream that must fail is looked at: a status, and never without a sentence."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest

from kvoffd_proto.v1 import offload_pb2 as pb

if TYPE_CHECKING:
    from tests.fakes.raw_client import Session


async def refusal(call: Any) -> grpc.StatusCode:
    """The status that a call must end with; a sentence must come with it."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.details()
    return caught.value.code()


async def stream_refusal(stream: Any) -> grpc.StatusCode:
    """The same for a stream, whatever is still said on it before."""

    async def read_all() -> None:
        while await stream.read() is not grpc.aio.EOF:
            pass

    with suppress(grpc.aio.AioRpcError):
        await asyncio.wait_for(read_all(), 30)
    assert await stream.details()
    code: grpc.StatusCode = await stream.code()
    return code


async def is_open(session: Session) -> bool:
    """Whether the daemon still knows a session."""
    call = session.offload.Heartbeat(pb.HeartbeatRequest(), metadata=session.metadata)
    code = await call.code()
    assert code in {grpc.StatusCode.OK, grpc.StatusCode.UNAUTHENTICATED}
    return code is grpc.StatusCode.OK
