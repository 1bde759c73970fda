"""Generates the protobuf and gRPC stubs of protos/pdserve/v1 into pdserve/v1 (called by ``make proto``).

The output is committed, so that nobody needs the compiler to run pdserve; ``--check`` fails when it is stale.
"""

from __future__ import annotations

import filecmp
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTOS = sorted((ROOT / "protos" / "pdserve" / "v1").glob("*.proto"))


def generate(out: Path) -> None:
    """Compile every proto into ``out``; one compiler run, so that imports between them resolve."""
    scripts = Path(sys.executable).parent
    command = [
        sys.executable, "-m", "grpc_tools.protoc",
        f"--plugin=protoc-gen-mypy={scripts / 'protoc-gen-mypy'}",
        f"--plugin=protoc-gen-mypy_grpc={scripts / 'protoc-gen-mypy_grpc'}",
        f"--proto_path={ROOT / 'protos'}",
        f"--python_out={out}", f"--grpc_python_out={out}",
        f"--mypy_out=quiet:{out}", f"--mypy_grpc_out=quiet:{out}",
        *(str(path.relative_to(ROOT / "protos")) for path in PROTOS),
    ]  # fmt: skip
    subprocess.run(command, check=True, timeout=120)
    for grpc_file in (out / "pdserve" / "v1").glob("*_pb2_grpc.py"):
        if "Stub" not in grpc_file.read_text():  # a file of messages only
            grpc_file.unlink()
            grpc_file.with_suffix(".pyi").unlink(missing_ok=True)


def main() -> int:
    if "--check" not in sys.argv[1:]:
        generate(ROOT)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        fresh = Path(folder) / "pdserve" / "v1"
        stale = [
            path.name
            for path in sorted(fresh.iterdir())
            if not (ROOT / "pdserve" / "v1" / path.name).exists()
            or not filecmp.cmp(path, ROOT / "pdserve" / "v1" / path.name, shallow=False)
        ]
    if stale:
        print(f"stale: {', '.join(stale)}; run `make proto` and commit", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
