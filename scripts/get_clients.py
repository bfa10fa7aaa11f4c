"""Installs the clients that tests/clients runs: Python ones in .venv-clients, others by npm.

    python scripts/get_clients.py [--load] [--agents] [--trainers] [--optional]

With --load also load generators, which bring torch; with --agents also coding agents, which are
programs of 1.5 GB. With --trainers it installs TRL alone, which brings torch, in .venv-trainers.
With --optional a failure is a message: the tests of what is missing are skipped.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CLIENTS = ROOT / "tests" / "clients"
VENV, TRAINERS = ROOT / ".venv-clients", ROOT / ".venv-trainers"
UV = Path(sys.executable).with_name("uv")


def is_fresh(mark: Path, *sources: Path) -> bool:
    """Whether a mark is newer than the lists that it stands for."""
    return mark.exists() and all(mark.stat().st_mtime > one.stat().st_mtime for one in sources)


def get_python(venv: Path, *lists: Path) -> None:
    """Installs the packages of some lists, and leaves a mark for each: tests look for it."""
    marks = [venv / f".{one.stem}" for one in lists]
    if all(is_fresh(mark, *lists) for mark in marks):
        return
    if not (venv / "bin" / "python").exists():
        subprocess.run([UV, "venv", "--python", sys.executable, venv], check=True)
    flags = [flag for one in lists for flag in ("-r", str(one))]
    python = venv / "bin" / "python"
    subprocess.run([UV, "pip", "install", "--quiet", "--python", python, *flags], check=True)
    for mark in marks:
        mark.touch()


def get_node(folder: Path) -> None:
    """Installs what a folder's package.json lists."""
    npm = shutil.which("npm")
    if npm is None:
        print(f"no `npm` on the PATH: the tests of {folder.name} by npm are skipped")
        return
    mark = folder / "node_modules" / ".done"
    if is_fresh(mark, folder / "package.json"):
        return
    command = [npm, "install", "--no-audit", "--no-fund", "--no-package-lock", "--silent"]
    subprocess.run(command, cwd=folder, check=True)
    mark.touch()


def main() -> int:
    """Installs; the exit status is 1 if something failed that is not optional."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--load", action="store_true", help="load generators as well")
    parser.add_argument("--agents", action="store_true", help="coding agents as well")
    parser.add_argument("--trainers", action="store_true", help="trainers alone")
    parser.add_argument("--optional", action="store_true", help="a failure is only a message")
    arguments = parser.parse_args()
    lists = [CLIENTS / "requirements.txt"]
    if arguments.load:
        lists.append(CLIENTS / "requirements-load.txt")
    try:
        if arguments.trainers:
            get_python(TRAINERS, CLIENTS / "requirements-trainers.txt")
            return 0
        get_python(VENV, *lists)
        get_node(CLIENTS)
        if arguments.agents:
            get_node(CLIENTS / "agents")
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"clients of tests/clients are not all installed: {error}")
        return 0 if arguments.optional else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
