"""JSON schemas rewritten into what llguidance keeps to: it is wrong about some bounds, formats and keys."""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from types import MappingProxyType
from typing import Any, TypeGuard
from urllib.parse import unquote

from baton.grammar.endings import drop_endless
from baton.grammar.refusals import refusal
from baton.grammar.schema_walk import DATA_KEYS, NAMED_SCHEMAS, asserting, objects_of, options_of, resolved

_INLINE = re.compile(r"%json\s*")
_POINTER = re.compile(r"[^#]*#(/.*)", re.DOTALL)
_STRICT = MappingProxyType({"lenient": False, "coerce_one_of": False, "json_allow_general_unicode_escapes": False})
"""Options without which llguidance allows what a schema does not."""
_ESCAPES = r"nrbtf\""
"""Without ``u``: strings and keys have one spelling."""
_COUNTS = frozenset({"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"})
_MAX_COUNT = 2**64 - 1
_LEAST_POSITIVE = 1e-40
"""Stands for all numbers between 0 and itself, whose many digits llguidance cannot read."""
_LARGE = 2**48
"""From here on, bounds are whole numbers."""
_ANY: tuple[Any, ...] = (True, {})
_DIALECT = re.compile(r"https?://json-schema\.org/(draft-0[467]|draft/2019-09|draft/2020-12)/schema#?")
_LATEST_DIALECT = re.compile(r"https?://(?:json-schema\.org/schema|spec\.openapis\.org/oas/3\.1/dialect/base)#?")
_FREE_FORMATS = frozenset({"binary", "password", "path", "file-path", "directory-path"})
"""Formats that any text has."""
_MAX_LISTED_CHARS = 64 * 1024
"""Of the schemas of keys that ``propertyNames`` lists."""
_WITHOUT_MEANING: Mapping[str, tuple[Any, ...]] = {
    "uniqueItems": (False,),
    "not": (False,),
    "propertyNames": _ANY,
    "unevaluatedProperties": _ANY,
    "unevaluatedItems": _ANY,
    "dependentRequired": ({},),
    "dependentSchemas": ({},),
    "dependencies": ({},),
}
"""Values with which these keywords allow everything."""

_LEAP = "(?:0[48]|[2468][048]|[13579][26])"
_LEAP_YEAR = f"(?:[0-9]{{2}}{_LEAP}|{_LEAP}00)"
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_DAY = "(?:0[1-9]|1[0-9]|2[0-8])"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[1-9]|1[0-2])-{_DAY}|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)|{_LEAP_YEAR}-02-29)"
)
_HOUR_AND_MINUTE = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_HOUR_AND_MINUTE}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_HOUR_AND_MINUTE})"
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_NO_HYPHENS = "(?:[^.]{1,3}|[^.]{2}[^.-][^.]*|[^.]{3}[^.-][^.]*)"
"""A label without two hyphens behind its second character, where they would say how it is encoded."""
_BYTE = "(?:[0-9]|[1-9][0-9]|1[0-9]{2}|2[0-4][0-9]|25[0-5])"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]+"
_DOMAIN = rf"{_LABEL}(?:\.{_LABEL})*"
FORMATS: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "date": ({"pattern": f"^{_DATE}$"},),
    "time": ({"pattern": f"^{_TIME}$"},),
    "date-time": ({"pattern": f"^{_DATE}T{_TIME}$"},),
    "hostname": (
        {"pattern": f"^{_DOMAIN}$", "maxLength": 253},
        {"pattern": rf"^{_NO_HYPHENS}(?:\.{_NO_HYPHENS})*$"},
    ),
    "email": (
        {"pattern": rf"^{_ATOM}(?:\.{_ATOM})*@(?:{_DOMAIN}|\[{_BYTE}(?:\.{_BYTE}){{3}}\])$", "maxLength": 254},
        {"pattern": rf"^[^@]{{1,64}}@{_NO_HYPHENS}(?:\.{_NO_HYPHENS})*$"},
    ),
}
"""Schemas instead of formats that llguidance takes too widely. Dates are days of the Gregorian calendar from year 1 on,
and there are no leap seconds, which most parsers refuse."""


def schemas_of(part: Mapping[str, Any]) -> list[Any]:
    """The schemas that are the part of a grammar, or stand inside of it in Lark's notation.

    Args:
        part: one of ``grammars`` in llguidance's JSON form.
    """
    own = [part["json_schema"]] if "json_schema" in part else []
    return own + [schema for schema, _, _ in _inline_schemas(part.get("lark_grammar") or "")]


