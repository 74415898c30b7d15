"""Methods: from a service's descriptor to gRPC handlers that never leak an exception.

Keeps no state. Messages are decoded here and not by grpc, because bytes that are no
message have to end their session, with a status and a sentence like every other failure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import structlog
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from kvoffd.errors import KvoffdError, Undecodable
from kvoffd.rpc.auth import session_of
from kvoffd.rpc.status import PROTOCOL_BREAKS, status_code
from kvoffd.service.sessions import CloseCode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor

    from kvoffd.service.sessions import Session, Sessions

log = structlog.get_logger(__name__)


def handlers(
    descriptor: ServiceDescriptor, servicer: Any, sessions: Sessions
) -> grpc.GenericRpcHandler:
    """All methods of a service: `servicer` has one of the same name for each.

    A unary one is called with session and request; a stream with session and context.
    """
    return grpc.method_handlers_generic_handler(
        descriptor.full_name,
        {
            method.name: _handler(method, getattr(servicer, method.name), sessions)
            for method in descriptor.methods
        },
    )


def decode(message_class: type[Message], encoded: bytes) -> Message:
    """Raises Undecodable with a sentence."""
    try:
        return message_class.FromString(encoded)
    except DecodeError as error:
        raise Undecodable(
            f"{len(encoded)} bytes are no {message_class.DESCRIPTOR.full_name}: {error}."
        ) from error


def _handler(
    method: MethodDescriptor, function: Callable[..., Awaitable[Any]], sessions: Sessions
) -> grpc.RpcMethodHandler:
    request_class = GetMessageClass(method.input_type)
    serializer = GetMessageClass(method.output_type).SerializeToString

    async def unary(encoded: bytes, context: grpc.aio.ServicerContext) -> Any:
        async def work(session: Session) -> Any:
            return await function(session, decode(request_class, encoded))

        return await _guarded(work, context, sessions)

    async def stream(_: Any, context: grpc.aio.ServicerContext) -> None:
        async def work(session: Session) -> None:
            await function(session, context)

        await _guarded(work, context, sessions)

    if method.client_streaming:
        return grpc.stream_stream_rpc_method_handler(stream, None, serializer)
    return grpc.unary_unary_rpc_method_handler(unary, None, serializer)


async def _guarded(
    work: Callable[[Session], Awaitable[Any]],
    context: grpc.aio.ServicerContext,
    sessions: Sessions,
) -> Any:
    """Do the work of a call; a failure becomes a status, a broken protocol a closed session."""
    session = None
    try:
        session = session_of(context, sessions)
        return await work(session)
    except PROTOCOL_BREAKS as error:
        if session is not None:
            sessions.close(session, CloseCode.PROTOCOL, str(error))
        code, sentence = status_code(error), str(error)
    except KvoffdError as error:
        code, sentence = status_code(error), str(error)
    except grpc.aio.BaseError:
        raise
    except Exception:
        log.exception("a call failed")
        code, sentence = grpc.StatusCode.INTERNAL, "The daemon failed; its log says how."
    await context.abort(code, sentence)
    return None
