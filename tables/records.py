"""Dataclasses as JSON objects: checked when they're read, and before they're written.

A field's annotation says what JSON may hold: `str`, `int`, `float`, `bool`, a `list`, a `dict`, a
union of these, `Any`, a `tuple` (a list in JSON), or another dataclass. A whole number is welcome
where a float is; nothing else is converted. NaN, which Python's JSON knows, is only a number where
a field says so (`MAY_BE_NAN`). Standard library only.
"""

import dataclasses
import json
import math
import types
import typing
from collections.abc import Iterable
from typing import Any, TypeVar

Values = dict[str, Any]  # field: value
Instance = TypeVar("Instance")
MAY_BE_NAN = {"may_be_nan": True}  # metadata of a field


class Misfit(ValueError):
    """JSON that isn't what the fields say. Its text goes on after the name of the file."""


def from_json(cls: type[Instance], value: Any, strict: bool = False) -> Instance:
    """A dataclass's instance from what JSON gave.

    Args:
      cls: the dataclass.
      value: an object, as a dict.
      strict: every field has to be there, and nothing else. Otherwise a field with a default may be
        missing, and names that no field has are left alone.

    Raises:
      Misfit: the first thing that's wrong.
    """
    if not isinstance(value, dict):
        raise Misfit(f"holds {shown(value)} instead of an object with fields")
    kinds = typing.get_type_hints(cls)
    given: Values = {}
    for field in _fields(cls):
        name = field.name
        if name in value:
            given[name] = _checked(field, value[name], kinds[name])
        elif strict or field.default is dataclasses.MISSING:
            raise Misfit(f"has no {name!r}")
    unknown = sorted(value.keys() - given.keys())
    if unknown and strict:
        raise Misfit(f"has {unknown[0]!r}, which nothing is called")
    return cls(**given)


def to_json(record: Any) -> Values:
    """A dataclass's instance as JSON holds it, names in the order of the fields.

    A field with a default is one that older files lack, so it's left out where it says no more than
    the default.

    Raises:
      TypeError: a field has a value of another type than it says; that's a bug of ours.
    """
    kinds = typing.get_type_hints(type(record))
    written: Values = {}
    for field in _fields(type(record)):
        value = getattr(record, field.name)
        kind = kinds[field.name]
        if not _fits_field(value, kind, field):
            name = f"{type(record).__name__}.{field.name}"
            wanted = _named(kind)
            raise TypeError(f"{name} is {shown(value)}, which should be {wanted}")
        if value == field.default:
            continue
        if dataclasses.is_dataclass(value):
            value = to_json(value)
        written[field.name] = value
    return written


def shown(value: Any) -> str:
    """A value as JSON writes it, shortened."""
    text = json.dumps(value, default=repr)
    if len(text) > 60:
        text = f"{text[:57]}..."
    return text


def _fields(cls: Any) -> tuple[dataclasses.Field, ...]:
    """`dataclasses.fields`, for a class that the type checker doesn't know to be a dataclass."""
    return dataclasses.fields(cls)


def _checked(field: dataclasses.Field, value: Any, kind: Any) -> Any:
    """The value of a field, converted where JSON has no such type."""
    name = field.name
    if dataclasses.is_dataclass(kind):
        try:
            return from_json(typing.cast(type, kind), value)
        except Misfit as error:
            raise Misfit(f"has a {name!r} that {error}") from error
    origin = typing.get_origin(kind) or kind
    if origin is tuple and isinstance(value, list):
        value = tuple(value)
    if not _fits_field(value, kind, field):
        wanted = _named(kind)
        raise Misfit(f"has {shown(value)} as {name!r}, which should be {wanted}")
    return value


def _fits_field(value: Any, kind: Any, field: dataclasses.Field) -> bool:
    """Whether a value has the type that a field says."""
    if _is_nan(value):
        return kind is Any or "may_be_nan" in field.metadata
    return _fits(value, kind)


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _fits(value: Any, kind: Any) -> bool:
    """Whether a value has the type of an annotation."""
    if kind is Any:
        return True
    parts = typing.get_args(kind)
    if isinstance(kind, types.UnionType):
        return any(_fits(value, part) for part in parts)

    origin = typing.get_origin(kind) or kind
    if isinstance(value, bool) and origin in (int, float):  # in Python, True is an int
        return False
    if origin is float:  # JSON has no type of its own for whole numbers
        return isinstance(value, (int, float)) and not _is_nan(value)
    if not isinstance(value, origin):
        return False
    if origin is dict and parts:
        of_a_key, of_a_value = parts
        keys_fit = _all_fit(value.keys(), of_a_key)
        return keys_fit and _all_fit(value.values(), of_a_value)
    if origin in (list, tuple) and parts:
        return _all_fit(value, parts[0])
    return True


def _all_fit(values: Iterable[Any], kind: Any) -> bool:
    return all(_fits(value, kind) for value in values)


WORDS = {
    str: "a text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    dict: "an object",
    list: "a list",
    tuple: "a list",
    type(None): "null",
}


def _named(kind: Any) -> str:
    """An annotation in words."""
    parts = list(typing.get_args(kind))
    if isinstance(kind, types.UnionType):
        names = [_named(part) for part in parts]
        return " or ".join(names)
    origin = typing.get_origin(kind) or kind
    if ... in parts:  # a tuple of any length
        parts.remove(...)
    if parts and parts[-1] is not Any:
        whole = WORDS[origin]
        value = _named(parts[-1])
        return f"{whole} of which each value is {value}"
    return WORDS.get(origin, origin.__name__)
