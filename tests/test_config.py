"""Settings: where they come from, who wins, and what is said about a bad one."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kvoffd import config

ROOT = Path(__file__).resolve().parents[1]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """One run of the command, with no settings but those given."""
    bare = {name: value for name, value in os.environ.items() if not name.startswith("KVOFFD_")}
    return subprocess.run(
        [sys.executable, "-m", "kvoffd.main", *arguments],
        env=bare | {"XDG_CONFIG_HOME": "/nonexistent"} | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.fixture(autouse=True)
def _bare_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("KVOFFD_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nonexistent")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "kvoffd.toml"
    path.write_text('arena_bytes = "2GiB"\nlease_ttl_s = 20\n')
    return path


def test_flags_win_over_the_environment_and_that_over_the_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert config.load({}, file).settings.arena_bytes == 2 << 30
    monkeypatch.setenv("KVOFFD_ARENA_BYTES", "3GiB")
    assert config.load({}, file).settings.arena_bytes == 3 << 30
    settings = config.load({"arena_bytes": "4GiB"}, file).settings
    assert (settings.arena_bytes, settings.lease_ttl_s) == (4 << 30, 20)


@pytest.mark.parametrize(
    ("arguments", "environment", "sentence"),
    [
        (["--arena-bytes", "banana"], {}, "arena_bytes: 'banana' (from --arena-bytes)"),
        (["--arena-bytes", "-1"], {}, "arena_bytes: '-1' (from --arena-bytes)"),
        (["--arena-bytes", ""], {}, "arena_bytes: '' (from --arena-bytes)"),
        (["--devices", "tpu:0"], {}, "devices"),
        (["--socket", "/" + "x" * 120], {}, "at most 97 bytes"),
        ([], {"KVOFFD_LEASE_TTL_S": "nan"}, "lease_ttl_s: 'nan' (from KVOFFD_LEASE_TTL_S)"),
        ([], {"KVOFFD_LOG_LEVEL": "loud"}, "log_level: 'loud' (from KVOFFD_LOG_LEVEL)"),
        ([], {"KVOFFD_SESSIONS_MAX": "0"}, "sessions_max: '0' (from KVOFFD_SESSIONS_MAX)"),
        (["--heartbeat-s", "30"], {"KVOFFD_LEASE_TTL_S": "5"}, "less than lease_ttl_s"),
    ],
)
@pytest.mark.parametrize("command", [["serve"], ["config", "show"]])
def test_a_bad_value_is_named_with_its_source_and_what_is_allowed(
    command: list[str], arguments: list[str], environment: dict[str, str], sentence: str
) -> None:
    done = run(*command, *arguments, **environment)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert "allowed" in done.stderr
    assert "Traceback" not in done.stderr


def test_all_bad_values_are_told_at_once() -> None:
    done = run("serve", "--arena-bytes", "banana", "--lease-ttl-s", "0")
    assert len(done.stderr.splitlines()) == 2, done.stderr


def test_an_unknown_name_in_the_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "kvoffd.toml"
    path.write_text("arena_byts = 3\n")
    done = run("serve", "--config", str(path))
    assert (done.returncode, "arena_byts" in done.stderr) == (2, True)


@pytest.mark.parametrize("text", ["arena_bytes = ", "\x00", '[socket]\na = "b"\n'])
def test_a_file_that_makes_no_sense_is_refused_with_its_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "kvoffd.toml"
    path.write_text(text)
    done = run("serve", "--config", str(path))
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert str(path) in done.stderr or "socket" in done.stderr


def test_what_is_shown_can_be_fed_back(file: Path, tmp_path: Path) -> None:
    shown = run("config", "show", "--config", str(file))
    assert shown.returncode == 0, shown.stderr
    again = tmp_path / "again.toml"
    again.write_text(shown.stdout)
    assert config.load({}, again).settings == config.load({}, file).settings


def test_the_source_of_each_value_is_shown(file: Path) -> None:
    shown = run("config", "show", "--config", str(file), KVOFFD_LOG_LEVEL="debug").stdout
    lines = {line.split(" = ")[0]: line.split("  # ")[-1] for line in shown.splitlines()}
    assert lines["lease_ttl_s"] == str(file)
    assert lines["log_level"] == "KVOFFD_LOG_LEVEL"
    assert lines["heartbeat_s"] == "default"


def test_sizes_are_read_with_their_units() -> None:
    for text, expected in (("1MiB", 1 << 20), ("64TiB", 64 << 40), (str(3 << 30), 3 << 30)):
        assert config.parse_bytes(text) == expected
        assert config.parse_bytes(config.format_bytes(expected)) == expected


def test_the_shipped_example_holds_the_defaults() -> None:
    example = ROOT / "deploy" / "kvoffd.toml"
    assert config.load({}, example).settings == config.load({}).settings
    text = example.read_text()
    known = set(config.Settings.model_fields)
    assert set(tomllib.loads(text)) <= known
    offered = {
        line.removeprefix("# ").split(" = ")[0] for line in text.splitlines() if " = " in line
    }
    assert offered <= known


def test_every_setting_has_a_flag_a_variable_and_bounds_in_words() -> None:
    shown = run("serve", "--help").stdout
    for name in config.Settings.model_fields:
        assert config.flag_name(name) in shown
        assert config.allowed_values(name)
