"""A gateway behind the Go edge, whose worker answers with a text that the test sets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from weft.testing.services.fake_decode import Script
from weft.testing.services.gateway_harness import MODEL, Harness, gateway
from weft.testing.services.processes import ServiceProcess
from weft.v1 import decode_pb2

TEMPLATE = (
    "{% if tools %}tools:{% for t in tools %}{{ t | tojson }}{{ '\\n' }}{% endfor %}{% endif %}"
    "{% if enable_thinking is defined %}thinking:{{ enable_thinking }}{{ '\\n' }}{% endif %}"
    "{% for m in messages %}{{ m.role }}: "
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }} "
    "{{ c.function.arguments | tojson }} {{ c.id }}</tool_call>{% endfor %}"
    "{% if m.tool_call_id %} #{{ m.tool_call_id }}{% endif %}"
    "{% if not loop.last or add_generation_prompt %}{{ '\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}{# </think> #}"
)
"""Shows everything that a conversation may have; the model is one that reasons."""


class DialectEdge:
    """Everything from the edge down to the scripted worker."""

    def __init__(self) -> None:
        self.text = "Weft answers."
        """What the model says."""
        self.is_cut = False
        """Whether it goes on until it is stopped, without an end."""
        self.chunk = 1
        """Tokens of a step."""
        self.break_after = 10**9
        """Steps after which the worker's Session is cut."""
        self.hang_after = 10**9
        """Steps after which nothing more comes."""
        self.url = ""
        self.mesh: Harness
        self.http: httpx.AsyncClient
        self.process: ServiceProcess

    def script(self, submit: decode_pb2.Submit, prompt: list[int]) -> Script:
        """The worker's script."""
        ids = self.mesh.ids(self.text)
        return Script(
            tokens=[ids if self.is_cut else [*ids, self.mesh.end]],
            chunk=self.chunk,
            break_after=self.break_after,
            hang_after=self.hang_after,
            top_logprobs=1 if submit.HasField("logprobs") else None,
        )

    @property
    def submit(self) -> decode_pb2.Submit:
        """What the worker was given last."""
        return self.mesh.workers[0].submits[-1]

    @property
    def prompt(self) -> str:
        """The last prompt's text."""
        ids = self.mesh.workers[0].prompts[-1]
        return str(self.mesh.tokenizer.decode(ids, skip_special_tokens=False))

    async def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        """Sends JSON."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.http.post(f"{self.url}{path}", json=body, headers=named)


@asynccontextmanager
async def dialect_edge(
    rest_binary: Path,
    folder: Path,
    *,
    template: str = TEMPLATE,
    edge_flags: tuple[str, ...] = (),
    **settings: Any,
) -> AsyncIterator[DialectEdge]:
    """Starts a worker, a gateway and an edge."""
    edge = DialectEdge()
    (folder / MODEL).mkdir(parents=True, exist_ok=True)
    if template:
        (folder / MODEL / "chat_template.jinja").write_text(template)
    async with gateway(folder, edge.script, max_context_tokens=4096, **settings) as edge.mesh:
        command = [str(rest_binary), "--listen", "127.0.0.1:0", *edge_flags]
        command += ["--backend", edge.mesh.app.server.address]
        with ServiceProcess("rest", command, folder) as edge.process:
            edge.url = f"http://{(await edge.process.ready())['address']}"
            async with httpx.AsyncClient(timeout=60, trust_env=False) as edge.http:
                yield edge
