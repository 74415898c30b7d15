"""Sees that the protocol only grows: `compatible.py RELEASED_FOLDER PRESENT_DESCRIPTORS`.

Compares the present descriptors with those of the newest release, kept as
RELEASED_FOLDER/<version>.binpb, and names every change that an older peer
could not live with. Before the first release there is nothing to compare with.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

Descriptor = TypeVar("Descriptor", DescriptorProto, EnumDescriptorProto, ServiceDescriptorProto)


def breaking_changes(released: FileDescriptorSet, present: FileDescriptorSet) -> list[str]:
    """A sentence for each change that breaks a peer built from the released files."""
    return [
        *_lost_or_changed("message", _messages(released), _messages(present), _message_changes),
        *_lost_or_changed("enum", _enums(released), _enums(present), _enum_changes),
        *_lost_or_changed("service", _services(released), _services(present), _service_changes),
    ]


def _lost_or_changed(
    kind: str,
    released: Mapping[str, Descriptor],
    present: Mapping[str, Descriptor],
    changes: Callable[[Descriptor, Descriptor], Iterator[str]],
) -> Iterator[str]:
    for name, former in released.items():
        if name not in present:
            yield f"{kind} {name} is gone"
        else:
            yield from (f"{kind} {name}: {change}" for change in changes(former, present[name]))


def _message_changes(released: DescriptorProto, present: DescriptorProto) -> Iterator[str]:
    fields = {field.number: field for field in present.field}
    reserved = {number for span in present.reserved_range for number in range(span.start, span.end)}
    for former in released.field:
        now = fields.get(former.number)
        if now is None:
            if former.number not in reserved:
                yield f"field {former.name} = {former.number} is gone and not reserved"
        elif (now.type, now.type_name, now.label) != (former.type, former.type_name, former.label):
            yield f"field {former.name} = {former.number} has another type"
        elif now.HasField("oneof_index") != former.HasField("oneof_index"):
            yield f"field {former.name} = {former.number} moved into or out of a oneof"


def _enum_changes(released: EnumDescriptorProto, present: EnumDescriptorProto) -> Iterator[str]:
    numbers = {value.number for value in present.value}
    for former in released.value:
        if former.number not in numbers:
            yield f"value {former.name} = {former.number} is gone"


def _service_changes(
    released: ServiceDescriptorProto, present: ServiceDescriptorProto
) -> Iterator[str]:
    methods = {method.name: method for method in present.method}
    for former in released.method:
        now = methods.get(former.name)
        if now is None:
            yield f"call {former.name} is gone"
        elif (now.input_type, now.output_type, now.client_streaming, now.server_streaming) != (
            former.input_type,
            former.output_type,
            former.client_streaming,
            former.server_streaming,
        ):
            yield f"call {former.name} has another shape"


def _messages(files: FileDescriptorSet) -> dict[str, DescriptorProto]:
    found: dict[str, DescriptorProto] = {}

    def walk(scope: str, messages: Iterable[DescriptorProto]) -> None:
        for message in messages:
            found[f"{scope}.{message.name}"] = message
            walk(f"{scope}.{message.name}", message.nested_type)

    for file in files.file:
        walk(file.package, file.message_type)
    return found


def _enums(files: FileDescriptorSet) -> dict[str, EnumDescriptorProto]:
    found = {f"{file.package}.{enum.name}": enum for file in files.file for enum in file.enum_type}
    for scope, message in _messages(files).items():
        found |= {f"{scope}.{enum.name}": enum for enum in message.enum_type}
    return found


def _services(files: FileDescriptorSet) -> Mapping[str, ServiceDescriptorProto]:
    return {
        f"{file.package}.{service.name}": service for file in files.file for service in file.service
    }


def newest_release(folder: Path) -> Path | None:
    """The descriptors of the highest version in the folder; None before the first release."""
    return max(
        folder.glob("*.binpb"),
        key=lambda path: tuple(int(part) for part in path.stem.split(".")),
        default=None,
    )


def main(arguments: list[str]) -> int:
    """0 when nothing broke, 1 with a sentence for each break."""
    folder, present_path = Path(arguments[0]), Path(arguments[1])
    present = FileDescriptorSet.FromString(present_path.read_bytes())
    if not present.file:
        sys.stderr.write(f"{present_path} describes nothing\n")
        return 1
    newest = newest_release(folder)
    if newest is None:
        sys.stdout.write("no protocol has been released yet: nothing to compare with\n")
        return 0
    broken = breaking_changes(FileDescriptorSet.FromString(newest.read_bytes()), present)
    for sentence in broken:
        sys.stderr.write(f"since {newest.stem}: {sentence}\n")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
