"""The fields that the HTTP endpoints share."""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import Request

from services.errors import invalid
from services.frontend.rules import CACHE_SALT, PRIORITY, Flag, Number, Rule, shown, unsupported
from services.frontend.sampling import RULES

Body = Mapping[str, Any]

# HTTP clients expect OpenAI's range here.
SAMPLING_RULES: dict[str, Rule] = {**RULES, "temperature": Number(0, 2)}
_MAX_REQUEST_ID_CHARS = 128
_FLAG = Flag()
_STRUCTURED = (
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_json_object"),
    "structured_outputs",
)
# Fields that would change the answer and that this server does not know how to obey.
_NOT_SUPPORTED = {
    **dict.fromkeys(_STRUCTURED, "structured output"),
    "tools": "calling tools",
    "functions": "calling functions",
    "function_call": "calling functions",
    "audio": "audio output",
    "use_beam_search": "beam search",
    "prompt_embeds": "a prompt of embeddings",
    "suffix": "inserting before a suffix",
    "chat_template": "a template of the request's own",
    "documents": "retrieval documents",
    "continue_final_message": "continuing the last message",
    "web_search_options": "searching the web",
}


@dataclass(frozen=True)
class StreamWishes:
    stream: bool
    include_usage: bool
    continuous_usage: bool  # usage so far in every chunk


def sampling_values(body: Body, *, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """The sampling fields that the body has, checked, by name."""
    return {
        name: rule.check(name, body[name])
        for name, rule in SAMPLING_RULES.items()
        if name in body and name not in without
    }


def flag(body: Body, name: str, default: bool = False) -> bool:
    return _FLAG.check(name, body[name]) if name in body else default


def salt(body: Body) -> str:
    return CACHE_SALT.check("cache_salt", body["cache_salt"]) if "cache_salt" in body else ""


def priority(body: Body) -> int:
    return PRIORITY.check("priority", body["priority"]) if "priority" in body else 0


def model_name(body: Body) -> str | None:
    """None when the body names no model: the served one."""
    name = body.get("model")
    if name is not None and not isinstance(name, str):
        raise invalid("model", f"model must be a string, got {shown(name)}")
    return name


def stream_wishes(body: Body) -> StreamWishes:
    stream = flag(body, "stream")
    options = body.get("stream_options", {})
    if not isinstance(options, dict):
        raise invalid("stream_options", f"stream_options must be an object, got {shown(options)}")
    if "stream_options" in body and not stream:
        raise invalid("stream_options", "stream_options is only allowed together with stream: true")
    given = {key: value for key, value in options.items() if value is not None}
    names = ("include_usage", "continuous_usage_stats")
    usage, continuous = (
        _FLAG.check(f"stream_options.{name}", given[name]) if name in given else False for name in names
    )
    return StreamWishes(stream, usage, usage and continuous)


def refuse_unsupported(body: Body) -> None:
    """Raises for what would be answered wrongly if it were ignored. Empty and false are not a wish."""
    for name, what in _NOT_SUPPORTED.items():
        if body.get(name):
            raise unsupported(name, what)
    if body.get("tool_choice", "none") not in ("none", "auto"):
        raise unsupported("tool_choice", "calling tools")
    if body.get("modalities", ["text"]) != ["text"]:
        raise unsupported("modalities", "anything but text")
    if (form := body.get("response_format")) is not None:
        _check_response_format(form)


def request_id(request: Request) -> str:
    """The client's X-Request-Id when it can be echoed, else a new one. It need not be unique."""
    given = request.headers.get("x-request-id", "")
    usable = 0 < len(given) <= _MAX_REQUEST_ID_CHARS and given.isascii() and given.isprintable()
    return given if usable else uuid.uuid4().hex


def _check_response_format(form: Any) -> None:
    kind = form.get("type") if isinstance(form, dict) else None
    if kind in ("json_object", "json_schema"):
        raise unsupported("response_format", f"structured output (type {kind})")
    if kind != "text":
        raise invalid("response_format", 'response_format must be an object with "type": "text"')
