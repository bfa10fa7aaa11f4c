"""Every benchmark can be imported, and the commands of documents and of lists of jobs have flags
that it knows.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from weft.testing.docs import ROOT, pages

BENCH = ROOT / "bench"
PROGRAM = """
import contextlib, importlib, io, json, sys
from pathlib import Path

folder, commands = Path(sys.argv[1]), json.load(sys.stdin)
sys.path.insert(0, str(folder))
wrong = []
for name in sys.argv[2:]:
    try:
        harness = importlib.import_module(name).harness
    except ModuleNotFoundError as error:
        # Of a package that only this script needs.
        if error.name.split(".")[0] in ("weft", *(path.stem for path in folder.iterdir())):
            raise
        continue
    for argv in commands.get(name, []):
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said):
                harness.parse(argv)
        except SystemExit:
            wrong.append(f"{name}.py {argv}: {said.getvalue()[-200:]}")
print(json.dumps(wrong))
"""


def scripts() -> list[str]:
    """Names of all scripts that run by the harness."""
    found = (path for path in BENCH.glob("*.py") if "harness.main()" in path.read_text())
    return sorted(path.stem for path in found if path.stem != "harness")


def commands(page: Path) -> list[tuple[str, list[str]]]:
    """Commands of a page: script and flags."""
    text = page.read_text().replace("\\\n", " ")
    found = re.findall(r"bench/(\w+)\.py((?: (?:[\w.,:=+/-]+|'[^'\n]*'|\"[^\"\n]*\"))*)", text)
    return [(name, shlex.split(flags)) for name, flags in found if flags]


@pytest.mark.full
def test_scripts_know_the_flags_that_documents_and_jobs_use() -> None:
    by_name: dict[str, list[list[str]]] = {name: [] for name in scripts()}
    assert len(by_name) > 40
    for page in pages():
        for name, argv in commands(page):
            # Words after a name are prose unless a flag follows.
            if name in by_name and any(word.startswith("--") for word in argv):
                by_name[name].append(argv)
    assert sum(map(len, by_name.values())) > 15
    for path in (BENCH / "jobs").glob("*.txt"):
        for line in path.read_text().splitlines():
            words = [] if line.startswith("#") else shlex.split(line)
            script = next((word for word in words if word.startswith("bench/")), None)
            if script is not None:
                by_name[Path(script).stem].append(words[words.index(script) + 1 :])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(BENCH), *by_name],
        input=json.dumps(by_name),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == []
