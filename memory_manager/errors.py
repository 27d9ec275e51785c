"""One exception tree. `reason` is a constant that callers may switch on; the message is for people."""


class MemoryManagerError(Exception):
    """A call that was rejected; it has changed nothing."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class InvalidRequestError(MemoryManagerError):
    """The request can never be right."""


class PreconditionError(MemoryManagerError):
    """The request does not fit the state: STALE_EPOCH, OP_SEQ_GAP."""


class NotFoundError(MemoryManagerError):
    """What the request names does not exist (any more)."""


class ExhaustedError(MemoryManagerError):
    """A limit was reached; the request may succeed later."""


class OutOfRangeError(MemoryManagerError):
    """What the request asks for is no longer kept."""
