"""kvoffctl: its answers for people and programs, its sentences and its exit statuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvoffd.ctl.main import main
from kvoffd.ctl.plain import plain
from kvoffd_proto.v1 import admin_pb2, handshake_pb2
from tests.ctl.fake_daemon import Answers, fake_daemon

SERVING = {"": True, "kvoffd.v1.Offload": True, "kvoffd.v1.Admin": True}


def kvoffctl(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command as an operator runs it."""
    return subprocess.run(
        [sys.executable, "-m", "kvoffd.ctl.main", "--socket", str(path), *arguments],
        capture_output=True,
        check=False,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
    )


def some_status() -> admin_pb2.StatusResponse:
    status = admin_pb2.StatusResponse(
        daemon_version="0.1.0", boot_id=bytes(range(16)), uptime_s=3723.5, socket="/run/k.sock"
    )
    status.arena.size_bytes = 1 << 30
    status.arena.bytes_used = 1 << 29
    status.cache.lookup_blocks = 12
    status.cache.lookup_hit_blocks = 7
    status.ledger.submitted = 10
    status.ledger.stored = 6
    status.ledger.rejected.add(reason="no_slot", blocks=3)
    status.ledger.failed.add(reason="[red]odd", blocks=1)
    status.copiers.add(device="cpu:0", incarnation=1, pid=4242, state="up", store_bytes=3 << 20)
    return status


def some_instances() -> admin_pb2.InstancesResponse:
    answer = admin_pb2.InstancesResponse()
    answer.instances.add(
        id="engine-a",
        nonce="n1",
        namespace_digest=b"\xab" * 32,
        ranks_total=2,
        ranks_registered=[0, 1],
        scheduler_registered=True,
        pids=[7, 8],
        age_s=61,
    )
    return answer


def some_namespaces() -> admin_pb2.NamespacesResponse:
    answer = admin_pb2.NamespacesResponse()
    space = answer.namespaces.add(digest=b"\xcd" * 32, generation=3, ranks_total=2, blocks_ready=9)
    space.fields.add(name="model", value="tiny")
    return answer


def test_status_as_json_has_every_field_under_its_name(tmp_path: Path) -> None:
    with fake_daemon(tmp_path / "k.sock", Answers(status=some_status())):
        ended = kvoffctl(tmp_path / "k.sock", "status", "-o", "json")
    assert (ended.returncode, ended.stderr) == (0, "")
    answer = json.loads(ended.stdout)
    assert set(answer) == {field.name for field in admin_pb2.StatusResponse.DESCRIPTOR.fields}
    assert answer["boot_id"] == bytes(range(16)).hex()
    assert answer["draining"] is False
    assert answer["arena"]["size_bytes"] == 1 << 30
    assert answer["ledger"]["rejected"] == {"no_slot": 3}
    assert answer["copiers"][0]["pid"] == 4242


def test_instances_and_namespaces_as_json(tmp_path: Path) -> None:
    answers = Answers(instances=some_instances(), namespaces=some_namespaces())
    with fake_daemon(tmp_path / "k.sock", answers):
        instances = kvoffctl(tmp_path / "k.sock", "instances", "-o", "json")
        namespaces = kvoffctl(tmp_path / "k.sock", "namespaces", "--output", "json")
    assert json.loads(instances.stdout) == plain(some_instances())
    assert json.loads(instances.stdout)["instances"][0]["ranks_registered"] == [0, 1]
    assert json.loads(namespaces.stdout)["namespaces"][0]["fields"] == {"model": "tiny"}
    assert answers.roles == [handshake_pb2.SESSION_ROLE_ADMIN] * 2


