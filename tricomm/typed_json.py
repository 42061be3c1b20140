"""Decodes JSON into dataclasses, by their annotations; errors name the place of the wrong value."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

_T = TypeVar("_T")
_Reader = Callable[[Any], Any]
_NAMES = {dict: "an object", list: "an array", str: "text", bool: "true or false", int: "an integer", NoneType: "null"}


class WrongJson(ValueError):
    """`problem` at `place`, for example `.rows[0].blocks`."""

    def __init__(self, problem: str, place: str = "") -> None:
        super().__init__(f"{place.removeprefix('.')}: {problem}" if place else problem)
        self.problem, self.place = problem, place

    def inside(self, place: str) -> WrongJson:
        return WrongJson(self.problem, place + self.place)


def decode(text: bytes | str, kind: type[_T], strict: bool = False) -> _T:
    """The `kind` in JSON `text`. Fields that `kind` does not have are skipped; if `strict`, refused.

    Raises `WrongJson`, also for numbers that are not finite.
    """
    try:
        value = json.loads(text, parse_constant=_number, parse_float=_number)
    except (ValueError, RecursionError) as error:
        raise WrongJson(str(error)) from None
    return convert(value, kind, strict)


def convert(value: Any, kind: type[_T], strict: bool = False) -> _T:
    """`value`, made of dicts, lists (or tuples), text and numbers, as a `kind`. Raises as `decode`."""
    form: Any = kind
    made: _T = _reader(form, strict)(value)
    return made


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is not finite")
    return value


def _refused(wanted: str, value: Any) -> WrongJson:
    return WrongJson(f"{wanted} is needed, found {_NAMES.get(type(value), type(value).__name__)}")


@cache
def _reader(kind: Any, strict: bool) -> _Reader:
    origin, arguments = get_origin(kind), get_args(kind)
    if is_dataclass(kind):
        return _record(kind, strict)
    if origin in (Union, UnionType):
        (member,) = (argument for argument in arguments if argument is not NoneType)
        return _optional(_reader(member, strict))
    if origin is tuple:
        if arguments[-1] is ...:
            read = _reader(arguments[0], strict)
            return _array(lambda count: [read] * count)
        fixed = [_reader(argument, strict) for argument in arguments]
        return _array(lambda count: fixed)
    if origin in (dict, Mapping):
        return _mapping(int if arguments[0] is int else str, _reader(arguments[1], strict))
    return {int: _integer, float: _float, str: _text, bool: _flag}[kind]


def _record(kind: Any, strict: bool) -> _Reader:
    types = get_type_hints(kind)
    readers = {field.name: _reader(types[field.name], strict) for field in fields(kind)}
    needed = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]

    def read(value: Any) -> Any:
        if type(value) is not dict:
            raise _refused("an object", value)
        for name in needed:
            if name not in value:
                raise WrongJson(f"{name} is missing")
        given = {}
        for name, item in value.items():
            if name in readers:
                try:
                    given[name] = readers[name](item)
                except WrongJson as error:
                    raise error.inside(f".{name}") from None
            elif strict:
                raise WrongJson(f"there is no field {name}")
        try:
            return kind(**given)
        except ValueError as error:
            raise WrongJson(str(error)) from None

    return read


def _optional(read: _Reader) -> _Reader:
    return lambda value: None if value is None else read(value)


def _array(readers: Callable[[int], list[_Reader]]) -> _Reader:
    """A reader of arrays; `readers(n)` returns the readers of the items of an array of n."""

    def read_all(value: Any) -> tuple[Any, ...]:
        if type(value) not in (list, tuple):
            raise _refused("an array", value)
        given, result = readers(len(value)), []
        if len(given) != len(value):
            raise WrongJson(f"{len(given)} items are needed, found {len(value)}")
        for at, (read, item) in enumerate(zip(given, value, strict=True)):
            try:
                result.append(read(item))
            except WrongJson as error:
                raise error.inside(f"[{at}]") from None
        return tuple(result)

    return read_all


def _mapping(key: Callable[[str], Any], read: _Reader) -> _Reader:
    def read_all(value: Any) -> dict[Any, Any]:
        if type(value) is not dict:
            raise _refused("an object", value)
        result = {}
        for name, item in value.items():
            try:
                result[key(_text(name))] = read(item)
            except ValueError as error:
                problem = error if isinstance(error, WrongJson) else WrongJson(str(error))
                raise problem.inside(f"[{name!r}]") from None
        return result

    return read_all


def _integer(value: Any) -> int:
    if type(value) is not int:
        raise _refused("an integer", value)
    if not -(1 << 63) <= value < 1 << 63:
        raise WrongJson("an integer of 64 bits is needed")
    return value


def _float(value: Any) -> float:
    if type(value) not in (int, float):
        raise _refused("a number", value)
    try:
        return float(value)
    except OverflowError:
        raise WrongJson("the number is too large") from None


def _text(value: Any) -> str:
    if type(value) is not str:
        raise _refused("text", value)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise WrongJson("the text has half a character") from None
    return value


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise _refused("true or false", value)
    return value
