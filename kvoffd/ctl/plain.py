"""Admin answers as plain values: the JSON that scripts rely on (docs/protocol.md).

Pure. Every field is there, set or not, under the name it has in admin.proto;
bytes are hexadecimal; pairs of reason and count, or of name and value, are objects.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from google.protobuf.message import Message

from kvoffd_proto.v1 import admin_pb2

Plain: TypeAlias = "str | int | float | bool | list[Plain] | dict[str, Plain]"

# Repeated messages that are maps in all but wire form: the key's and the value's field.
_PAIRS = {
    admin_pb2.ReasonCount.DESCRIPTOR.full_name: ("reason", "blocks"),
    admin_pb2.NamespaceFieldStatus.DESCRIPTOR.full_name: ("name", "value"),
}


def plain(message: Message) -> dict[str, Plain]:
    """The message's fields by name."""
    return {
        field.name: _plain_value(
            getattr(message, field.name),
            field.message_type.full_name if field.message_type else None,
        )
        for field in message.DESCRIPTOR.fields
    }


def _plain_value(value: Any, kind: str | None) -> Plain:
    """One field; kind is the full name of its message type, if it has one."""
    if isinstance(value, Message):
        return plain(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, str | int | float):
        return value
    if kind in _PAIRS:
        key, content = _PAIRS[kind]
        return {getattr(entry, key): getattr(entry, content) for entry in value}
    return [_plain_value(entry, kind) for entry in value]