def test_tables_show_what_a_person_needs_and_read_no_markup(tmp_path: Path) -> None:
    answers = Answers(some_status(), some_instances(), some_namespaces())
    with fake_daemon(tmp_path / "k.sock", answers):
        status = kvoffctl(tmp_path / "k.sock", "status")
        instances = kvoffctl(tmp_path / "k.sock", "instances")
        namespaces = kvoffctl(tmp_path / "k.sock", "namespaces")
    assert [ended.returncode for ended in (status, instances, namespaces)] == [0, 0, 0]
    for words in (
        "512.0 MiB (50%)", "7 of 12 looked up", "1 h 2 min", "failed: [red]odd", "cpu:0", "3.0 MiB"
    ):  # fmt: skip
        assert words in status.stdout
    assert "engine-a" in instances.stdout
    assert "2 of 2" in instances.stdout
    assert "model = tiny" in namespaces.stdout


def test_an_empty_table_says_none(tmp_path: Path) -> None:
    with fake_daemon(tmp_path / "k.sock", Answers()):
        ended = kvoffctl(tmp_path / "k.sock", "instances")
    assert (ended.returncode, ended.stdout.split()[-1]) == (0, "none")


def test_health_of_a_serving_daemon_is_0(tmp_path: Path) -> None:
    with fake_daemon(tmp_path / "k.sock", Answers(serving=SERVING)):
        ended = kvoffctl(tmp_path / "k.sock", "health", "-o", "json")
    assert ended.returncode == 0
    services = {"daemon": "serving", "offload": "serving", "admin": "serving"}
    assert json.loads(ended.stdout) == {"healthy": True, "services": services}


def test_health_is_1_when_a_service_does_not_serve_or_is_not_known(tmp_path: Path) -> None:
    serving = {"": True, "kvoffd.v1.Offload": False}
    with fake_daemon(tmp_path / "k.sock", Answers(serving=serving)):
        as_json = kvoffctl(tmp_path / "k.sock", "health", "-o", "json")
        as_table = kvoffctl(tmp_path / "k.sock", "health")
    assert (as_json.returncode, as_table.returncode) == (1, 1)
    services = {"daemon": "serving", "offload": "not serving", "admin": "unknown"}
    assert json.loads(as_json.stdout) == {"healthy": False, "services": services}
    assert "not serving" in as_table.stdout


def test_health_needs_no_session(tmp_path: Path) -> None:
    """It must answer when the daemon has as many sessions as it takes."""
    full = handshake_pb2.Closing(code=handshake_pb2.CLOSE_CODE_LIMIT, reason="full")
    with fake_daemon(tmp_path / "k.sock", Answers(closing=full, serving=SERVING)):
        assert kvoffctl(tmp_path / "k.sock", "health").returncode == 0


@pytest.mark.parametrize("command", ["status", "instances", "namespaces", "health"])
def test_no_daemon_is_3_and_one_sentence(tmp_path: Path, command: str) -> None:
    ended = kvoffctl(tmp_path / "absent.sock", command)
    assert (ended.returncode, ended.stdout) == (3, "")
    assert len(ended.stderr.splitlines()) == 1
    assert str(tmp_path / "absent.sock") in ended.stderr


def test_a_refusal_is_3_and_the_daemons_own_sentence(tmp_path: Path) -> None:
    code = handshake_pb2.CLOSE_CODE_FORBIDDEN
    closing = handshake_pb2.Closing(code=code, reason="user 7 may not come in")
    with fake_daemon(tmp_path / "k.sock", Answers(closing=closing)):
        ended = kvoffctl(tmp_path / "k.sock", "status")
    assert ended.returncode == 3
    assert ended.stderr == "kvoffctl: user 7 may not come in (FORBIDDEN)\n"


@pytest.mark.parametrize(
    "arguments", [["no-such-command"], ["status", "-o", "xml"], ["--timeout", "0", "status"]]
)
def test_wrong_usage_is_2(tmp_path: Path, arguments: list[str]) -> None:
    assert kvoffctl(tmp_path / "k.sock", *arguments).returncode == 2


def test_a_socket_path_that_cannot_be_an_address_is_2(tmp_path: Path) -> None:
    ended = kvoffctl(tmp_path / ("a" * 120), "status")
    assert ended.returncode == 2
    assert "107" in ended.stderr


def test_every_command_explains_itself() -> None:
    assert [name for name, command in main.commands.items() if not command.help] == []
