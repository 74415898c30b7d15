"""Permissions of socket files: nobody else's, or one group's. Runs on the loop thread."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def private_files() -> Iterator[None]:
    """Files made within are 0600 from their first moment. Process-wide: hold it briefly."""
    former = os.umask(0o177)
    try:
        yield
    finally:
        os.umask(former)


def open_to_group(path: str, gid: int | None) -> None:
    """Let one group in, if there is one to let in."""
    if gid is not None:
        os.chown(path, -1, gid)
        Path(path).chmod(0o660)
