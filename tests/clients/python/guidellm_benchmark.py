"""GuideLLM's command against the chat API."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from settings import URL

with tempfile.TemporaryDirectory() as folder:
    command = [
        *(str(Path(sys.executable).with_name("guidellm")), "benchmark", "run", "--target", URL),
        *("--profile", "concurrent", "--rate", "2", "--max-requests", "6"),
        *("--processor", os.environ["WEFT_TEST_MODEL_DIR"]),
        *("--data", "prompt_tokens=48,output_tokens=12", "--output-dir", folder),
        *("--outputs", "json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (report,) = Path(folder).glob("*.json")
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals["successful"] >= 6, totals
    assert totals["errored"] == 0, totals
