"""Writes the generated part of docs/configuration.md: `make docs`; tests/test_docs.py compares.

What a table says comes from the settings themselves, so it cannot drift from them.
"""

from __future__ import annotations

import sys
from pathlib import Path

from kvoffd import config

PATH = Path(__file__).resolve().parent / "configuration.md"
BEGIN = "<!-- made by make docs: begin -->\n"
END = "<!-- made by make docs: end -->\n"
# Defaults that depend on who runs the daemon.
_DEFAULTS = {"socket": "`$XDG_RUNTIME_DIR/kvoffd/kvoffd.sock`, for root `/run/kvoffd/kvoffd.sock`"}


def daemon_table() -> str:
    """One row a setting, in the order in which `kvoffd serve --help` lists them."""
    rows = ["| setting | default | allowed | unit | meaning |", "| --- | --- | --- | --- | --- |"]
    for name, field in config.Settings.model_fields.items():
        extra = field.json_schema_extra
        assert isinstance(extra, dict), f"{name} has no unit"
        allowed = config.allowed_values(name).partition(", plain or with")[0]
        cells = [f"`{name}`", _default(name), allowed, extra["unit"], field.description]
        rows.append(
            "| "
            + " | ".join(str(cell).replace("|", "\\|").replace("<", "&lt;") for cell in cells)
            + " |"
        )
    return "\n".join(rows) + "\n"


def _default(name: str) -> str:
    if name in _DEFAULTS:
        return _DEFAULTS[name]
    value = config.Settings.model_fields[name].default
    if value is None:
        return "not set"
    if isinstance(value, tuple):
        return ", ".join(f"`{one}`" for one in value) or "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if "bytes" in name:
        return f"`{config.format_bytes(value)}`"
    return f"`{value}`"


def with_fresh_table(text: str) -> str:
    """The text with its generated part made anew."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + daemon_table() + END + after


def main() -> int:
    """Write the text."""
    PATH.write_text(with_fresh_table(PATH.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
