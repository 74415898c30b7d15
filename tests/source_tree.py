"""The files of this repository as the tidy tests see them: tracked, or about to be."""

from __future__ import annotations

import ast
import subprocess
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
BINARY_SUFFIXES = frozenset({".binpb", ".png", ".gz"})
PRODUCT = ("kvoffd/", "client/kvoffd_client/")


@dataclass(frozen=True)
class SourceFile:
    """One text file: where it lies below the repository's root, and what it says."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, filename=self.path)

    @property
    def generated(self) -> bool:
        return self.path.removesuffix("i").endswith(("_pb2.py", "_pb2_grpc.py"))

    @property
    def in_product(self) -> bool:
        return self.path.startswith(PRODUCT)

    def lines(self) -> Iterator[tuple[int, str]]:
        return enumerate(self.text.splitlines(), start=1)


@cache
def text_files() -> tuple[SourceFile, ...]:
    """Every text file that git tracks or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],  # noqa: S607 - git of the PATH
        cwd=ROOT,
        capture_output=True,
        check=True,
        text=True,
    ).stdout
    paths = sorted({ROOT / name for name in listed.split("\0") if name})
    return tuple(
        SourceFile(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
        for path in paths
        if path.is_file() and path.suffix not in BINARY_SUFFIXES
    )


@cache
def python_files() -> tuple[SourceFile, ...]:
    """Every Python file that a person wrote."""
    return tuple(file for file in text_files() if file.path.endswith(".py") and not file.generated)


def module_name(file: SourceFile) -> str:
    """The dotted name under which a file of a shipped package is imported."""
    path = file.path.removeprefix("client/").removeprefix("proto/").removesuffix(".py")
    return path.removesuffix("/__init__").replace("/", ".")


def imported_names(file: SourceFile) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that a file imports, however deep inside."""
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.lineno, node.module
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def within(name: str, *packages: str) -> bool:
    """Whether a dotted name is one of the packages, or lies in one."""
    return any(name == package or name.startswith(f"{package}.") for package in packages)
