"""Admin answers as tables for people.

Pure: from plain values (kvoffd.ctl.plain) to renderables. What a person needs
first comes first; a program reads the JSON instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from rich.console import RenderableType

_BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_UNIT_STEP = 1024
_DIGEST_SHOWN = 12


def status(answer: Mapping[str, Any]) -> RenderableType:
    """The daemon, its arena, its cache, the ledger and the copiers."""
    arena, cache, ledger = answer["arena"], answer["cache"], answer["ledger"]
    daemon = _facts(
        "Daemon",
        [
            ("version", answer["daemon_version"]),
            ("state", "draining" if answer["draining"] else "serving"),
            ("up", _duration(answer["uptime_s"])),
            ("socket", answer["socket"]),
            ("boot id", answer["boot_id"]),
            ("sessions", answer["sessions"]),
            ("instances", answer["instances"]),
            ("namespaces", answer["namespaces"]),
        ],
    )
    memory = _facts(
        "Arena",
        [
            ("size", f"{_size(arena['size_bytes'])} ({arena['backing']})"),
            ("in slots", _part(arena["bytes_used"], arena["size_bytes"])),
            ("extents", f"{arena['extents_used']} of {arena['extents_total']}"),
            ("slots", arena["slots_used"]),
        ],
    )
    looked = cache["lookup_blocks"]
    blocks = _facts(
        "Blocks",
        [
            ("ready", cache["blocks_ready"]),
            ("pending", cache["blocks_pending"]),
            ("leases", cache["leases"]),
            ("holds", cache["holds"]),
            ("loads in flight", cache["loads_in_flight"]),
            ("lookups", cache["lookups"]),
            ("hit", f"{cache['lookup_hit_blocks']} of {looked} looked up"),
            ("loaded", cache["loaded_blocks"]),
            ("loads failed", cache["failed_load_blocks"]),
            ("evicted", cache["evicted_blocks"]),
            ("slots quarantined", cache["slots_quarantined"]),
        ],
    )
    stores = _facts("Stores, in blocks", list(_ledger(ledger)))
    copiers = _grid(
        "Copiers",
        ["device", "state", "pid", "incarnation", "restarts", "in flight", "stored", "loaded"],
        [
            [
                copier["device"],
                copier["state"],
                copier["pid"],
                copier["incarnation"],
                copier["restarts"],
                copier["batches_in_flight"],
                _size(copier["store_bytes"]),
                _size(copier["load_bytes"]),
            ]
            for copier in answer["copiers"]
        ],
    )
    return Group(daemon, memory, blocks, stores, copiers)


def instances(answer: Mapping[str, Any]) -> RenderableType:
    """One line an engine."""
    return _grid(
        "Instances",
        [
            "instance",
            "nonce",
            "namespace",
            "ranks",
            "scheduler",
            "age",
            "leases",
            "jobs",
            "stored",
            "failed",
        ],
        [
            [
                one["id"],
                one["nonce"],
                one["namespace_digest"][:_DIGEST_SHOWN],
                f"{len(one['ranks_registered'])} of {one['ranks_total']}",
                "yes" if one["scheduler_registered"] else "no",
                _duration(one["age_s"]),
                one["leases"],
                one["jobs_in_flight"],
                one["ledger"]["stored"],
                sum(one["ledger"]["failed"].values()),
            ]
            for one in answer["instances"]
        ],
    )


def namespaces(answer: Mapping[str, Any]) -> RenderableType:
    """One line a namespace, its fields below it."""
    return _grid(
        "Namespaces",
        ["namespace", "generation", "ranks", "ready blocks", "size", "fields"],
        [
            [
                one["digest"][:_DIGEST_SHOWN],
                one["generation"],
                one["ranks_total"],
                one["blocks_ready"],
                _size(one["bytes_used"]),
                "\n".join(f"{name} = {value}" for name, value in one["fields"].items()),
            ]
            for one in answer["namespaces"]
        ],
    )


def health(answer: Mapping[str, Any]) -> RenderableType:
    """Each service and whether it serves."""
    return _grid(
        "Health",
        ["service", "state"],
        [[name, state] for name, state in answer["services"].items()],
    )


def _ledger(ledger: Mapping[str, Any]) -> Iterable[tuple[str, object]]:
    yield from ((name, ledger[name]) for name in ("submitted", "stored", "present"))
    yield from ((f"rejected: {reason}", count) for reason, count in ledger["rejected"].items())
    yield from ((f"failed: {reason}", count) for reason, count in ledger["failed"].items())
    yield "in flight", ledger["in_flight"]


def _facts(title: str, facts: Sequence[tuple[str, object]]) -> Table:
    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 1))
    table.add_column(style="dim", min_width=18)
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(_text(name), _text(value))
    return table


def _grid(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> Table:
    caption = None if rows else "none"
    table = Table(
        title=title, title_justify="left", caption=caption, caption_justify="left", box=None
    )
    for column in columns:
        table.add_column(column, overflow="fold", header_style="dim")
    for row in rows:
        table.add_row(*map(_text, row))
    return table


def _text(value: object) -> Text:
    """Plain text: names come from clients and must not be read as markup."""
    return Text(str(value))


def _part(used: int, total: int) -> str:
    return f"{_size(used)} ({used / total:.0%})" if total else _size(used)


def _size(count: float) -> str:
    for unit in _BYTE_UNITS:
        if count < _UNIT_STEP or unit == _BYTE_UNITS[-1]:
            break
        count /= _UNIT_STEP
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


def _duration(seconds: float) -> str:
    minutes, rest_s = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (rest_s, "s")]
    shown = [f"{count} {unit}" for count, unit in parts if count][:2]
    return " ".join(shown) or "0 s"
