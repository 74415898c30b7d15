"""A daemon of a few lines that speaks the protocol, and speaks it wrongly on demand.

It keeps no bytes and moves none: what it answers is set in `Behaviour`, which a
test may change at any time. It runs on threads of its own, without asyncio, so
that nothing of it shares the client's loop. `python -m tests.fakes.fake_daemon
SOCKET` runs it as a process that can be stopped and killed.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from kvoffd_proto.v1 import handshake_pb2, offload_pb2, offload_pb2_grpc
from tests.fakes.fake_handshakes import FakeHandshakes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

WAIT_S = 20.0


@dataclass
class Behaviour:
    """What the daemon does. The defaults are those of a good daemon."""

    hello: str = "welcome"  # or silent, close, garbage, refuse, flood
    close_code: int = handshake_pb2.CLOSE_CODE_FORBIDDEN
    offers: str = "accept"  # or silent, refuse
    register: str = "accept"  # or silent, or the name of a gRPC status
    heartbeat: str = "answer"  # or silent
    opening: str = "opened"  # or silent, close, completions
    stores: str = "stored"  # or never, twice, malformed, strange, invented
    loads: str = "loaded"  # or never, copier
    lookups: str = "hit"  # or miss, silent, error, leaseless
    resets: str = "answer"  # or silent
    reads: bool = True  # False: the rank's stream is left unread after its opening
    boot_id: bytes = b"\x01" * 16
    heartbeat_boot_id: bytes | None = None
    stream_boot_id: bytes | None = None
    complete: bool = True
    heartbeat_ms: int = 50
    store_blocks_max: int = 64
    jobs_in_flight_max: int = 8
    generation: int = 1
    lease_ttl_ms: int = 10_000


@dataclass
class Seen:
    """What came in, in order."""

    hellos: list[handshake_pb2.Hello] = field(default_factory=list)
    offers: list[tuple[handshake_pb2.Offer, int]] = field(default_factory=list)
    goodbyes: list[str] = field(default_factory=list)
    copiers_seen: list[int] = field(default_factory=list)
    registrations: list[offload_pb2.RegisterRequest] = field(default_factory=list)
    heartbeats: int = 0
    epochs: list[int] = field(default_factory=list)
    steps: list[offload_pb2.Step] = field(default_factory=list)
    stream_goodbyes: list[str] = field(default_factory=list)
    lookups: list[offload_pb2.PrefixMessage] = field(default_factory=list)
    renewals: list[int] = field(default_factory=list)
    releases: list[int] = field(default_factory=list)
    resets: int = 0


class FakeDaemon:
    """Started by its constructor, ended by `stop`; `forget` is a crash that leaves the sockets."""

    def __init__(self, socket_path: str, behaviour: Behaviour | None = None) -> None:
        self.socket_path = socket_path
        self.do = behaviour or Behaviour()
        self.seen = Seen()
        self.changed = threading.Condition()
        self.stopping = threading.Event()
        self._rank_replies: list[queue.Queue[offload_pb2.RankReply | None]] = []
        self._prefix_replies: list[queue.Queue[offload_pb2.PrefixReply | None]] = []
        self._handshakes = FakeHandshakes(self)
        self._pool = futures.ThreadPoolExecutor(32, "fake-daemon")
        self._server = grpc.server(self._pool)
        offload_pb2_grpc.add_OffloadServicer_to_server(_Offload(self), self._server)
        self._server.add_insecure_port(f"unix:{socket_path}")
        self._server.start()

    def note(self, change: Callable[[Seen], object]) -> None:
        with self.changed:
            change(self.seen)
            self.changed.notify_all()

    def wait_for(self, condition: Callable[[Seen], object]) -> None:
        """Wait until what was seen fulfils the condition; a test's failure after long."""
        with self.changed:
            assert self.changed.wait_for(lambda: condition(self.seen), WAIT_S), self.seen

    def send(self, reply: offload_pb2.RankReply) -> None:
        """Say something on every rank's stream."""
        for replies in list(self._rank_replies):
            replies.put(reply)

    def send_prefix(self, reply: offload_pb2.PrefixReply) -> None:
        """Say something on every scheduler's stream."""
        for replies in list(self._prefix_replies):
            replies.put(reply)

    def close_streams(self) -> None:
        """End all streams, and nothing else."""
        for replies in [*self._rank_replies, *self._prefix_replies]:
            replies.put(None)

    def close_sessions(self, code: int, reason: str) -> None:
        closing = handshake_pb2.Closing(code=code, reason=reason)
        self._handshakes.send_all(handshake_pb2.HandshakeReply(closing=closing))
        self._handshakes.drop_all()

    def drop_handshakes(self) -> None:
        self._handshakes.drop_all()

    def copier_up(self, incarnation: int, pidfds: list[int]) -> None:
        up = handshake_pb2.CopierUp(incarnation=incarnation)
        self._handshakes.send_all(handshake_pb2.HandshakeReply(copier_up=up), pidfds)

    def send_raw(self, payload: bytes) -> None:
        self._handshakes.send_raw(payload)

    def stop(self) -> None:
        self.stopping.set()
        self._handshakes.stop()
        self.close_streams()
        self._server.stop(0).wait()
        self._pool.shutdown()
        for _, fd in self.seen.offers:
            with contextlib.suppress(OSError):
                os.close(fd)
        Path(self.socket_path).unlink(missing_ok=True)


