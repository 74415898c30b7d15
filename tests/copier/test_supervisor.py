"""Copiers that die, hang, are cancelled or stopped: every batch ends once, nothing stays."""

from __future__ import annotations

import asyncio
import os
import select
import signal
from pathlib import Path

import pytest
from copier.rig import SHARD_BYTES, Rig

from kvoffd.copier.frames import BATCH_BLOCKS_MAX, Outcome
from kvoffd.copier.supervisor import Copier, CopierOptions
from kvoffd.errors import BadRequest, CopyFailed
from kvoffd_client.tickets import LoadProof


@pytest.fixture(params=["asyncio", "uvloop"])
def loop_name(request):
    """Readers, writers and timers are where the loops differ."""
    return request.param


def _is_dead(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], 0)[0])


def test_batches_of_a_killed_copier_end_once_and_its_pools_come_back(run):
    """SIGKILL with a queue: died, then each end once, then up; then the same pool works."""

    async def scenario():
        async with Rig() as rig:
            engine = rig.engine()
            pool = await rig.open(engine)
            first = rig.copier.incarnation
            os.kill(rig.copier.pid, signal.SIGSTOP)
            batches = [rig.store(pool, rig.job(engine), [n], [SHARD_BYTES * n]) for n in range(9)]
            batches += [rig.load(pool, rig.job(engine), [n], [0]) for n in range(9)]
            os.kill(rig.copier.pid, signal.SIGKILL)
            await rig.wait(lambda: rig.count("up") == 2)
            assert {rig.ends[batch].outcome for batch in batches} == {Outcome.FAILED}
            assert rig.ends_count == dict.fromkeys(batches, 1)
            assert [event[0] for event in rig.events] == ["up", "died", *["end"] * 18, "up"]
            assert rig.events[1][1] == first
            assert "killed by signal 9" in rig.events[1][2]
            assert _is_dead(rig.pidfds[0])
            assert not _is_dead(rig.pidfds[1])
            await asyncio.sleep(0)
            assert (rig.copier.state, rig.copier.restarts) == ("up", 1)
            assert rig.copier.incarnation != first
            end = await rig.end(rig.store(pool, rig.job(engine), [4], [0]))
            assert end.outcome is Outcome.COPIED
            assert rig.slot(0) == engine.block(4)

    run(scenario)


def test_a_load_killed_in_its_copy_is_interrupted_until_the_process_is_gone(run):
    """The cell says started, the lock has fallen, and only the pidfd proves the end."""

    async def scenario():
        async with Rig(arena_bytes=256 << 20) as rig:
            engine = rig.engine(pool_blocks=60, block_bytes=1 << 20)
            pool = await rig.open(engine)
            job = rig.job(engine)
            size = engine.shard_bytes
            load = rig.load(pool, job, list(range(60)), [size * n for n in range(60)])
            await rig.started(engine, job[1])
            rig.copier.kill("test")
            incarnation = engine.tickets.incarnation(job[1])
            assert incarnation == rig.events[0][1]
            end = await rig.end(load)
            assert end.outcome is Outcome.FAILED
            assert "(test)" in end.reason
            assert _is_dead(rig.pidfds[0])
            assert engine.tickets.try_end_load(job[1]) is LoadProof.INTERRUPTED
            after = engine.pool()
            await rig.wait(lambda: rig.count("up") == 2)
            await rig.round_trip()
            assert engine.pool() == after

    run(scenario)


def test_batches_submitted_while_no_copier_is_up_fail(run):
    """They end from the loop, never inside the call."""

    async def scenario():
        async with Rig() as rig:
            engine = rig.engine()
            pool = await rig.open(engine)
            rig.copier.kill("test")
            await rig.wait(lambda: rig.count("died") == 1)
            assert rig.copier.state == "restarting"
            batch = rig.store(pool, rig.job(engine), [0], [0])
            assert batch not in rig.ends
            assert (await rig.end(batch)).outcome is Outcome.FAILED
            with pytest.raises(CopyFailed, match="is restarting"):
                await rig.open(rig.engine())
            await rig.wait(lambda: rig.count("up") == 2)

    run(scenario)


def test_an_idle_copier_that_hangs_is_replaced(run):
    """SIGSTOP while nothing runs: pings stay unanswered, it is killed, its pools come back."""

    async def scenario():
        async with Rig(ping_interval_s=0.02, ping_timeout_s=0.3) as rig:
            engine = rig.engine()
            pool = await rig.open(engine)
            os.kill(rig.copier.pid, signal.SIGSTOP)
            await rig.wait(lambda: rig.count("up") == 2)
            assert "silent" in rig.events[1][2]
            await asyncio.sleep(0)
            end = await rig.end(rig.store(pool, rig.job(engine), [1], [0]))
            assert end.outcome is Outcome.COPIED

    run(scenario)


