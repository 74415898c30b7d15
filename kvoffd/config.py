"""The daemon's settings: their names, defaults, units and bounds, and where values come from.

Owns nothing and keeps nothing: `load` looks at flags, environment and file once,
before the loop starts, and returns values. Only kvoffd.main may import this.
A flag wins over the environment, that over the file, that over the default.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

ENVIRONMENT_PREFIX = "KVOFFD_"
SYSTEM_FILE = Path("/etc/kvoffd/kvoffd.toml")
# The handshake socket has the longest name of the files beside the gRPC socket.
HANDSHAKE_SUFFIX = ".handshake"
# sun_path holds 108 bytes, the last of them zero.
SOCKET_PATH_BYTES_MAX = 107

# The largest id that is no "no such id".
_ID_MAX = 2**32 - 2
_BYTE_UNITS = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
_BYTES = re.compile(r"\s*(\d+)\s*([KMGT]iB|B|)\s*")


_ALLOWED = {
    "socket": f"a path of at most {SOCKET_PATH_BYTES_MAX - len(HANDSHAKE_SUFFIX)} bytes",
    "devices": 'one or more names "cpu:<number>", each once',
    "allowed_uids": f"whole numbers from 0 to {_ID_MAX}",
    "allowed_gids": f"whole numbers from 0 to {_ID_MAX}",
    "check_invariants": "true or false",
}


class ConfigError(Exception):
    """Settings that cannot be used: one line for each, in `problems`."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def parse_bytes(value: object) -> object:
    """A count of bytes from "4GiB"; other types are left for the field to judge."""
    if not isinstance(value, str):
        return value
    found = _BYTES.fullmatch(value)
    if not found:
        raise ValueError("no count of bytes")
    return int(found[1]) * _BYTE_UNITS[found[2]]


def format_bytes(value: int) -> str:
    """The shortest exact form that parse_bytes understands."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if value and value % _BYTE_UNITS[unit] == 0:
            return f"{value // _BYTE_UNITS[unit]}{unit}"
    return str(value)


def _split(value: object) -> object:
    """A list from "a, b"; in a file it is an array."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


ByteCount = Annotated[int, BeforeValidator(parse_bytes)]
Numbers = Annotated[
    tuple[Annotated[int, Field(ge=0, le=_ID_MAX)], ...], NoDecode, BeforeValidator(_split)
]
Devices = Annotated[
    tuple[Annotated[str, Field(pattern=r"^cpu:\d{1,3}$")], ...], NoDecode, BeforeValidator(_split)
]


def _setting(
    default: Any, meaning: str, unit: str, least: float | None = None, most: float | None = None
) -> Any:
    """One setting: all that docs/configuration.md says of it. Bounds are inclusive."""
    return Field(default, description=meaning, ge=least, le=most, json_schema_extra={"unit": unit})


