"""Commands whose options are the fields of a settings model, which define types, defaults, ranges and help."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import typer
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from baton.core.config_section import CommandOption, option_name
from baton.core.errors import ConfigError

SettingsT = TypeVar("SettingsT", bound=BaseModel)


def settings_command(settings: type[SettingsT], run: Callable[[typer.Context, SettingsT], None]) -> Callable[..., None]:
    """Creates a function to register with typer, which calls ``run`` with the settings. Its help is their docstring.

    The function raises :class:`ConfigError` if the model refuses a value. The message names the option.
    """

    def command(context: typer.Context, **values: Any) -> None:
        run(context, read_settings(settings, values))

    parameters = [_keyword("context", typer.Context)]
    for name, field in settings.model_fields.items():
        default = inspect.Parameter.empty if field.is_required() else field.default
        parameters.append(_keyword(name, _annotation(settings, name, field), default))
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    command.__doc__ = settings.__doc__
    return command


def read_settings(settings: type[SettingsT], values: dict[str, Any]) -> SettingsT:
    """Builds the settings from the values of the options.

    Raises:
        ConfigError: the model refuses a value; the message names the option.
    """
    try:
        return settings.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(settings, dict(fault)) for fault in error.errors())) from error


def _explain(settings: type[BaseModel], fault: dict[str, Any]) -> str:
    message = str(fault["msg"]).removeprefix("Value error, ").replace("Input should be", "must be")
    if not fault["loc"]:
        return message
    return f"{option_name(settings, str(fault['loc'][0]))} {message}, got {fault['input']!r}."


def _keyword(name: str, annotation: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _annotation(settings: type[BaseModel], name: str, field: FieldInfo) -> Any:
    shown = next((one for one in field.metadata if isinstance(one, CommandOption)), CommandOption())
    option = typer.Option(
        *(shown.names or (() if field.annotation is bool else (option_name(settings, name),))),
        help=field.description,
        metavar=shown.metavar,
        min=_bound(field, "ge"),
        max=_bound(field, "le"),
    )
    return Annotated[field.annotation, option]


def _bound(field: FieldInfo, kind: str) -> float | None:
    """The field's constraint of this name, such as 1 for ``ge`` of ``Field(ge=1)``."""
    bound: float | None = next((getattr(one, kind) for one in field.metadata if hasattr(one, kind)), None)
    return bound
