"""The shape of the tree: what a reader may rely on in every file, checked in every run.

Each check is a function from one file to complaints, so that test_each_check_can_fail
can show it a file that breaks the rule.
"""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

import pytest

from tests.source_tree import (
    SourceFile,
    imported_names,
    module_name,
    python_files,
    text_files,
    within,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Check = Callable[[SourceFile], Iterator[str]]

FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 70

# Who reads the environment: settings of the daemon, the client's default socket, and the
# engine's own settings; the copier hands its own to the process that it starts.
ENVIRONMENT_READERS = (
    "kvoffd/config.py",
    "kvoffd/copier/",
    "client/kvoffd_client/paths.py",
    "client/kvoffd_client/vllm/",
)
# Threads begin, and are crossed, in these files only.
THREAD_OWNERS = ("client/kvoffd_client/io_thread.py",)
BANNED_NOUNS = re.compile(
    r"(?:^|_)(chunks?|pages?|managers?|helpers?|utils?|infos?|ref_?cnt|ref_?counts?)(?:_|$)"
)
# The page of tickets is a page of memory and nothing else; mmap's unit is one, too.
ALLOWED_NOUNS = re.compile(r"ticket_?pages?|page_bytes|header_page")
LEFTOVER = re.compile(r"\b(FIXME|XXX|TODO|HACK)\b")
BARE_NOQA = re.compile(r"#\s*noqa(?!: [A-Z]+[0-9]+(?:, ?[A-Z]+[0-9]+)*\s+- \w)", re.IGNORECASE)
BARE_TYPE_IGNORE = re.compile(r"#\s*type:\s*ignore(?!\[[a-z, -]+\]\s+#\s*(?:noqa|\w+))")
BARE_PRAGMA = re.compile(r"#\s*pragma: no (?:cover|branch)(?!\s+- \w)")
DEVELOPER_PATH = re.compile(r"(?<![\w.])/(?:work|home|root|Users|opt|mnt)/\w")
REGISTRY_HOST = re.compile(
    "|".join(
        [
            r"py" + r"pi\.",
            r"python" + r"hosted\.",
            r"npm" + r"js\.",
            r"crates" + r"\.io",
            r"index" + r"-url",
        ]
    )
)


def long_files(file: SourceFile) -> Iterator[str]:
    """A file that does not fit holds two ideas."""
    count = len(file.text.splitlines())
    if count > FILE_LINES_MAX:
        yield f"{file.path}: {count} lines, {FILE_LINES_MAX} at most"


def long_functions(file: SourceFile) -> Iterator[str]:
    """So does a function."""
    for node in ast.walk(file.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            count = (node.end_lineno or node.lineno) - node.lineno + 1
            if count > FUNCTION_LINES_MAX:
                yield f"{file.path}:{node.lineno}: {count} lines: {node.name}"


def banned_nouns(file: SourceFile) -> Iterator[str]:
    """Identifiers use the words of docs/glossary.md; the nouns it refuses name nothing."""
    for line, identifier in defined_identifiers(file):
        snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", identifier).lower()
        found = BANNED_NOUNS.search(ALLOWED_NOUNS.sub("", snake))
        if found:
            yield f"{file.path}:{line}: {identifier}: the glossary refuses {found[1]}"


def defined_identifiers(file: SourceFile) -> Iterator[tuple[int, str]]:
    """What the file names itself: a third party's names cannot be chosen."""
    yield 1, file.path.rsplit("/", 1)[-1].removesuffix(".py")
    for node in ast.walk(file.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def leftovers(file: SourceFile) -> Iterator[str]:
    """Nothing is left for later in a comment: it is an issue, or it is done."""
    for number, line in file.lines():
        found = LEFTOVER.search(line)
        if found and not file.path.endswith("test_tidy.py"):
            yield f"{file.path}:{number}: {found[1]}"


def prints(file: SourceFile) -> Iterator[str]:
    """The daemon logs, kvoffctl draws, the client says it through logging."""
    for node in calls(file):
        if isinstance(node.func, ast.Name) and node.func.id == "print" and file.in_product:
            yield f"{file.path}:{node.lineno}: print"


def calls(file: SourceFile) -> Iterator[ast.Call]:
    return (node for node in ast.walk(file.tree) if isinstance(node, ast.Call))


def unsized_queues(file: SourceFile) -> Iterator[str]:
    """Every queue has a bound."""
    if not file.in_product:
        return
    for node in calls(file):
        name = ast.unparse(node.func).rsplit(".", 1)[-1]
        sizes = [*node.args[:1], *(word.value for word in node.keywords if word.arg == "maxsize")]
        unsized = not sizes or ast.unparse(sizes[0]) in {"0", "-1"}
        if name == "SimpleQueue" or (name in {"Queue", "LifoQueue", "PriorityQueue"} and unsized):
            yield f"{file.path}:{node.lineno}: {name} without a size"


def sleeps_and_mocks(file: SourceFile) -> Iterator[str]:
    """Tests wait for a condition and use fakes. In `patient` it is the engine that waits."""
    if not file.path.startswith("tests/") or file.path.startswith("tests/vllm/patient/"):
        return
    for line, name in imported_names(file):
        if within(name, "unittest.mock", "mock") or name == "time.sleep":
            yield f"{file.path}:{line}: {name}"
    for node in calls(file):
        if ast.unparse(node.func) in {"time.sleep", "mock.patch"}:
            yield f"{file.path}:{node.lineno}: {ast.unparse(node.func)}"


def environment_readers(file: SourceFile) -> Iterator[str]:
    """Values are passed in; few files may look at the environment."""
    if not file.in_product or file.path.startswith(ENVIRONMENT_READERS):
        return
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) in {"os.environ", "os.getenv"}:
            yield f"{file.path}:{node.lineno}: {ast.unparse(node)}"
    for line, name in imported_names(file):
        if name in {"os.environ", "os.getenv"}:
            yield f"{file.path}:{line}: {name}"


def torch_cuda(file: SourceFile) -> Iterator[str]:
    """One file of the daemon knows CUDA."""
    if not file.path.startswith("kvoffd/") or file.path == "kvoffd/devices/cuda.py":
        return
    for number, line in file.lines():
        if "torch.cuda" in line:
            yield f"{file.path}:{number}: torch.cuda"
    for number, name in imported_names(file):
        if within(name, "cuda", "pynvml"):
            yield f"{file.path}:{number}: {name}"


def foreign_imports(file: SourceFile) -> Iterator[str]:
    """The per-file lines of the import rules; pyproject.toml has the contracts."""
    neutral_client = file.path.startswith("client/") and "/vllm/" not in file.path
    wire_speaker = file.path.startswith(("kvoffd/rpc/", "kvoffd/ctl/"))
    for line, name in imported_names(file):
        wrong = (
            (file.path.startswith("kvoffd/") and within(name, "torch", "vllm"))
            or (neutral_client and within(name, "torch", "vllm", "numpy"))
            or (
                file.path.startswith("kvoffd/")
                and not wire_speaker
                and within(name, "grpc", "google.protobuf", "kvoffd_proto")
            )
            or (
                file.path.startswith("kvoffd/")
                and file.path != "kvoffd/main.py"
                and within(name, "kvoffd.config")
            )
            or (file.in_product and within(name, "pickle", "marshal", "shelve", "dill"))
        )
        if wrong:
            yield f"{file.path}:{line}: may not import {name}"


def thread_owners(file: SourceFile) -> Iterator[str]:
    """Threads are started in few files, named, and crossed there only."""
    if not file.in_product or file.path in THREAD_OWNERS:
        return
    for node in calls(file):
        name = ast.unparse(node.func)
        if name.rsplit(".", 1)[-1] in {
            "Thread",
            "ThreadPoolExecutor",
            "to_thread",
            "run_in_executor",
        }:
            yield f"{file.path}:{node.lineno}: {name}"


def exceptions_without_reason(file: SourceFile) -> Iterator[str]:
    """Every exception to a rule says why, on its line."""
    if file.path.endswith("test_tidy.py"):
        return
    for number, line in file.lines():
        for pattern in (BARE_NOQA, BARE_TYPE_IGNORE, BARE_PRAGMA):
            if pattern.search(line):
                yield f"{file.path}:{number}: {line.strip()}"


def strange_places(file: SourceFile) -> Iterator[str]:
    """The tree names no machine of a developer and no registry."""
    for number, line in file.lines():
        for pattern in (DEVELOPER_PATH, REGISTRY_HOST):
            found = pattern.search(line)
            if found and not file.path.endswith("test_tidy.py"):
                yield f"{file.path}:{number}: {found[0]}"


PYTHON_CHECKS: tuple[Check, ...] = (
    long_files,
    long_functions,
    banned_nouns,
    prints,
    unsized_queues,
    sleeps_and_mocks,
    environment_readers,
    torch_cuda,
    foreign_imports,
    thread_owners,
    exceptions_without_reason,
)
TEXT_CHECKS: tuple[Check, ...] = (leftovers, strange_places)


def named(checks: tuple[Check, ...]) -> list[object]:
    return [pytest.param(check, id=check.__name__) for check in checks]


@pytest.mark.parametrize("check", named(PYTHON_CHECKS))
def test_python_files_are_tidy(check: Check) -> None:
    assert [complaint for file in python_files() for complaint in check(file)] == []


@pytest.mark.parametrize("check", named(TEXT_CHECKS))
def test_all_files_are_tidy(check: Check) -> None:
    assert [complaint for file in text_files() for complaint in check(file)] == []


BAD_FILES = [
    (long_files, "kvoffd/a.py", "x = 1\n" * (FILE_LINES_MAX + 1)),
    (long_functions, "kvoffd/a.py", "def f():\n" + "    x = 1\n" * FUNCTION_LINES_MAX),
    (banned_nouns, "kvoffd/a.py", "class BlockManager: ..."),
    (banned_nouns, "kvoffd/a.py", "def f(chunk_bytes): ..."),
    (banned_nouns, "kvoffd/page_table.py", ""),
    (banned_nouns, "kvoffd/a.py", "self.ref_cnt = 1"),
    (prints, "kvoffd/a.py", "print('x')"),
    (unsized_queues, "kvoffd/a.py", "asyncio.Queue()"),
    (unsized_queues, "kvoffd/a.py", "queue.Queue(maxsize=0)"),
    (unsized_queues, "client/kvoffd_client/a.py", "queue.SimpleQueue()"),
    (sleeps_and_mocks, "tests/a.py", "time.sleep(1)"),
    (sleeps_and_mocks, "tests/a.py", "from unittest.mock import patch"),
    (environment_readers, "kvoffd/main.py", "os.environ['X']"),
    (environment_readers, "client/kvoffd_client/a.py", "from os import getenv"),
    (torch_cuda, "kvoffd/devices/cpu.py", "torch.cuda.synchronize()"),
    (torch_cuda, "kvoffd/devices/cpu.py", "from cuda.bindings import driver"),
    (foreign_imports, "kvoffd/devices/cpu.py", "import torch"),
    (foreign_imports, "kvoffd/lifecycle.py", "import grpc.aio"),
    (foreign_imports, "kvoffd/rpc/server.py", "from kvoffd import config"),
    (foreign_imports, "client/kvoffd_client/engine/rank.py", "def f():\n    import numpy as np"),
    (foreign_imports, "client/kvoffd_client/vllm/worker.py", "import pickle"),
    (thread_owners, "client/kvoffd_client/session.py", "threading.Thread(target=f)"),
    (thread_owners, "kvoffd/rpc/server.py", "asyncio.to_thread(f)"),
    (exceptions_without_reason, "kvoffd/a.py", "x = 1  # noqa"),
    (exceptions_without_reason, "kvoffd/a.py", "x = 1  # noqa: S101"),
    (exceptions_without_reason, "kvoffd/a.py", "x = 1  # type: ignore"),
    (exceptions_without_reason, "kvoffd/a.py", "x = 1  # type: ignore[attr-defined]"),
    (exceptions_without_reason, "kvoffd/a.py", "x = 1  # pragma: no cover"),
    (leftovers, "docs/a.md", "TO" + "DO: write this"),
    (strange_places, "docs/a.md", "see /home/" + "somebody/kvoffd"),
    (strange_places, "Makefile", "pip install --index" + "-url x"),
]


@pytest.mark.parametrize(("check", "path", "text"), BAD_FILES)
def test_each_check_can_fail(check: Check, path: str, text: str) -> None:
    """A check that finds nothing in a file made to break it checks nothing."""
    assert len(list(check(SourceFile(path, text)))) >= 1


def test_every_check_is_shown_a_bad_file() -> None:
    assert {check for check, _, _ in BAD_FILES} == {*PYTHON_CHECKS, *TEXT_CHECKS}


def test_reasons_on_the_line_are_accepted() -> None:
    """The other side of exceptions_without_reason: the form that it asks for is enough."""
    text = (
        "x = 1  # noqa: S101, S108 - because\n"
        "y = 1  # type: ignore[attr-defined]  # the stubs lack it\n"
        "z = 1  # pragma: no cover - the kernel of CI has it\n"
    )
    assert list(exceptions_without_reason(SourceFile("kvoffd/a.py", text))) == []


def test_every_module_is_imported_by_another_or_is_an_entry() -> None:
    """No module lies about unused."""
    modules = {module_name(file): file for file in python_files() if file.in_product}
    known = {"kvoffd", "kvoffd.main", "kvoffd.ctl.main", "kvoffd_client", "kvoffd_client.vllm"}
    for name, file in modules.items():
        known |= {imported for _, imported in imported_names(file) if imported != name}
        # Started with python -m, or found by its name.
        known |= {
            node.value
            for node in ast.walk(file.tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
    packages = {name for name in modules if any(other.startswith(f"{name}.") for other in modules)}
    assert sorted(set(modules) - known - packages) == []
