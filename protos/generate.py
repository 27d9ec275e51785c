"""Generates the stubs from the protos, into the folder given as argument (`make protos`)."""

import subprocess
import sys
from pathlib import Path

PROTOS = Path(__file__).resolve().parent
STUBS = PROTOS / "nexuskv" / "v1"


def generate(out: Path) -> None:
    plugins = Path(sys.executable).parent
    subprocess.run(
        [
            sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTOS}",
            f"--python_out={out}", f"--grpc_python_out={out}",
            f"--plugin=protoc-gen-mypy={plugins / 'protoc-gen-mypy'}",
            f"--plugin=protoc-gen-mypy_grpc={plugins / 'protoc-gen-mypy_grpc'}",
            f"--mypy_out=quiet:{out}", f"--mypy_grpc_out=quiet:{out}",
            *(str(path) for path in sorted(STUBS.glob("*.proto"))),
        ],
        check=True,
    )  # fmt: skip


if __name__ == "__main__":
    generate(Path(sys.argv[1]))
