"""Structured output: which grammar a request asks for, under the names of OpenAI, vLLM and SGLang."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import jiter

from baton.core.errors import InvalidRequestError
from baton.grammar.forms import ANY_OBJECT, choice_grammar, json_grammar, notation_grammar, regex_grammar
from baton.grammar.schema_walk import objects_of
from cluster.gateway.openai.json_body import check_finite, json_type, shown, without_nulls
from cluster.gateway.openai.known_names import check_known
from cluster.gateway.openai.nested import unsupported, wrong
from cluster.gateway.openai.schemas import BaseRequest

_OPTIONS = ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties")
_WITHOUT_EFFECT = ("disable_fallback", "backend", "_backend")  # there is one library, and it never falls back
_MAX_CHOICES = 10_000


@dataclass(frozen=True, slots=True)
class AskedGrammar:
    """A grammar, and the parameter that asks for it.

    Attributes:
        whitespace: the regular expression of its white space and the path of the parameter that has it, if it has one.
    """

    param: str
    grammar: str
    whitespace: tuple[str, str] | None = None


def asked_grammar(request: BaseRequest) -> AskedGrammar | None:
    """The grammar that a request asks for.

    Raises:
        InvalidRequestError: it asks for several, or a parameter is malformed.
        UnsupportedParameterError: a format that is not supported.
    """
    found = [asked for asked in (_of_response_format(request), *_of_guided(request)) if asked is not None]
    if len(found) > 1:
        names = " and ".join(asked.param for asked in found)
        raise InvalidRequestError(f"{names} contradict each other; send one.", param=found[1].param)
    return found[0] if found else None


def _of_response_format(request: BaseRequest) -> AskedGrammar | None:
    param, wanted = "response_format", request.response_format
    if wanted is None:
        return None
    wanted = without_nulls(wanted)
    kind = wanted.get("type")
    if kind == "text":
        check_known(wanted, ("type",), path=param)
        return None
    if kind == "json_object":
        check_known(wanted, ("type", "schema"), path=param)
        return _ask(param, "json", wanted.get("schema") or ANY_OBJECT, f"{param}.schema")
    if kind == "json_schema":
        check_known(wanted, ("type", "json_schema"), path=param)
        named = wanted.get("json_schema")
        if not isinstance(named, dict) or named.get("schema") is None:
            problem = "has no schema" if isinstance(named, dict) else f"is {shown(named)}"
            raise wrong(
                f"{param}.json_schema",
                f'must be an object with a schema, such as {{"name": "answer", "schema": {{…}}}}, but it {problem}.',
            )
        named = without_nulls(named)
        check_known(named, ("name", "description", "schema", "strict"), path=f"{param}.json_schema")
        if not isinstance(strict := named.get("strict", False), bool):
            raise wrong(f"{param}.json_schema.strict", f"must be a boolean, got {shown(strict)}.")
        return _ask(param, "json", named["schema"], f"{param}.json_schema.schema")
    raise unsupported(
        f"{param}.type",
        f"must be text, json_object or json_schema, got {shown(kind)}. Grammars and regular expressions are parameters "
        "of their own: structured_outputs.",
    )


def _of_guided(request: BaseRequest) -> list[AskedGrammar | None]:
    """What the older names of vLLM and the names of SGLang ask for."""
    options = {"whitespace_pattern": request.guided_whitespace_pattern}
    given = {
        "guided_json": ("json", request.guided_json),
        "guided_regex": ("regex", request.guided_regex),
        "guided_choice": ("choice", request.guided_choice),
        "guided_grammar": ("grammar", request.guided_grammar),
        "json_schema": ("json", request.json_schema),
        "regex": ("regex", request.regex),
        "ebnf": ("grammar", request.ebnf),
    }
    found = [_ask(param, form, value, param, options) for param, (form, value) in given.items() if value is not None]
    return [_of_structured_outputs(request), *found]


def _of_structured_outputs(request: BaseRequest) -> AskedGrammar | None:
    param, wanted = "structured_outputs", request.structured_outputs
    if wanted is None:
        return None
    given = {name: value for name, value in wanted.items() if value is not None and value is not False}
    if "structural_tag" in given:
        raise unsupported(f"{param}.structural_tag", "is not supported; send a grammar.")
    check_known(given, (*_FORMS, *_OPTIONS, *_WITHOUT_EFFECT), path=param)
    forms = [name for name in _FORMS if name in given]
    if len(forms) != 1:
        raise wrong(param, f"must have exactly one of {', '.join(_FORMS)}, got {', '.join(forms) or 'none of them'}.")
    return _ask(param, forms[0], given[forms[0]], f"{param}.{forms[0]}", given)


def _ask(
    param: str, form: str, value: Any, where: str, options: Mapping[str, Any] = MappingProxyType({})
) -> AskedGrammar:
    """
    Args:
        form: a key of :data:`_FORMS`.
        where: path of the value, for error messages.
    """
    pattern = options.get("whitespace_pattern")
    path = f"{param}.whitespace_pattern" if param == "structured_outputs" else "guided_whitespace_pattern"
    try:
        return AskedGrammar(param, _FORMS[form](value, where, options), pattern and (pattern, path))
    except InvalidRequestError as error:
        error.param = error.param or param
        raise


def _json(value: Any, where: str, options: Mapping[str, Any]) -> str:
    whitespace = options.get("whitespace_pattern")
    if whitespace is not None and not isinstance(whitespace, str):
        raise InvalidRequestError(f"whitespace_pattern must be a string, got {json_type(whitespace)}.")
    is_compact = options.get("disable_any_whitespace", False) is True
    schema = _schema(value, where)
    if options.get("disable_additional_properties", False) is True:
        schema = copy.deepcopy(schema)
        for found in objects_of(schema):
            if found.keys() & {"properties", "patternProperties"}:
                found.setdefault("additionalProperties", False)
    return json_grammar(schema, whitespace=whitespace, is_compact=is_compact)


def _any_object(value: Any, where: str, options: Mapping[str, Any]) -> str:
    if value is not True:
        raise wrong(where, f"must be true or absent, got {shown(value)}.")
    return _json(ANY_OBJECT, where, options)


def _choice(value: Any, where: str, options: Mapping[str, Any]) -> str:
    is_right = isinstance(value, list) and 1 <= len(value) <= _MAX_CHOICES and all(map(_is_text, value))
    if not is_right:
        raise wrong(where, f"must be an array of 1 to {_MAX_CHOICES} strings that are not empty.")
    return choice_grammar(value)


def _regex(value: Any, where: str, options: Mapping[str, Any]) -> str:
    return regex_grammar(_text(value, where))


def _notation(value: Any, where: str, options: Mapping[str, Any]) -> str:
    return notation_grammar(_text(value, where))


_FORMS: Mapping[str, Callable[[Any, str, Mapping[str, Any]], str]] = {
    "json": _json,
    "json_object": _any_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _notation,
}


def _schema(value: Any, where: str) -> Mapping[str, Any] | bool:
    """A JSON Schema, which vLLM's clients also send as text."""
    if isinstance(value, str):
        try:
            value = jiter.from_json(value.encode(), allow_inf_nan=False)
        except ValueError as error:
            raise wrong(where, f"is not JSON: {error}.") from error
    if not isinstance(value, dict | bool):
        raise wrong(where, f"must be a JSON schema, got {json_type(value)}.")
    check_finite(value, where)
    return value


def _text(value: Any, where: str) -> str:
    if not _is_text(value):
        raise wrong(where, f"must be a string that is not empty, got {shown(value)}.")
    return str(value)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)
