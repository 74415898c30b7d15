"""The `kvoffd` command: serve, config show, version.

Owns the process: reads the settings, sets up logging, signals and the loop, and
turns failures into a sentence and an exit status. The only reader of kvoffd.config.
"""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import structlog
import uvloop

import kvoffd
from kvoffd import config, lifecycle
from kvoffd.errors import KvoffdError
from kvoffd.rpc.options import RpcOptions
from kvoffd.service.options import ServiceOptions
from kvoffd.telemetry import logs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

log = structlog.get_logger(__name__)

EXIT_FAILED = 1
EXIT_USAGE = 2


def _with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command a flag for each setting, and --config."""
    for name, field in reversed(config.Settings.model_fields.items()):
        text = f"{field.description} ({config.allowed_values(name)})"
        flag = config.flag_name(name)
        if field.annotation is bool:
            flag = f"{flag}/--no-{flag.removeprefix('--')}"
            command = click.option(flag, name, default=None, help=text)(command)
        else:
            command = click.option(flag, name, metavar="VALUE", help=text)(command)
    return click.option(
        "--config",
        "file",
        envvar=config.ENVIRONMENT_PREFIX + "CONFIG",
        type=click.Path(path_type=Path),
        help=f"Settings file. Default: the user's, else {config.SYSTEM_FILE}, where present.",
    )(command)


def _load(file: Path | None, flags: Mapping[str, Any]) -> config.Loaded:
    """The settings, or the end of the process with a line for each problem."""
    given = {name: value for name, value in flags.items() if value is not None}
    try:
        return config.load(given, file)
    except config.ConfigError as error:
        for problem in error.problems:
            click.echo(f"kvoffd: {problem}", err=True)
        sys.exit(EXIT_USAGE)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(kvoffd.__version__, prog_name="kvoffd")
def main() -> None:
    """Keep the KV cache of this node's inference engines in host memory."""


@main.command()
@_with_settings
def serve(file: Path | None, **flags: str | bool | None) -> None:
    """Run the daemon until SIGTERM or SIGINT, which let running copies finish."""
    settings = _load(file, flags).settings
    logs.configure(settings.log_level, settings.log_format)
    for name in config.unknown_environment():
        log.warning("environment variable names no setting", variable=name)
    try:
        prepare_folder(Path(settings.socket).absolute().parent, settings.socket_gid)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(daemon_options(settings)))
    except (KvoffdError, OSError) as error:
        log.error("cannot serve", reason=_sentence(error))  # noqa: TRY400 - not our frames
        sys.exit(EXIT_FAILED)


def _sentence(error: Exception) -> str:
    """What is the matter, without the kernel's number for it."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{os.fsdecode(error.filename)}: {error.strerror}."
    return str(error)


@main.group(name="config")
def config_group() -> None:
    """Look at the settings."""


@config_group.command()
@_with_settings
def show(file: Path | None, **flags: str | bool | None) -> None:
    """Print the effective settings as a settings file, with the source of each."""
    click.echo(config.show(_load(file, flags)), nl=False)


@main.command()
def version() -> None:
    """Print the version."""
    click.echo(kvoffd.__version__)


async def _serve(options: lifecycle.DaemonOptions) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await lifecycle.run(options, stop=stop)


def daemon_options(settings: config.Settings) -> lifecycle.DaemonOptions:
    """The daemon's parts get values of their own, and never the settings."""
    return lifecycle.DaemonOptions(
        rpc=RpcOptions(
            socket=str(Path(settings.socket).absolute()),
            allowed_uids=frozenset(settings.allowed_uids),
            allowed_gids=frozenset(settings.allowed_gids),
            socket_gid=settings.socket_gid,
            hello_timeout_s=settings.hello_timeout_s,
            backlog=settings.backlog,
            message_bytes_max=settings.message_bytes_max,
        ),
        service=ServiceOptions(
            sessions_max=settings.sessions_max,
            instances_max=settings.instances_max,
            namespaces_max=settings.namespaces_max,
            ranks_max=settings.ranks_max,
            memories_max=settings.memories_max,
            memory_bytes_max=settings.memory_bytes_max,
            regions_max=settings.regions_max,
            pool_blocks_max=settings.pool_blocks_max,
            ticket_cells_max=settings.ticket_cells_max,
            store_blocks_max=settings.store_blocks_max,
            load_blocks_max=settings.load_blocks_max,
            lookup_blocks_max=settings.lookup_blocks_max,
            jobs_in_flight_max=settings.jobs_in_flight_max,
            heartbeat_s=settings.heartbeat_s,
            lease_ttl_s=settings.lease_ttl_s,
            leases_max=settings.leases_max,
            store_deadline_s=settings.store_deadline_s,
            open_jobs_max=settings.open_jobs_max,
            load_deadline_max_s=settings.load_deadline_max_s,
            overdue_kill_s=settings.overdue_kill_s,
            janitor_interval_s=settings.janitor_interval_s,
            check_invariants=settings.check_invariants,
        ),
        arena_bytes=settings.arena_bytes,
        extent_bytes=settings.extent_bytes,
        slot_align_bytes=settings.slot_align_bytes,
        devices=settings.devices,
        copier_start_timeout_s=settings.copier_start_timeout_s,
        copier_ping_timeout_s=settings.copier_ping_timeout_s,
        drain_timeout_s=settings.drain_timeout_s,
    )


def prepare_folder(folder: Path, gid: int | None) -> None:
    """Make the sockets' folder private if it is missing, and refuse one that is not safe.

    Whoever may rename in the folder could put a socket of his own in our place.

    Raises:
        OSError: it cannot be made, or somebody else owns it or may write there.
    """
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        pass
    else:
        if gid is not None:
            os.chown(folder, -1, gid)
            folder.chmod(0o710)
    found = folder.stat()
    if folder.is_symlink() and folder.lstat().st_uid not in {os.geteuid(), 0}:
        raise PermissionError(
            f"{folder} is somebody else's symbolic link; sockets there are not safe"
        )
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(f"{folder} is no folder; the sockets need one of their own")
    if found.st_uid not in {os.geteuid(), 0}:
        raise PermissionError(
            f"{folder} belongs to user {found.st_uid}; sockets there are not safe"
        )
    if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        raise PermissionError(f"{folder} can be written by everybody; sockets there are not safe")


if __name__ == "__main__":
    main()