def test_a_busy_copier_is_not_killed_by_the_ping(run):
    """With a batch in flight silence is the service's to judge."""

    async def scenario():
        async with Rig(ping_interval_s=0.05, ping_timeout_s=0.4) as rig:
            engine = rig.engine()
            pool = await rig.open(engine)
            pid = rig.copier.pid
            batch = rig.store(pool, rig.job(engine), [1], [0], bell=1)
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(1.0)
            assert (rig.copier.pid, rig.count("died")) == (pid, 0)
            os.kill(pid, signal.SIGCONT)
            engine.tickets.ring()
            assert (await rig.end(batch)).outcome is Outcome.COPIED

    run(scenario)


def test_stop_ends_a_stopped_copier_and_its_batches(run):
    """A copier that cannot answer is killed by stop(); its batches have ended on return."""

    async def scenario():
        async with Rig(stop_timeout_s=0.1) as rig:
            engine = rig.engine()
            pool = await rig.open(engine)
            os.kill(rig.copier.pid, signal.SIGSTOP)
            batch = rig.store(pool, rig.job(engine), [1], [0])
            await rig.copier.stop()
            assert rig.ends[batch].outcome is Outcome.FAILED
            assert (rig.copier.state, rig.copier.pid) == ("down", 0)
            assert _is_dead(rig.pidfds[0])
            await rig.copier.stop()

    run(scenario)


def test_more_frames_than_the_socket_holds_wait_in_order(run):
    """A stopped copier does not block submit; once it goes on, all arrive."""

    async def scenario():
        async with Rig() as rig:
            engine = rig.engine(block_bytes=64)
            pool = await rig.open(engine)
            job = rig.job(engine)
            os.kill(rig.copier.pid, signal.SIGSTOP)
            batches = [rig.store(pool, job, [n % 16] * 500, [256 * n] * 500) for n in range(400)]
            os.kill(rig.copier.pid, signal.SIGCONT)
            await rig.wait(lambda: len(rig.ends) == len(batches))
            assert {end.outcome for end in rig.ends.values()} == {Outcome.COPIED}
            assert [event[1] for event in rig.events[1:]] == batches
            for place in range(400):
                assert rig.slot(256 * place, 256) == engine.block(place % 16)

    run(scenario)


def test_cancel_ends_what_has_not_started(run):
    """Parked batches end cancelled and write nothing; a cancelled load's cell says so."""

    async def scenario():
        async with Rig() as rig:
            engine = rig.engine()
            pool = await rig.open(engine)
            before = (engine.pool(), rig.arena.buffer[:])
            job = rig.job(engine)
            batches = [
                rig.store(pool, rig.job(engine), [1], [0], bell=1),
                rig.load(pool, job, [1], [0], bell=1),
            ]
            for batch in batches:
                rig.copier.cancel(batch)
            for batch in batches:
                assert (await rig.end(batch)).outcome is Outcome.CANCELLED
                rig.copier.cancel(batch)
            engine.tickets.ring()
            await rig.round_trip()
            assert (engine.pool(), rig.arena.buffer[:]) == before
            assert engine.tickets.try_end_load(job[1]) is LoadProof.GIVEN_UP
            assert rig.ends_count == dict.fromkeys(batches, 1)

    run(scenario)


def test_close_pool_ends_its_batches_first_and_unmaps(run):
    """On return every batch of the pool has ended, and the process maps none of its memory."""

    async def scenario():
        async with Rig() as rig:
            engine, other = rig.engine(seed=1), rig.engine(seed=2)
            pool, other_pool = await rig.open(engine), await rig.open(other)
            batches = [rig.store(pool, rig.job(engine), [n], [0], bell=1) for n in range(5)]
            stays = rig.store(other_pool, rig.job(other), [0], [0], bell=1)
            assert rig.maps().count("kvoffd-tickets") == 2
            await asyncio.gather(rig.copier.close_pool(pool), rig.copier.close_pool(pool))
            await asyncio.sleep(0)
            assert {rig.ends[batch].outcome for batch in batches} == {Outcome.CANCELLED}
            text = rig.maps()
            assert (text.count("kvoffd-tickets"), text.count("pool-0")) == (1, 1)
            assert sum("pool-0" in link for link in rig.links()) == 1
            late = rig.store(pool, rig.job(engine), [0], [0])
            assert (await rig.end(late)).outcome is Outcome.FAILED
            other.tickets.ring()
            assert (await rig.end(stays)).outcome is Outcome.COPIED
            await rig.copier.close_pool(pool)

    run(scenario)


def test_a_pool_closed_before_the_restart_does_not_come_back(run):
    """close_pool returns at the death of the process that had it."""

    async def scenario():
        async with Rig() as rig:
            engine = rig.engine()
            pool = await rig.open(engine)
            await rig.open(rig.engine(seed=2))
            os.kill(rig.copier.pid, signal.SIGSTOP)
            closing = asyncio.ensure_future(rig.copier.close_pool(pool))
            await asyncio.sleep(0)
            assert not closing.done()
            rig.copier.kill("test")
            await closing
            await rig.wait(lambda: rig.count("up") == 2)
            assert rig.maps().count("kvoffd-tickets") == 1

    run(scenario)


