"""The model's own Jinja chat template, rendered in a sandbox."""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from services.frontend.text.errors import ModelTextError, TemplateError

Message = Mapping[str, Any]

# What a template's own expressions raise for messages that it was not written for.
_TEMPLATE_BUGS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


class _Generation(jinja2.ext.Extension):
    """{% generation %}…{% endgeneration %} marks what an assistant said, for training; it is only text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's declaration

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """`special_tokens`: bos_token, eos_token … by name. Raises ModelTextError for a broken template."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda format: datetime.datetime.now().strftime(format)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelTextError(f"the model's chat template does not parse: {error}") from error
        self._special_tokens = special_tokens

    def render(self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None) -> str:
        """The prompt text, ready for the assistant's turn; `variables` are the template's other inputs.

        Raises TemplateError when the template refuses.
        """
        inputs = {"add_generation_prompt": True, "tools": None, "documents": None, **(variables or {})}
        try:
            return self._template.render({**inputs, **self._special_tokens, "messages": messages})
        except (jinja2.TemplateError, *_TEMPLATE_BUGS) as error:
            raise TemplateError(f"the model's chat template refuses these messages: {error}") from error


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
