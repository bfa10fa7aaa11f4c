"""GuideLLM's command against the chat API."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from settings import URL

with tempfile.TemporaryDirectory() as folder:
    report = Path(folder) / "report.json"
    command = [
        *(str(Path(sys.executable).with_name("guidellm")), "run"),
        *("--backend", f"kind=openai_http,target={URL}"),
        *("--profile", "kind=concurrent,streams=2"),
        *("--constraint", "kind=max_requests,count=6"),
        *("--tokenizer", f"kind=hf_auto,model={os.environ['WEFT_TEST_MODEL_DIR']}"),
        *("--data", "kind=synthetic_text,prompt_tokens=48,output_tokens=12"),
        *("--output", f"kind=json,path={report}", "--disable-console"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals["successful"] >= 6, totals
    assert totals["errored"] == 0, totals