def test_open_pool_fails_when_the_copier_dies_over_it(run):
    """The caller learns it; the pool is not opened again behind its back."""

    async def scenario():
        async with Rig() as rig:
            os.kill(rig.copier.pid, signal.SIGSTOP)
            opening = asyncio.ensure_future(rig.open(rig.engine()))
            await asyncio.sleep(0)
            rig.copier.kill("test")
            with pytest.raises(CopyFailed, match="killed by signal 9"):
                await opening
            await rig.wait(lambda: rig.count("up") == 2)
            assert "kvoffd-tickets" not in rig.maps()

    run(scenario)


def test_limits_on_batches_are_refusals_of_that_batch(run):
    """Too many in flight, or too long: failed at once, and the copier goes on."""

    async def scenario():
        async with Rig(batches_in_flight_max=2) as rig:
            engine = rig.engine()
            pool = await rig.open(engine)
            job = rig.job(engine)
            parked = [rig.store(pool, job, [0], [0], bell=1) for _ in range(2)]
            assert "too many" in (await rig.end(rig.store(pool, job, [0], [0]))).reason
            engine.tickets.ring()
            for batch in parked:
                assert (await rig.end(batch)).outcome is Outcome.COPIED
            size = BATCH_BLOCKS_MAX + 1
            long = await rig.end(rig.store(pool, job, [0] * size, [0] * size))
            assert (long.outcome, str(BATCH_BLOCKS_MAX) in long.reason) == (Outcome.FAILED, True)

    run(scenario)


def test_the_process_is_set_up_as_it_must_be(run):
    """Deaf to SIGTERM and SIGINT, tuned, named, and holding no descriptor of ours."""

    async def scenario():
        secret = os.memfd_create("not-for-copiers", 0)
        os.set_inheritable(secret, True)  # noqa: FBT003 - the standard library's signature
        async with Rig(environment={"LANG": "C"}) as rig:
            engine = rig.engine()
            pool = await rig.open(engine)
            proc = Path(f"/proc/{rig.copier.pid}")
            for number in (signal.SIGTERM, signal.SIGINT):
                os.kill(rig.copier.pid, number)
            end = await rig.end(rig.store(pool, rig.job(engine), [0], [0]))
            assert end.outcome is Outcome.COPIED
            assert rig.count("died") == 0
            environment = proc.joinpath("environ").read_bytes().split(b"\0")
            threshold = b"GLIBC_TUNABLES=glibc.cpu.x86_non_temporal_threshold=32768"
            assert {threshold, b"OMP_NUM_THREADS=1", b"LANG=C"} <= set(environment)
            assert b"cpu:0" in proc.joinpath("cmdline").read_bytes().split(b"\0")
            assert proc.joinpath("comm").read_text() == "kvoffd-cpu:0\n"
            links = rig.links()
            assert not [link for link in links if "not-for-copiers" in link]
            # The arena's own descriptor is the mapping's.
            assert sum("arena" in link for link in links) == 1
        os.close(secret)

    run(scenario)


@pytest.mark.parametrize(
    "name", ["cuda:0", "cpu", "cpu:", "cpu:-1", "cpu:x", "cpu:0 ", "CPU:0", "", "cpu:\u0663"]
)
def test_devices_that_cannot_be_served_are_refused_with_a_sentence(name):
    """Only cpu:N is; everything else is said before a process is spawned."""
    with pytest.raises(BadRequest, match=r"cannot be served: .*\.$"):
        Copier(name, 0, 4096, CopierOptions(), events=None)


def test_start_fails_with_a_sentence_and_leaves_nothing(run):
    """An arena that cannot be mapped: start() raises, and there is no process."""

    async def scenario():
        fd = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
        os.ftruncate(fd, 4096)
        copier = Copier("cpu:0", fd, 4096, CopierOptions(), events=None)
        with pytest.raises(CopyFailed, match="exited with code 1"):
            await copier.start()
        os.close(fd)
        assert (copier.state, copier.pid) == ("down", 0)

    run(scenario)


def test_a_start_that_is_cancelled_leaves_nothing(run):
    """The process that is just starting is ended, too."""

    async def scenario():
        async with Rig() as rig:
            copier = Copier("cpu:1", rig.arena.fd, 1 << 20, CopierOptions(), events=rig)
            starting = asyncio.ensure_future(copier.start())
            while copier.pid == 0:  # noqa: ASYNC110 - there is no event before the first
                await asyncio.sleep(0)
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
            assert (copier.state, copier.pid) == ("down", 0)

    run(scenario)


def test_quick_failures_slow_the_restarts_down_and_say_so(run):
    """After a few quick deaths the state is down, and the tries go on."""

    async def scenario():
        options = {"restart_pause_s": 0.01, "restart_pause_max_s": 0.05, "quick_failures_max": 2}
        async with Rig(**options) as rig:
            states = []
            for life in range(1, 4):
                rig.copier.kill("test")
                await rig.wait(lambda life=life: rig.count("died") == life)
                await asyncio.sleep(0)
                states.append(rig.copier.state)
                await rig.wait(lambda life=life: rig.count("up") == life + 1)
                await asyncio.sleep(0)
            assert states == ["restarting", "down", "down"]
            assert (rig.copier.state, rig.copier.restarts) == ("up", 3)

    run(scenario)
