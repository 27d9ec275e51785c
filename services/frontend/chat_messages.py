"""A conversation as clients send it, checked and in the shape that chat templates expect."""

from typing import Any

from services.errors import invalid
from services.frontend.rules import shown, unsupported

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_MESSAGES = MAX_PARTS = 2048
# Fields that templates may read besides role and content.
_PASSED_ON = ("name", "tool_calls", "tool_call_id", "reasoning_content")
_TEXT_PARTS = {"text": "text", "input_text": "text", "refusal": "refusal"}


def check_messages(field: str, messages: Any) -> list[dict[str, Any]]:
    """Raises ServiceError naming the message and what is allowed."""
    if not isinstance(messages, list) or not 0 < len(messages) <= MAX_MESSAGES:
        raise invalid(
            field, f"{field} must be an array of 1 to {MAX_MESSAGES} messages, got {shown(messages)}"
        )
    return [_message(f"{field}[{i}]", message) for i, message in enumerate(messages)]


def _message(field: str, message: Any) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise invalid(field, f"{field} must be an object with role and content, got {shown(message)}")
    role = message.get("role")
    if role not in ROLES:
        raise invalid(f"{field}.role", f"{field}.role must be one of {', '.join(ROLES)}, got {shown(role)}")
    passed_on = {key: message[key] for key in _PASSED_ON if message.get(key) is not None}
    content = _content(f"{field}.content", message.get("content"), may_be_empty="tool_calls" in passed_on)
    return {"role": "system" if role == "developer" else role, "content": content, **passed_on}


def _content(field: str, content: Any, *, may_be_empty: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None and may_be_empty:
        return ""
    if not isinstance(content, list) or not 0 < len(content) <= MAX_PARTS:
        raise invalid(
            field,
            f"{field} must be a string or an array of 1 to {MAX_PARTS} text parts, got {shown(content)}",
        )
    return "\n".join(_part(f"{field}[{i}]", part) for i, part in enumerate(content))


def _part(field: str, part: Any) -> str:
    if not isinstance(part, dict):
        raise invalid(field, f"{field} must be an object with a type, got {shown(part)}")
    kind = part.get("type")
    if not isinstance(kind, str):
        raise invalid(f"{field}.type", f"{field}.type must be text, got {shown(kind)}")
    if kind not in _TEXT_PARTS:
        raise unsupported(f"{field}.type", f"content of type {shown(kind)}")
    text = part.get(_TEXT_PARTS[kind])
    if not isinstance(text, str):
        name = _TEXT_PARTS[kind]
        raise invalid(f"{field}.{name}", f"{field}.{name} must be a string, got {shown(text)}")
    return text
