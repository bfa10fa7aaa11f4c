"""docs/reference/causal-models.md is what its script makes of the installed transformers."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "reference" / "causal-models.md"


def test_the_table_is_fresh() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "causal_table.py"), "--print"]
    made = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert PAGE.read_text() == made, "run scripts/causal_table.py"