def rewrite_schemas(part: dict[str, Any]) -> None:
    """Rewrites the schemas in a part of a grammar.

    Raises:
        InvalidRequestError: a reference leads to what is not a schema.
    """
    if "json_schema" in part:
        _rewrite(part["json_schema"])
    lark = part.get("lark_grammar") or ""
    pieces, end_before = [], 0
    for schema, start, end in _inline_schemas(lark):
        _rewrite(schema)
        pieces += [lark[end_before:start], json.dumps(schema, ensure_ascii=False)]
        end_before = end
    if pieces:
        part["lark_grammar"] = "".join([*pieces, lark[end_before:]])


def is_read_exactly(number: float) -> bool:
    """Whether llguidance keeps a number. It reads long ones with an error of up to two units of the last place."""
    _, digits, exponent = Decimal(repr(number)).as_tuple()
    return isinstance(number, int) or (len(digits) <= 15 and abs(int(exponent)) <= 22)


def _inline_schemas(lark: str) -> Iterator[tuple[Any, int, int]]:
    """The schemas in a grammar in Lark's notation, each with its first position and the one behind it."""
    end = 0
    while found := _INLINE.search(lark, end):
        try:
            schema, end = json.JSONDecoder().raw_decode(lark, found.end())
            yield schema, found.end(), end
        except ValueError:  # the compiler says what is wrong
            end = found.end()


def _rewrite(schema: Any) -> None:
    if not isinstance(schema, dict):
        return
    options = schema.pop("x-guidance", None)
    options = {**(options if isinstance(options, dict) else {}), **_STRICT}
    for found in objects_of(schema):
        for key in [key for key, value in found.items() if value is None and key not in DATA_KEYS]:
            del found[key]
        _name_dialect(found)
    drop_endless(schema)
    bounds = _bounds(schema)
    for found in objects_of(schema):
        _check_reference(found.get("$ref"))
        _list_properties(found, schema)
        if _has_free_keys(found):
            options["json_allowed_escapes"] = _ESCAPES
        _rewrite_keywords(found, bounds)
    schema["x-guidance"] = options


def _name_dialect(schema: dict[str, Any]) -> None:
    """Gives ``$schema`` the form that llguidance knows. It looks for all others elsewhere."""
    name = schema.get("$schema")
    known = _DIALECT.fullmatch(name) if isinstance(name, str) else None
    if known:
        scheme = "http" if known[1].startswith("draft-") else "https"
        schema["$schema"] = f"{scheme}://json-schema.org/{known[1]}/schema"
    elif isinstance(name, str) and _LATEST_DIALECT.fullmatch(name):
        del schema["$schema"]
    elif "$schema" in schema:
        raise refusal(
            f"$schema {name!r:.100} is not supported. Leave it out, or name a draft "
            "from 4 on, as in https://json-schema.org/draft/2020-12/schema."
        )


def _list_properties(schema: dict[str, Any], whole: dict[str, Any]) -> None:
    """Replaces ``propertyNames`` of a mapping, which llguidance does not know, by properties.

    Args:
        whole: the schema that references begin at.
    """
    names = schema.get("propertyNames")
    if not isinstance(names, dict):
        return
    names = resolved(names, whole)
    asked = asserting(names) - {"type"}
    if names.get("type", "string") != "string" or (asked and _has_properties(schema)):
        return
    value, listed, pattern = schema.get("additionalProperties", True), options_of(names), _pattern_of(names, asked)
    if pattern:
        schema["patternProperties"], schema["additionalProperties"] = {pattern: value}, False
    elif asked in ({"const"}, {"enum"}) and listed and all(isinstance(name, str) for name in listed):
        text = json.dumps(value)
        if len(listed) * len(text) > _MAX_LISTED_CHARS:
            return
        schema["properties"], schema["additionalProperties"] = {name: json.loads(text) for name in listed}, False
    elif asked and not (asked == {"minLength"} and names["minLength"] == 0):
        return
    del schema["propertyNames"]


def _has_properties(schema: Mapping[str, Any]) -> bool:
    return bool(schema.get("properties") or schema.get("patternProperties"))


def _pattern_of(names: Mapping[str, Any], asked: set[str]) -> str:
    """The expression of texts with a pattern or lengths; empty for any others, and for those of any length."""
    if asked == {"pattern"} and isinstance(names["pattern"], str):
        return names["pattern"]
    is_length = asked <= {"minLength", "maxLength"} and all(
        type(names[key]) is int and names[key] >= 0 for key in asked
    )
    if is_length and any(names[key] for key in asked):
        return rf"^[\s\S]{{{names.get('minLength', 0)},{names.get('maxLength', '')}}}$"
    return ""


