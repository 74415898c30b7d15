"""What is written down is checked: tables, commands, settings, names of calls, one text a decision.

Paths and titles are test_tidy.py's. A sentence that cannot be checked is at least short.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest

from kvoffd import config
from kvoffd.ctl.main import main as kvoffctl
from kvoffd.main import main as kvoffd

ROOT = Path(__file__).resolve().parents[1]
TEXTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "tests" / "README.md"])
ARCHITECTURE_LINES_MAX = 120


def load_file(path: Path, name: str) -> Any:
    """A module by its file: the connector's settings need no vLLM, but their package does."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def indented_or_inline(text: str) -> list[str]:
    """Pieces that are typed: indented lines, fenced lines, and what stands in backticks."""
    typed = [line.strip() for line in text.splitlines() if line.startswith("    ")]
    for fenced in re.findall(r"^```[a-z]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        typed += fenced.splitlines()
    return typed + re.findall(r"`([^`\n]+)`", text)


def commands_of(text: str, program: str) -> list[list[str]]:
    """What the text has somebody type for a program, without comments and placeholders."""
    found = []
    for piece in indented_or_inline(text):
        words = piece.partition("#")[0].strip()
        if words == program or words.startswith(f"{program} "):
            found.append([word for word in shlex.split(words)[1:] if "…" not in word])
    return found


def complaints(program: click.Command, words: list[str]) -> str | None:
    """Why click would not take these words; None when it would. Nothing is run."""
    command: click.Command = program
    context = click.Context(program)
    rest = list(words)
    try:
        while isinstance(command, click.Group) and rest and not rest[0].startswith("-"):
            found = command.get_command(context, rest[0])
            if found is None:
                return f"no command {rest[0]!r}"
            command, rest = found, rest[1:]
        if isinstance(command, click.Group):
            return None
        command.make_parser(context).parse_args([word for word in rest if word != "PATH"] or [])
    except click.UsageError as error:
        # A bare `--socket PATH` has lost its value above.
        return None if "requires an argument" in error.message else error.message
    return None


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_that_is_written_down_exists(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    wrong = [
        f"{name} {' '.join(words)}: {why}"
        for name, program in (("kvoffd", kvoffd), ("kvoffctl", kvoffctl))
        for words in commands_of(text, name)
        if (why := complaints(program, words))
    ]
    assert wrong == []


def make_targets() -> set[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))


def test_every_make_target_that_is_written_down_exists() -> None:
    named = {
        target
        for text in TEXTS
        for words in commands_of(text.read_text(encoding="utf-8"), "make")
        for target in words
        if re.fullmatch(r"[a-z][a-z-]*", target)
    }
    assert named - make_targets() == set()
    assert {"demo", "test", "ci"} <= named, "the check has found nothing to check"


def test_every_setting_named_in_the_environments_way_exists() -> None:
    known = {f"KVOFFD_{name.upper()}" for name in config.Settings.model_fields}
    named = {
        name
        for text in TEXTS
        for name in re.findall(r"KVOFFD_[A-Z][A-Z_]*", text.read_text(encoding="utf-8"))
    }
    assert named - known == set()
    assert "KVOFFD_SOCKET" in named


def test_the_table_of_the_daemons_settings_is_fresh() -> None:
    tables = load_file(ROOT / "docs" / "tables.py", "docs_tables")
    text = tables.PATH.read_text(encoding="utf-8")
    assert text == tables.with_fresh_table(text), "run make docs"
    assert set(re.findall(r"^\| `(\w+)` \|", tables.daemon_table(), re.MULTILINE)) == set(
        config.Settings.model_fields
    )


def test_the_table_of_the_connectors_settings_is_true() -> None:
    """Names, defaults and bounds."""
    settings = load_file(ROOT / "client/kvoffd_client/vllm/settings.py", "connector_settings")
    text = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    _, _, part = text.partition("## The connector in vLLM")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in part.splitlines()
        if line.startswith("| `")
    ]
    defaults = {field.name: field.default for field in fields(settings.Settings)}
    words = {None: "not set", "": "empty"}
    expected = {
        f"`{name}`": words.get(value, f"`{str(value).lower()}`")
        if not isinstance(value, int | float) or isinstance(value, bool)
        else f"`{value}`"
        for name, value in defaults.items()
    }
    assert {row[0]: row[1] for row in rows} == expected
    bounds = {f"`{name}`": f"{low} to {high}" for name, (low, high) in settings._BOUNDS.items()}
    assert {row[0]: row[2] for row in rows if row[0] in bounds} == bounds


def test_the_template_names_every_default_truly() -> None:
    """Also what it has commented out is a setting, and what it sets is the default."""
    text = (ROOT / "deploy" / "kvoffd.toml").read_text(encoding="utf-8")
    loaded = config.load(tomllib.loads(text)).settings
    plain = config.load({}).settings
    assert loaded == plain
    for name in re.findall(r"^# (\w+) = ", text, re.MULTILINE):
        assert name in config.Settings.model_fields


def test_the_protocol_describes_every_call() -> None:
    text = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
    calls = {
        call
        for proto in (ROOT / "proto" / "kvoffd_proto" / "v1").glob("*.proto")
        for call in re.findall(r"^\s*rpc (\w+)\(", proto.read_text(), re.MULTILINE)
    }
    assert calls
    assert {call for call in calls if not re.search(rf"\b{call}\b", text)} == set()


def test_decisions_are_numbered_without_a_gap_and_say_why() -> None:
    decisions = sorted((ROOT / "docs" / "decisions").glob("*.md"))
    assert [path.name[:4] for path in decisions] == [
        f"{number:04}" for number in range(1, len(decisions) + 1)
    ]
    for number, path in enumerate(decisions, 1):
        text = path.read_text(encoding="utf-8")
        assert text.startswith(f"# {number}. "), path.name
        assert re.findall(r"^(?:\*\*|## )(Context|Decision|Consequence)", text, re.MULTILINE) == [
            "Context",
            "Decision",
            "Consequence",
        ], path.name


def test_the_architecture_is_short_and_names_every_part_of_the_daemon() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= ARCHITECTURE_LINES_MAX
    parts = {
        path.name for path in (ROOT / "kvoffd").iterdir() if path.is_dir() and path.name[0] != "_"
    }
    assert {part for part in parts if not re.search(rf"\b{part}\b", text)} == set()


def test_the_checks_of_commands_can_fail() -> None:
    text = "Type `kvoffd serve --arena-size 1`, or\n\n    kvoffctl statsu   # a look\n"
    (words,) = commands_of(text, "kvoffd")
    assert "arena-size" in str(complaints(kvoffd, words))
    (words,) = commands_of(text, "kvoffctl")
    assert complaints(kvoffctl, words) == "no command 'statsu'"
    assert complaints(kvoffd, ["serve", "--arena-bytes", "64GiB"]) is None


def test_help_is_what_make_offers() -> None:
    """Each target of the gate says in a line what it is for."""
    shown = subprocess.run(
        ["/usr/bin/env", "make", "--no-print-directory", "help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert {"setup", "test", "ci", "demo", "bench", "docs"} <= {
        line.split()[0] for line in shown.splitlines() if line.strip()
    }
