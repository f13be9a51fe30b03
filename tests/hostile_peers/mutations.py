"""Strategies for hostile messages: mutations of valid ones, along their descriptors and in their bytes."""

from __future__ import annotations

from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

M = TypeVar("M", bound=Message)

_INTEGERS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}
_TEXTS = st.sampled_from(
    ["", " ", "a" * 300, "a" * 100_000, "a\n2026-01-01 CRITICAL forged\x1b[31m", "\x00", "..", "0", "none", "int8"]
) | st.text(max_size=8)
_MANY = st.sampled_from([0, 10_000, 100_000])
_NUM_CHANGES = st.sampled_from([0, 0, 1, 1, 1, 3])


@st.composite
def changed(draw: st.DrawFn, valid: M) -> M:
    """Copies of a message with some fields, of any depth, cleared, repeated or set to odd values."""
    message = type(valid)()
    message.CopyFrom(valid)
    for _ in range(draw(_NUM_CHANGES)):
        _change(draw, message)
    return message


@st.composite
def damaged(draw: st.DrawFn, valid: bytes) -> bytes:
    """Bytes that are cut, extended, changed at one place, or random."""
    place = draw(st.integers(0, max(0, len(valid) - 1)))
    some = draw(st.binary(min_size=1, max_size=12))
    return draw(
        st.sampled_from(
            [
                valid[:place],
                valid[place:],
                valid[:place] + some + valid[place + len(some) :],
                valid[:place] + some + valid[place:],
                valid + valid,
                some,
            ]
        )
    )


def _change(draw: st.DrawFn, message: Message) -> None:
    if not message.DESCRIPTOR.fields:
        return
    field = draw(st.sampled_from(list(message.DESCRIPTOR.fields)))
    if draw(st.integers(0, 5)) == 3:
        message.ClearField(field.name)
    elif field.message_type is not None and field.message_type.GetOptions().map_entry:
        _change_map(draw, getattr(message, field.name), field)
    elif field.is_repeated:
        _change_repeated(draw, getattr(message, field.name), field)
    elif field.message_type is not None:
        child = getattr(message, field.name)
        child.SetInParent()
        _change(draw, child)
    else:
        setattr(message, field.name, draw(_values(field)))


def _change_map(draw: st.DrawFn, entries: Any, field: FieldDescriptor) -> None:
    key, value = (field.message_type.fields_by_name[name] for name in ("key", "value"))
    for _ in range(draw(st.integers(1, 3))):
        entries[draw(_values(key))] = draw(_values(value))


def _change_repeated(draw: st.DrawFn, values: Any, field: FieldDescriptor) -> None:
    kind = draw(st.sampled_from(["append", "shorten", "double", "many"]))
    if kind == "shorten":
        del values[draw(st.integers(0, len(values))) :]
    elif kind == "double":
        values.extend(list(values))
    elif field.message_type is not None:
        _change(draw, values.add())
    elif kind == "append":
        values.append(draw(_values(field)))
    else:
        values.extend([draw(_values(field))] * draw(_MANY) if field.cpp_type in _INTEGERS else [])


def _values(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.cpp_type in _INTEGERS:
        least, most = _INTEGERS[field.cpp_type]
        ends = [least, least + 1, most, most - 1, 0, 1, 2**16, 2**31 - 1]
        return st.sampled_from(ends) | st.integers(0, 200) | st.integers(least, most)
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return st.booleans()
    if field.cpp_type == FieldDescriptor.CPPTYPE_DOUBLE:
        return st.floats()
    if field.cpp_type == FieldDescriptor.CPPTYPE_FLOAT:
        return st.floats(width=32)
    if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        return st.sampled_from([value.number for value in field.enum_type.values])
    return _TEXTS if field.type == FieldDescriptor.TYPE_STRING else _TEXTS.map(str.encode) | st.binary(max_size=64)
