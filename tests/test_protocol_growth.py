"""The check that keeps the protocol additive finds each kind of break."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorSet

from proto.compatible import breaking_changes, main, newest_release

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def released() -> FileDescriptorSet:
    """One file with a message, a nested enum and a service."""
    files = FileDescriptorSet()
    file = files.file.add(name="a.proto", package="kvoffd.v1")
    message = file.message_type.add(name="Step")
    message.field.add(
        name="bell",
        number=1,
        type=FieldDescriptorProto.TYPE_UINT64,
        label=FieldDescriptorProto.LABEL_OPTIONAL,
    )
    message.enum_type.add(name="Kind").value.add(name="KIND_UNSPECIFIED", number=0)
    file.service.add(name="Offload").method.add(
        name="Lookup", input_type=".kvoffd.v1.Step", output_type=".kvoffd.v1.Step"
    )
    return files


def change_type(files: FileDescriptorSet) -> None:
    files.file[0].message_type[0].field[0].type = FieldDescriptorProto.TYPE_BYTES


def drop_field(files: FileDescriptorSet) -> None:
    del files.file[0].message_type[0].field[:]


def move_into_oneof(files: FileDescriptorSet) -> None:
    files.file[0].message_type[0].field[0].oneof_index = 0


def drop_value(files: FileDescriptorSet) -> None:
    del files.file[0].message_type[0].enum_type[0].value[:]


def drop_call(files: FileDescriptorSet) -> None:
    del files.file[0].service[0].method[:]


def stream_call(files: FileDescriptorSet) -> None:
    files.file[0].service[0].method[0].server_streaming = True


def drop_message(files: FileDescriptorSet) -> None:
    files.file[0].message_type[0].name = "Other"


BREAKS = [
    (change_type, ["message kvoffd.v1.Step: field bell = 1 has another type"]),
    (drop_field, ["message kvoffd.v1.Step: field bell = 1 is gone and not reserved"]),
    (move_into_oneof, ["message kvoffd.v1.Step: field bell = 1 moved into or out of a oneof"]),
    (drop_value, ["enum kvoffd.v1.Step.Kind: value KIND_UNSPECIFIED = 0 is gone"]),
    (drop_call, ["service kvoffd.v1.Offload: call Lookup is gone"]),
    (stream_call, ["service kvoffd.v1.Offload: call Lookup has another shape"]),
    (drop_message, ["message kvoffd.v1.Step is gone", "enum kvoffd.v1.Step.Kind is gone"]),
]


@pytest.mark.parametrize(("change", "sentences"), BREAKS)
def test_a_break_is_named(
    change: Callable[[FileDescriptorSet], None], sentences: list[str]
) -> None:
    present = released()
    change(present)
    assert breaking_changes(released(), present) == sentences


def test_additions_and_reserved_fields_are_no_breaks() -> None:
    present = released()
    message = present.file[0].message_type[0]
    del message.field[:]
    message.reserved_range.add(start=1, end=2)
    message.field.add(name="more", number=2, type=FieldDescriptorProto.TYPE_BYTES)
    present.file[0].message_type.add(name="New")
    assert breaking_changes(released(), present) == []


def test_newest_release_is_by_number_and_not_by_letter(tmp_path: Path) -> None:
    for version in ("0.9.0", "0.10.0"):
        (tmp_path / f"{version}.binpb").write_bytes(released().SerializeToString())
    assert newest_release(tmp_path) == tmp_path / "0.10.0.binpb"
    assert newest_release(tmp_path / "absent") is None


def test_command_ends_with_1_on_a_break_and_on_empty_descriptors(tmp_path: Path) -> None:
    (tmp_path / "0.1.0.binpb").write_bytes(released().SerializeToString())
    present = released()
    drop_call(present)
    (tmp_path / "present").write_bytes(present.SerializeToString())
    assert main([str(tmp_path), str(tmp_path / "present")]) == 1
    (tmp_path / "empty").write_bytes(b"")
    assert main([str(tmp_path), str(tmp_path / "empty")]) == 1
    (tmp_path / "same").write_bytes(released().SerializeToString())
    assert main([str(tmp_path), str(tmp_path / "same")]) == 0