class _Offload(offload_pb2_grpc.OffloadServicer):
    """The gRPC half; each call has a thread of the pool."""

    def __init__(self, daemon: FakeDaemon) -> None:
        self._daemon = daemon

    def Register(  # noqa: N802 - gRPC's name
        self, request: offload_pb2.RegisterRequest, context: grpc.ServicerContext
    ) -> offload_pb2.RegisterResponse:
        do = self._daemon.do
        self._daemon.note(lambda seen: seen.registrations.append(request))
        if do.register == "silent":
            self._daemon.stopping.wait(WAIT_S)
        elif do.register != "accept":
            context.abort(grpc.StatusCode[do.register], "not like this")
        return offload_pb2.RegisterResponse(namespace_digest=b"d" * 32, generation=do.generation)

    def Heartbeat(  # noqa: N802 - gRPC's name
        self, request: offload_pb2.HeartbeatRequest, context: grpc.ServicerContext
    ) -> offload_pb2.HeartbeatResponse:
        del request, context
        do = self._daemon.do

        def count(seen: Seen) -> None:
            seen.heartbeats += 1

        self._daemon.note(count)
        if do.heartbeat == "silent":
            self._daemon.stopping.wait(WAIT_S)
        return offload_pb2.HeartbeatResponse(
            boot_id=do.heartbeat_boot_id or do.boot_id,
            instance_complete=do.complete,
            generation=do.generation,
        )

    def Transfer(  # noqa: N802 - gRPC's name
        self, request_iterator: Iterator[offload_pb2.RankMessage], context: grpc.ServicerContext
    ) -> Iterator[offload_pb2.RankReply]:
        replies: queue.Queue[offload_pb2.RankReply | None] = queue.Queue(1000)
        self._daemon._rank_replies.append(replies)
        if not context.add_callback(lambda: replies.put(None)):
            return  # ended before a thread was free for it
        first = next(request_iterator)
        self._daemon.note(lambda seen: seen.epochs.append(first.open.epoch))
        yield from self._opening()
        if self._daemon.do.reads:
            reader = threading.Thread(
                target=self._read_rank, args=(request_iterator, replies), name="fake-rank"
            )
            reader.start()
        while (reply := replies.get()) is not None:
            yield reply
        self._daemon._rank_replies.remove(replies)

    def _opening(self) -> Iterator[offload_pb2.RankReply]:
        do = self._daemon.do
        match do.opening:
            case "opened":
                boot_id = do.stream_boot_id or do.boot_id
                yield offload_pb2.RankReply(opened=offload_pb2.StreamOpened(boot_id=boot_id))
            case "completions":
                yield offload_pb2.RankReply(completions=offload_pb2.Completions())

    def _read_rank(
        self,
        messages: Iterator[offload_pb2.RankMessage],
        replies: queue.Queue[offload_pb2.RankReply | None],
    ) -> None:
        with contextlib.suppress(grpc.RpcError, Exception):
            for message in messages:
                if message.WhichOneof("message") == "goodbye":
                    reason = message.goodbye.reason
                    self._daemon.note(lambda seen, r=reason: seen.stream_goodbyes.append(r))
                    continue
                step = message.step
                self._daemon.note(lambda seen, s=step: seen.steps.append(s))
                for reply in answers(step, self._daemon.do):
                    replies.put(reply)
        # The client has ended its half, so the stream ends.
        replies.put(None)

    def Prefix(  # noqa: N802 - gRPC's name
        self, request_iterator: Iterator[offload_pb2.PrefixMessage], context: grpc.ServicerContext
    ) -> Iterator[offload_pb2.PrefixReply]:
        replies: queue.Queue[offload_pb2.PrefixReply | None] = queue.Queue(1000)
        self._daemon._prefix_replies.append(replies)
        if not context.add_callback(lambda: replies.put(None)):
            return  # ended before a thread was free for it
        reader = threading.Thread(
            target=self._read_prefix, args=(request_iterator, replies), name="fake-prefix"
        )
        reader.start()
        while (reply := replies.get()) is not None:
            yield reply
        self._daemon._prefix_replies.remove(replies)

    def _read_prefix(
        self,
        messages: Iterator[offload_pb2.PrefixMessage],
        replies: queue.Queue[offload_pb2.PrefixReply | None],
    ) -> None:
        with contextlib.suppress(grpc.RpcError, Exception):
            for message in messages:
                self._take_prefix(message, replies)

    def _take_prefix(
        self,
        message: offload_pb2.PrefixMessage,
        replies: queue.Queue[offload_pb2.PrefixReply | None],
    ) -> None:
        daemon = self._daemon
        match message.WhichOneof("message"):
            case "lookup":
                daemon.note(lambda seen: seen.lookups.append(message))
                if daemon.do.lookups != "silent":
                    replies.put(lookup_reply(message, daemon.do))
            case "renew":
                daemon.note(lambda seen: seen.renewals.append(message.renew.lease_id))
                renewed = offload_pb2.RenewResponse(lease_ttl_ms=daemon.do.lease_ttl_ms)
                replies.put(offload_pb2.PrefixReply(number=message.number, renew=renewed))
            case "release":
                daemon.note(lambda seen: seen.releases.extend(message.release.lease_ids))
                released = offload_pb2.ReleaseResponse(released=1)
                replies.put(offload_pb2.PrefixReply(number=message.number, release=released))

    def Reset(  # noqa: N802 - gRPC's name
        self, request: offload_pb2.ResetRequest, context: grpc.ServicerContext
    ) -> offload_pb2.ResetResponse:
        del request, context
        do = self._daemon.do

        def count(seen: Seen) -> None:
            seen.resets += 1

        self._daemon.note(count)
        if do.resets == "silent":
            self._daemon.stopping.wait(WAIT_S)
        do.generation += 1
        return offload_pb2.ResetResponse(generation=do.generation)


