"""AIPerf's command against the chat API."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from settings import MODEL, URL

with tempfile.TemporaryDirectory() as folder:
    command = [
        *(str(Path(sys.executable).with_name("aiperf")), "profile", "--model", MODEL, "--url", URL),
        *("--endpoint-type", "chat", "--streaming", "--request-count", "6", "--concurrency", "2"),
        *("--tokenizer", os.environ["WEFT_TEST_MODEL_DIR"], "--output-artifact-dir", folder),
        *("--synthetic-input-tokens-mean", "48", "--output-tokens-mean", "12", "--ui", "none"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert list(Path(folder).rglob("profile_export*.json*")), done.stdout[-3000:]
