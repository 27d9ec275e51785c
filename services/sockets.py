"""Where a process listens."""

import socket

from services.config import ConfigError


def bind(option: str, host: str, port: int) -> socket.socket:
    """A TCP socket on an address of either family. Raises ConfigError naming the option."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # With the protocol named, accepted sockets get TCP_NODELAY from asyncio; otherwise they do not.
        listener = socket.socket(family, kind, socket.IPPROTO_TCP)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except OSError as error:
        raise ConfigError(f"{option}={port}: cannot listen on {host}:{port}: {error.strerror}") from error
    return listener
