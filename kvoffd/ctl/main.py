"""The `kvoffctl` command: what an operator types.

Owns the process. Asks one question in one session, prints the answer and ends:
0 all is well, 1 the daemon says it is not healthy, 2 wrong usage, 3 no answer.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from kvoffd.ctl import tables
from kvoffd.ctl.plain import plain
from kvoffd_client import aio
from kvoffd_client.errors import ClientError
from kvoffd_client.paths import socket_path

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from google.protobuf.message import Message
    from rich.console import RenderableType

EXIT_UNHEALTHY = 1
EXIT_NO_ANSWER = 3
# What a shell expects of a program that was interrupted.
PIPE_COLUMNS = 200
EXIT_INTERRUPTED = 130
# What grpc.health.v1 is asked about; "" is the daemon as a whole.
HEALTH_SERVICES = {"daemon": "", "offload": "kvoffd.v1.Offload", "admin": "kvoffd.v1.Admin"}

_output = click.option(
    "-o",
    "--output",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="Tables are for people and may change; JSON is for programs.",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--socket",
    envvar="KVOFFD_SOCKET",
    metavar="PATH",
    help="The daemon's socket. Default: where a daemon of this user listens by default.",
)
@click.option(
    "--timeout",
    "timeout_s",
    type=click.FloatRange(0.1, 600),
    default=aio.TIMEOUT_S,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for each answer.",
)
@click.pass_context
def main(context: click.Context, socket: str | None, timeout_s: float) -> None:
    """Ask a kvoffd daemon how it is and what it holds."""
    try:
        context.obj = {"socket": socket_path(socket), "timeout_s": timeout_s}
    except ClientError as error:
        raise click.UsageError(str(error)) from None


@main.command()
@_output
@click.pass_obj
def status(where: dict[str, Any], output: str) -> None:
    """The daemon, its arena, its blocks and its copiers."""
    _print(output, _ask(_in_session(where, aio.AdminSession.status)), tables.status)


@main.command()
@_output
@click.pass_obj
def instances(where: dict[str, Any], output: str) -> None:
    """The engines that use the daemon now."""
    _print(output, _ask(_in_session(where, aio.AdminSession.instances)), tables.instances)


@main.command()
@_output
@click.pass_obj
def namespaces(where: dict[str, Any], output: str) -> None:
    """The sets of engines that share blocks, and what each holds."""
    _print(output, _ask(_in_session(where, aio.AdminSession.namespaces)), tables.namespaces)


@main.command()
@_output
@click.pass_obj
def health(where: dict[str, Any], output: str) -> None:
    """Whether the daemon serves; the exit status is 1 if it does not."""
    answer = _ask(_check_health(where))
    _print(output, answer, tables.health)
    if not answer["healthy"]:
        sys.exit(EXIT_UNHEALTHY)


async def _in_session(
    where: Mapping[str, Any], question: Callable[[aio.AdminSession], Awaitable[Message]]
) -> dict[str, Any]:
    async with aio.open_admin(**where) as session:
        return plain(await question(session))


async def _check_health(where: Mapping[str, Any]) -> dict[str, Any]:
    found = {
        name: await aio.check_health(service, **where) for name, service in HEALTH_SERVICES.items()
    }
    words = {True: "serving", False: "not serving", None: "unknown"}
    return {
        "healthy": all(found.values()),
        "services": {name: words[is_serving] for name, is_serving in found.items()},
    }


def _ask(question: Awaitable[dict[str, Any]]) -> dict[str, Any]:
    """The answer, or the end of the process with a sentence."""

    async def wait_for_it() -> dict[str, Any]:
        return await question

    try:
        return asyncio.run(wait_for_it())
    except ClientError as error:
        click.echo(f"kvoffctl: {error}", err=True)
        sys.exit(EXIT_NO_ANSWER)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


def _print(
    output: str, answer: dict[str, Any], table: Callable[[Mapping[str, Any]], RenderableType]
) -> None:
    if output == "json":
        click.echo(json.dumps(answer, indent=2, ensure_ascii=False))
    else:
        # A pipe has no width of its own: nothing is to be broken there.
        width = None if sys.stdout.isatty() else PIPE_COLUMNS
        Console(highlight=False, width=width).print(table(answer))


if __name__ == "__main__":
    main()
