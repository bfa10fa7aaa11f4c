"""Gets a Valkey or Redis server for tests into tests/tools/valkey, from Debian's packages.

Nothing is installed: the packages are unpacked there. A server on the PATH is taken as it is. With
`--optional` a machine that cannot have one is no error: its tests are skipped.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / "tests" / "tools" / "valkey"
SERVERS = ("valkey-server", "redis-server")
PACKAGES = (("valkey-server", "valkey-tools"), ("redis-server", "redis-tools"))
"""Debian 13 has the first, Debian 12 the second."""
LIBRARIES = ("libatomic1", "libjemalloc2", "liblzf1")
LIMIT_S = 120


def get_server() -> str:
    """Unpacks the first server that there is; why not, if there is none."""
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        return "this is no Debian: install valkey-server or redis-server"
    why = ""
    for packages in PACKAGES:
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                ["apt-get", "download", *packages, *LIBRARIES],
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=LIMIT_S,
                check=False,
            )
            if done.returncode:
                why = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "no package"
                continue
            for package in Path(folder).glob("*.deb"):
                subprocess.run(["dpkg", "-x", str(package), str(TOOLS)], check=True)
            return ""
    return f"apt-get: {why}"


def main() -> int:
    if any(shutil.which(name) or (TOOLS / "usr/bin" / name).exists() for name in SERVERS):
        return 0
    TOOLS.mkdir(parents=True, exist_ok=True)
    try:
        why = get_server()
    except (OSError, subprocess.SubprocessError) as error:
        why = str(error)
    if why:
        print(f"no Valkey server for tests: {why}")
        return 0 if "--optional" in sys.argv[1:] else 1
    print(f"a server for tests is in {TOOLS}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
