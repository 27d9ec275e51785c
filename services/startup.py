"""Why a process could not start."""


class StartError(Exception):
    """A process cannot start or did not get ready; the message is one sentence for people."""
