"""docs/reference/combinations.md is what the checks answer now."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "reference" / "combinations.md"


def test_every_cell_is_what_the_checks_answer_and_every_refusal_says_what_to_do() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "combinations_table.py"), "--print"]
    made = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert PAGE.read_text() == made, "run scripts/combinations_table.py"
    rows = [line.split(" | ")[1:] for line in made.splitlines() if line.startswith("| ")]
    cells = {cell.rstrip(" |") for row in rows for cell in row}
    refusals = set(re.findall(r"^([0-9]+)[.] [a-zA-Z]", made, flags=re.MULTILINE))
    assert refusals == {cell for cell in cells if cell.isdigit()}
