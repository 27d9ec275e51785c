"""Why a command failed."""


class CommandError(Exception):
    """A command cannot do what it should; the message is one sentence for people."""


class StartError(CommandError):
    """A process cannot start or did not get ready."""
