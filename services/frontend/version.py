"""The version of the running server."""

import importlib.metadata


def server_version() -> str:
    try:
        return importlib.metadata.version("nexuskv")
    except importlib.metadata.PackageNotFoundError:  # run from a source tree without installation
        return "unknown"
