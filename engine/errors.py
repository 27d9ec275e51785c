"""Exceptions of the engine."""


class EngineError(Exception):
    """Base of everything the engine raises on purpose; the message is for people."""


class ModelError(EngineError):
    """A model cannot be found, read or served; the message names the file or tensor."""


class DeviceError(ModelError):
    """The device asked for cannot compute: it is not there, too old, or its driver failed."""


class RequestError(EngineError):
    """A request asks for something the engine cannot serve."""


class TooLargeError(RequestError):
    """A request can never fit the KV pool."""


class QueueFullError(RequestError):
    """As many requests wait as are allowed to."""


class MemoryManagerError(EngineError):
    """The memory manager refused a call in a way the engine cannot mend."""


class StaleEpochError(MemoryManagerError):
    """The memory manager does not know the engine's epoch: register again, every sequence is preempted."""
