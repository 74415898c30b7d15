"""How a log line is made: structlog's events and the libraries' own, in one form.

Owns the process's logging set-up; called once, before the loop starts, by the
process's main. Everybody else calls structlog.get_logger(__name__).
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING

import structlog

if TYPE_CHECKING:
    from typing import TextIO

    from structlog.typing import Processor


def configure(level: str, form: str, stream: TextIO | None = None) -> None:
    """Send every event of at least this level to the stream (standard error).

    Level is debug, info, warning or error; form is console, json, or auto: console where
    the stream is a terminal. May be called again, and then replaces what was set up.
    """
    stream = stream or sys.stderr
    is_terminal = stream.isatty()
    common: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *common,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        # Tests configure more than once.
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=common,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *_renderers(form, is_terminal=is_terminal),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # It speaks of its selector at debug level only.
    logging.getLogger("asyncio").setLevel(max(logging.INFO, root.level))


def _renderers(form: str, *, is_terminal: bool) -> list[Processor]:
    if form == "console" or (form == "auto" and is_terminal):
        return [
            structlog.dev.ConsoleRenderer(
                colors=is_terminal, exception_formatter=structlog.dev.plain_traceback
            )
        ]
    return [
        # Never the frames' variables: session tokens and hashes are among them.
        structlog.processors.ExceptionRenderer(
            structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
        ),
        structlog.processors.EventRenamer("event"),
        structlog.processors.JSONRenderer(default=_as_text),
    ]


def _as_text(value: object) -> str:
    """Bytes are hashes and digests here: hexadecimal says more than an escape."""
    return value.hex() if isinstance(value, bytes) else str(value)