class Settings(BaseSettings):
    """Every setting of the daemon, in the order of the table in docs/configuration.md."""

    model_config = SettingsConfigDict(
        env_prefix=ENVIRONMENT_PREFIX, env_ignore_empty=True, extra="forbid", frozen=True
    )

    socket: str = _setting(..., "gRPC socket; the handshake socket lies beside it", "path")
    socket_gid: int | None = _setting(
        None, "group that may use the sockets; without it the user alone", "group id", 0, _ID_MAX
    )
    allowed_uids: Numbers = _setting(
        (), "users served beside the daemon's own and root", "user ids"
    )
    allowed_gids: Numbers = _setting((), "primary groups whose users are served", "group ids")
    devices: Devices = _setting(("cpu:0",), "devices with a copier process each", "names")

    arena_bytes: ByteCount = _setting(
        1 << 30, "host memory for blocks; whole extents", "bytes", 1 << 20, 1 << 46
    )
    extent_bytes: ByteCount = _setting(
        64 << 20, "part of the arena that holds slots of one size", "bytes", 1 << 20, 1 << 34
    )
    slot_align_bytes: ByteCount = _setting(
        4096, "slots are multiples of it; a power of two", "bytes", 64, 1 << 21
    )

    sessions_max: int = _setting(256, "open sessions of all roles", "sessions", 1, 1 << 16)
    instances_max: int = _setting(64, "instances with an open session", "instances", 1, 1 << 12)
    namespaces_max: int = _setting(4095, "namespaces in this daemon's life", "namespaces", 1, 4095)
    ranks_max: int = _setting(256, "ranks of one instance", "ranks", 1, 1 << 12)
    memories_max: int = _setting(128, "memories that one session offers", "memories", 1, 1 << 10)
    memory_bytes_max: ByteCount = _setting(
        1 << 44, "size of one offered memory", "bytes", 1 << 12, 1 << 48
    )
    regions_max: int = _setting(1024, "regions of one rank's pool", "regions", 1, 1 << 14)
    pool_blocks_max: int = _setting(1 << 28, "blocks of one rank's pool", "blocks", 1, 1 << 31)
    ticket_cells_max: int = _setting(1 << 16, "cells of one ticket page", "cells", 1, 1 << 20)
    store_blocks_max: int = _setting(4096, "blocks of one store job", "blocks", 1, 4096)
    load_blocks_max: int = _setting(1 << 14, "blocks of one load job", "blocks", 1, 1 << 16)
    lookup_blocks_max: int = _setting(1 << 14, "blocks of one lookup", "blocks", 1, 1 << 16)
    jobs_in_flight_max: int = _setting(
        1024, "jobs of one session without an outcome", "jobs", 1, 1 << 16
    )
    open_jobs_max: int = _setting(
        1 << 16, "store jobs of all instances that are not settled", "jobs", 1, 1 << 22
    )
    leases_max: int = _setting(1 << 16, "leases of all instances", "leases", 1, 1 << 22)
    message_bytes_max: ByteCount = _setting(
        4 << 20, "largest gRPC message received", "bytes", 1 << 16, 1 << 28
    )
    backlog: int = _setting(
        128, "connections of the handshake socket not yet accepted", "connections", 1, 4096
    )

    hello_timeout_s: float = _setting(
        5.0, "a connection without a Hello by then is closed", "seconds", 0.1, 60
    )
    heartbeat_s: float = _setting(1.0, "interval of a client's heartbeats", "seconds", 0.05, 60)
    lease_ttl_s: float = _setting(10.0, "life of a lease that nobody renews", "seconds", 0.5, 600)
    store_deadline_s: float = _setting(
        30.0, "a block not sealed by then is aborted", "seconds", 1, 3600
    )
    load_deadline_max_s: float = _setting(
        60.0, "longest deadline that a load may ask for", "seconds", 0.1, 3600
    )
    overdue_kill_s: float = _setting(
        2.0, "a copier that holds a load so long past its deadline is killed", "seconds", 0.1, 600
    )
    janitor_interval_s: float = _setting(
        0.05, "interval between looks at deadlines and leases", "seconds", 0.01, 1
    )
    copier_start_timeout_s: float = _setting(
        30.0, "a copier that is not up by then is started anew", "seconds", 1, 600
    )
    copier_ping_timeout_s: float = _setting(
        10.0, "an idle copier that stays silent so long is replaced", "seconds", 0.5, 600
    )
    drain_timeout_s: float = _setting(
        10.0, "how long a drain waits for running jobs", "seconds", 0, 600
    )

    check_invariants: bool = _setting(
        default=False, meaning="the core checks itself when idle; for tests", unit="yes or no"
    )
    log_level: Literal["debug", "info", "warning", "error"] = _setting(
        "info", "least severity that is logged", "level"
    )
    log_format: Literal["auto", "console", "json"] = _setting(
        "auto", "auto is console on a terminal, else json", "format"
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003 - the signature is pydantic's
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - as above
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - as above
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - as above
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what `load` has gathered: it must know where each value came from."""
        return (init_settings,)


@dataclass(frozen=True, slots=True)
class Loaded:
    """The settings, and where each value came from, in words."""

    settings: Settings
    sources: Mapping[str, str]


def load(flags: Mapping[str, object], file: Path | None = None) -> Loaded:
    """Settings from flags, environment, file and defaults; changes nothing.

    Raises:
        ConfigError: with a line for every value that cannot be used.
    """
    file = file or _default_file()
    values: dict[str, object] = {"socket": default_socket()}
    sources = dict.fromkeys(Settings.model_fields, "default")
    problems: list[str] = []
    layers: list[tuple[Mapping[str, object], Callable[[str], str]]] = [
        (_read_file(file, problems) if file else {}, lambda _: str(file)),
        (EnvSettingsSource(Settings)(), lambda name: ENVIRONMENT_PREFIX + name.upper()),
        (flags, flag_name),
    ]
    for layer, describe in layers:
        for name, value in layer.items():
            values[name] = value
            sources[name] = describe(name)
    wrong = [
        name
        for name, value in values.items()
        if isinstance(value, bool) and name != "check_invariants"  # true would become 1
    ]
    try:
        settings = Settings.model_validate(values)
    except ValidationError as error:
        wrong += [str(detail["loc"][0]) for detail in error.errors()]
    problems += [_problem(name, values, sources) for name in dict.fromkeys(wrong)]
    if not wrong:
        problems += [
            _problem(name, values, sources, allowed) for name, allowed in _contradictions(settings)
        ]
    if problems:
        raise ConfigError(problems)
    return Loaded(settings, sources)


def default_socket() -> str:
    """Where the daemon listens when nobody says otherwise: a folder of this user alone."""
    runtime_folder = os.environ.get("XDG_RUNTIME_DIR")
    if runtime_folder:
        return str(Path(runtime_folder) / "kvoffd" / "kvoffd.sock")
    if os.geteuid() == 0:
        return "/run/kvoffd/kvoffd.sock"
    # kvoffd.main refuses the folder if it is somebody else's.
    return f"/tmp/kvoffd-{os.geteuid()}/kvoffd.sock"  # noqa: S108 - see above


def flag_name(name: str) -> str:
    """The command line's name of a setting."""
    return "--" + name.replace("_", "-")


def unknown_environment() -> list[str]:
    """Variables that look like settings and are none, such as a misspelt one."""
    known = {ENVIRONMENT_PREFIX + name.upper() for name in [*Settings.model_fields, "config"]}
    return sorted(
        name for name in os.environ if name.startswith(ENVIRONMENT_PREFIX) and name not in known
    )


def allowed_values(name: str) -> str:
    """What a setting accepts, in words."""
    if name in _ALLOWED:
        return _ALLOWED[name]
    field = Settings.model_fields[name]
    if name.startswith("log_"):
        return "one of " + ", ".join(get_args(field.annotation))
    least, most = (
        next(getattr(bound, kind) for bound in field.metadata if hasattr(bound, kind))
        for kind in ("ge", "le")
    )
    if name.endswith(("_bytes", "_bytes_max")):
        return f"{format_bytes(least)} to {format_bytes(most)}, plain or with KiB, MiB, GiB, TiB"
    return f"{'' if field.annotation is float else 'whole '}numbers from {least} to {most}"


def show(loaded: Loaded) -> str:
    """The settings as a file that `load` reads back, each line with its source."""
    lines = []
    for name in Settings.model_fields:
        value = getattr(loaded.settings, name)
        if value is None:
            line = f"# {name} is not set"
        elif name.endswith(("_bytes", "_bytes_max")):
            line = f'{name} = "{format_bytes(value)}"'
        else:
            # What JSON writes for text, numbers, booleans and arrays of them is TOML, too.
            line = f"{name} = {json.dumps(value, ensure_ascii=False)}"
        lines.append(f"{line}  # {loaded.sources[name]}")
    return "\n".join(lines) + "\n"


def _default_file() -> Path | None:
    """The user's file if there is one, else the system's if there is one."""
    home = os.environ.get("XDG_CONFIG_HOME")
    candidates = [Path(home) / "kvoffd" / "kvoffd.toml"] if home else []
    return next((path for path in [*candidates, SYSTEM_FILE] if path.is_file()), None)


def _read_file(path: Path, problems: list[str]) -> dict[str, object]:
    """The values of a file; keys that are no settings become problems."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([f"{path}: cannot be read: {error.strerror}"]) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path}: is not TOML: {error}"]) from error
    problems += [
        f"{path}: {name} is no setting" for name in values if name not in Settings.model_fields
    ]
    return {name: value for name, value in values.items() if name in Settings.model_fields}


def _problem(
    name: str, values: Mapping[str, object], sources: Mapping[str, str], allowed: str | None = None
) -> str:
    value = values.get(name, Settings.model_fields[name].default)
    allowed = allowed or allowed_values(name)
    return f"{name}: {value!r} (from {sources[name]}) cannot be used; allowed: {allowed}"


def _contradictions(settings: Settings) -> Iterator[tuple[str, str]]:
    """Setting and what it must be, for values that are possible alone but not together."""
    align = settings.slot_align_bytes
    handshake_path = str(Path(settings.socket).absolute()) + HANDSHAKE_SUFFIX
    if len(os.fsencode(handshake_path)) > SOCKET_PATH_BYTES_MAX:
        yield "socket", allowed_values("socket")
    if len(set(settings.devices)) != len(settings.devices) or not settings.devices:
        yield "devices", allowed_values("devices")
    if align & (align - 1):
        yield "slot_align_bytes", "a power of two"
    elif settings.extent_bytes % align:
        yield "extent_bytes", f"a multiple of slot_align_bytes ({format_bytes(align)})"
    if settings.arena_bytes % settings.extent_bytes:
        yield "arena_bytes", f"a multiple of extent_bytes ({format_bytes(settings.extent_bytes)})"
    if settings.heartbeat_s >= settings.lease_ttl_s:
        yield "heartbeat_s", f"less than lease_ttl_s ({settings.lease_ttl_s:g})"