def _check_reference(reference: Any) -> None:
    """Refuses a reference to data, whose numbers must not be rewritten, or to an object of schemas by names."""
    pointer = _POINTER.fullmatch(reference) if isinstance(reference, str) else None
    is_name = False
    for part in unquote(pointer[1]).split("/")[1:] if pointer else ():
        is_data = part in DATA_KEYS and not is_name
        is_name = part in NAMED_SCHEMAS and not is_name
        if is_data:
            break
    else:
        is_data = is_name
    if is_data:
        raise refusal(
            f"$ref {reference!r:.100} leads to what is not a schema. Put the schema under $defs and refer to that."
        )


def _has_free_keys(schema: Mapping[str, Any]) -> bool:
    """Whether other keys than the listed ones are allowed beside these. A free key must not be a listed one that is
    spelled with escapes."""
    is_closed = schema.get("additionalProperties") is False
    return not is_closed and any(schema.get(key) for key in ("properties", "patternProperties", "required"))


def _rewrite_keywords(schema: dict[str, Any], bounds: Sequence[float]) -> None:
    for key in _COUNTS & schema.keys():
        value = schema[key]
        if isinstance(value, float) and value.is_integer() and abs(value) <= _MAX_COUNT:
            schema[key] = int(value)
    for key in _WITHOUT_MEANING.keys() & schema.keys():
        if any(type(value) is type(schema[key]) and value == schema[key] for value in _WITHOUT_MEANING[key]):
            del schema[key]
    _drop_idle_keywords(schema)
    _replace_bounds(schema, "Minimum", 1, bounds)
    _replace_bounds(schema, "Maximum", -1, bounds)
    stricter = FORMATS.get(schema["format"]) if isinstance(schema.get("format"), str) else None
    others = schema.get("allOf", [])
    if stricter and isinstance(others, list):
        del schema["format"]
        schema["allOf"] = [*others, *map(dict, stricter)]


def _drop_idle_keywords(schema: dict[str, Any]) -> None:
    """Removes keywords that allow everything where others are missing, or have a value that makes them idle."""
    if "contains" not in schema or (schema.get("minContains") == 0 and "maxContains" not in schema):
        for key in ("contains", "minContains", "maxContains"):
            schema.pop(key, None)
    if "if" not in schema or not schema.keys() & {"then", "else"}:
        for key in ("if", "then", "else"):
            schema.pop(key, None)
    if schema.get("uniqueItems") is True and schema.get("maxItems") in (0, 1):
        del schema["uniqueItems"]
    if isinstance(schema.get("format"), str) and schema["format"] in _FREE_FORMATS:
        del schema["format"]


def _bounds(schema: Any) -> list[float]:
    """All bounds of numbers in a schema, in ascending order."""
    keys = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
    return sorted({found[key] for found in objects_of(schema) for key in keys if _is_number(found.get(key))})


def _replace_bounds(schema: dict[str, Any], name: str, sign: int, bounds: Sequence[float]) -> None:
    """Replaces bounds that llguidance gets wrong by inclusive ones that are a little stricter.

    Args:
        name: ``Minimum`` or ``Maximum``.
        sign: of a step that makes the bound stricter.
        bounds: those in the whole schema, in ascending order. References and ``allOf`` may bring this bound together
            with any of them.
    """
    exclusive, inclusive = f"exclusive{name}", name.lower()
    bound, own = schema.get(exclusive), schema.get(inclusive)
    if isinstance(bound, bool):  # of draft 4: the other bound is exclusive
        del schema[exclusive]
        if bound and _is_number(own):
            schema[exclusive] = bound = schema.pop(inclusive)
            own = None
    if _is_number(own) and not is_read_exactly(own):
        schema[inclusive] = own = _beside(own, sign)
    if not _is_number(bound) or not (own is None or _is_number(own)):
        return
    next_index = bisect_right(bounds, bound) if sign > 0 else bisect_left(bounds, bound) - 1
    is_close = 0 <= next_index < len(bounds) and abs(bounds[next_index] - bound) < 1
    allows_itself = is_close and bound == int(bound) and sign * bound >= 0  # to llguidance
    if allows_itself or not is_read_exactly(bound) or abs(bound) >= _LARGE:
        del schema[exclusive]
        nearest = _beside(bound, sign)
        schema[inclusive] = nearest if own is None else max(own, nearest, key=lambda number: sign * number)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _beside(number: float, sign: int) -> float:
    """A number that is greater, or smaller if ``sign`` is -1, also with the error of :func:`is_read_exactly`."""
    if abs(number) < _LEAST_POSITIVE:
        return sign * _LEAST_POSITIVE if sign * number >= 0 else 0
    if abs(number) >= _LARGE:
        whole = math.floor(number) + 1 if sign > 0 else math.ceil(number) - 1
        return whole if float(whole) == whole else int(math.nextafter(number, sign * math.inf))
    return number + sign * abs(number) * 2**-50