def answers(step: offload_pb2.Step, do: Behaviour) -> list[offload_pb2.RankReply]:
    """What a daemon of this behaviour says to a step."""
    stores = [
        store_outcome(job, do) for job in step.stores if do.stores not in {"never", "invented"}
    ]
    if do.stores == "invented":
        stores = [offload_pb2.StoreOutcome(job_id=job.job_id + 1000) for job in step.stores]
    status = {
        "loaded": offload_pb2.LOAD_STATUS_LOADED,
        "copier": offload_pb2.LOAD_STATUS_COPIER,
        "never": None,
    }[do.loads]
    loads = [
        offload_pb2.LoadOutcome(job_id=job.job_id, status=status)
        for job in step.loads
        if status is not None
    ]
    if not stores and not loads:
        return []
    completions = offload_pb2.Completions(stores=stores, loads=loads)
    reply = offload_pb2.RankReply(completions=completions)
    return [reply, reply] if do.stores == "twice" else [reply]


def store_outcome(job: offload_pb2.StoreJob, do: Behaviour) -> offload_pb2.StoreOutcome:
    blocks = len(job.blocks)
    if do.stores == "malformed":
        return offload_pb2.StoreOutcome(job_id=job.job_id, blocks_stored=blocks + 1)
    if do.stores == "strange":
        unstored = offload_pb2.UnstoredBlocks(reason=177, blocks=blocks)
        return offload_pb2.StoreOutcome(job_id=job.job_id, unstored=[unstored])
    return offload_pb2.StoreOutcome(job_id=job.job_id, blocks_stored=blocks)


def lookup_reply(message: offload_pb2.PrefixMessage, do: Behaviour) -> offload_pb2.PrefixReply:
    """The answer to a lookup; leases are numbered like the lookups."""
    blocks = len(message.lookup.hashes) // message.lookup.hash_bytes
    reply = offload_pb2.PrefixReply(number=message.number)
    match do.lookups:
        case "miss":
            reply.lookup.SetInParent()
        case "error":
            reply.error.code = grpc.StatusCode.ABORTED.value[0]
        case "leaseless":
            reply.lookup.hit_blocks = blocks
        case _:
            reply.lookup.hit_blocks = blocks
            reply.lookup.lease_id = message.number
            reply.lookup.lease_ttl_ms = do.lease_ttl_ms
    return reply


def main() -> None:
    """Serve until SIGTERM; a byte on stdout says that the sockets are there."""
    daemon = FakeDaemon(sys.argv[1], Behaviour(boot_id=os.urandom(16)))
    signal.signal(signal.SIGTERM, lambda *_: daemon.stopping.set())
    sys.stdout.write("serving\n")
    sys.stdout.flush()
    daemon.stopping.wait()
    daemon.stop()


if __name__ == "__main__":
    main()
