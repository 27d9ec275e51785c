"""What a client's field may hold. The same rules serve both doors.

A rule's `check(field, value)` answers the value, or raises a ServiceError that names the field and says what
is allowed. Types are strict: "1" is not a number, True is not 1.
"""

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from services.errors import ServiceError, invalid

INT32_MAX = 2**31 - 1
MAX_STOPS = 4
# Their tokens are found on the event loop.
MAX_BIASES = 16_384
MAX_BAD_WORDS, MAX_BAD_WORDS_CHARS = 128, 2048


class Rule(Protocol):
    def check(self, field: str, value: Any) -> Any: ...


@dataclass(frozen=True)
class Number:
    """A number within bounds, also after it is rounded to the float32 that the engine gets."""

    low: float
    high: float
    above_low: bool = False

    def check(self, field: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not self._allows(value):
            bounds = f"above {self.low:g} and at most" if self.above_low else f"from {self.low:g} to"
            raise invalid(field, f"{field} must be a number {bounds} {self.high:g}, got {shown(value)}")
        return float(value)

    def _allows(self, value: float) -> bool:
        if not self.low <= value <= self.high:
            return False
        return not self.above_low or array("f", [value])[0] > self.low


@dataclass(frozen=True)
class Integer:
    low: int
    high: int

    def check(self, field: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not self.low <= value <= self.high:
            raise invalid(
                field, f"{field} must be an integer from {self.low} to {self.high}, got {shown(value)}"
            )
        return value


@dataclass(frozen=True)
class Flag:
    def check(self, field: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise invalid(field, f"{field} must be true or false, got {shown(value)}")
        return value


@dataclass(frozen=True)
class Text:
    max_length: int

    def check(self, field: str, value: Any) -> str:
        if not isinstance(value, str) or len(value) > self.max_length:
            raise invalid(
                field, f"{field} must be a string of at most {self.max_length} characters, got {shown(value)}"
            )
        return value


@dataclass(frozen=True)
class StopStrings:
    def check(self, field: str, value: Any) -> tuple[str, ...]:
        stops = [value] if isinstance(value, str) else value
        if (
            not isinstance(stops, list)
            or len(stops) > MAX_STOPS
            or not all(isinstance(stop, str) and stop for stop in stops)
        ):
            raise invalid(
                field,
                f"{field} must be a string or a list of at most {MAX_STOPS} strings, none of them empty, "
                f"got {shown(value)}",
            )
        return tuple(stops)


@dataclass(frozen=True)
class BadWords:
    def check(self, field: str, value: Any) -> tuple[str, ...]:
        if (
            not isinstance(value, list)
            or len(value) > MAX_BAD_WORDS
            or not all(isinstance(word, str) and word for word in value)
            or sum(map(len, value)) > MAX_BAD_WORDS_CHARS
        ):
            raise invalid(
                field,
                f"{field} must be a list of at most {MAX_BAD_WORDS} strings, none of them empty, together of "
                f"at most {MAX_BAD_WORDS_CHARS} characters, got {shown(value)}",
            )
        return tuple(value)


@dataclass(frozen=True)
class TokenIdList:
    """Only the shape is checked; whether the model has these tokens is `check_token_ids`'s to say."""

    max_length: int = INT32_MAX

    def check(self, field: str, value: Any) -> tuple[int, ...]:
        if not isinstance(value, list) or len(value) > self.max_length or not set(map(type, value)) <= {int}:
            bound = f" at most {self.max_length}" if self.max_length < INT32_MAX else ""
            raise invalid(field, f"{field} must be a list of{bound} token ids, got {shown(value)}")
        return tuple(value)


@dataclass(frozen=True)
class LogitBias:
    bias: Number = Number(-100, 100)

    def check(self, field: str, value: Any) -> dict[int, float]:
        if not isinstance(value, Mapping) or len(value) > MAX_BIASES:
            raise invalid(
                field,
                f"{field} must be an object of at most {MAX_BIASES} token ids and numbers from -100 to 100, "
                f"got {shown(value)}",
            )
        return {self._token_id(field, key): self.bias.check(field, entry) for key, entry in value.items()}

    def _token_id(self, field: str, key: Any) -> int:
        text = str(key)
        if not (text.isascii() and text.isdigit() and len(text) <= 10):
            raise invalid(field, f"{field} must have token ids as keys, got {shown(key)}")
        return int(text)


# Fields that every kind of request has.
CACHE_SALT = Text(256)
PRIORITY = Integer(-INT32_MAX, INT32_MAX)


def check_token_ids(field: str, token_ids: "tuple[int, ...] | list[int]", vocab_size: int) -> None:
    """Raises unless the model has every one of these tokens."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        wrong = next(i for i in token_ids if not 0 <= i < vocab_size)
        raise invalid(field, f"{field} must have token ids from 0 to {vocab_size - 1}, got {shown(wrong)}")


def unsupported(field: str, what: str) -> ServiceError:
    return invalid(field, f"{field}: {what} is not supported by this server", "UNSUPPORTED_VALUE")


def shown(value: Any) -> str:
    """A value as an error message shows it: short, and never by itself a reason for invalid JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        return "a number that is not finite"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return f"an array of {len(value)}"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, int) and value.bit_length() > 256:
        return "a number beyond all bounds"
    text = f'"{value}"' if isinstance(value, str) else str(value)
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= 40 else text[:37] + "..."
