"""Coding agents for the command line, unmodified and set up by the scripts in agents/.

The model is a checkpoint whose weights write given calls and texts, so that an agent's whole loop
is the same in each run: prompt, calls, results, answer, and a second question to the same session.
"""

from __future__ import annotations

import json
import os
import random
import re
import secrets
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from weft.common.settings import list_text
from weft.testing.clients.recording_proxy import Call, recording_proxy
from weft.testing.meshes.local_mesh import LocalMesh
from weft.testing.models.scripted_model import COLOURS, LOOK, Act, make_scripted, seen

SCRIPTS = Path(__file__).parent / "agents"
CONTEXT = 131_072
NOTE = "The word is\n\t“shuttle”.\n"
TIMEOUT_S = 600
pytestmark = [pytest.mark.needs("go", "agents"), pytest.mark.timeout(900)]


@dataclass(frozen=True, slots=True)
class Agent:
    command: str
    calls: Callable[[Path], tuple[str, ...]]
    """Its tools' calls that write NOTE to a path, and those that read secret.txt beside it."""
    route: str
    """What it asks the mesh for."""


def call(name: str, **arguments: Any) -> str:
    given = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"<tool_call>\n{given}\n</tool_call>"


def claude_calls(note: Path) -> tuple[str, ...]:
    read = call("Read", file_path=str(note))
    shell = call("Bash", command="cat secret.txt", description="Reads the secret")
    return call("Write", file_path=str(note), content=NOTE), f"{read}\n{shell}"


def codex_calls(note: Path) -> tuple[str, ...]:
    text = f"cat > {note} <<'END'\n{NOTE}END"
    shell = call("exec_command", cmd="cat secret.txt")
    return call("exec_command", cmd=text), f"{call('exec_command', cmd='ls')}\n{shell}"


def opencode_calls(note: Path) -> tuple[str, ...]:
    read = call("read", filePath=str(note))
    shell = call("bash", command="cat secret.txt", description="Reads the secret")
    return call("write", filePath=str(note), content=NOTE), f"{read}\n{shell}"


def qwen_calls(note: Path) -> tuple[str, ...]:
    read = call("read_file", file_path=str(note))
    shell = call("run_shell_command", command="cat secret.txt", is_background=False)
    return call("write_file", file_path=str(note), content=NOTE), f"{read}\n{shell}"


def continue_calls(note: Path) -> tuple[str, ...]:
    read = call("Read", filepath=str(note))
    shell = call("Bash", command="cat secret.txt")
    return call("Write", filepath=str(note), content=NOTE), f"{read}\n{shell}"


CHAT = "/v1/chat/completions"
AGENTS = (
    Agent("claude", claude_calls, "/v1/messages"),
    Agent("codex", codex_calls, "/v1/responses"),
    Agent("opencode", opencode_calls, CHAT),
    Agent("qwen", qwen_calls, CHAT),
    Agent("cn", continue_calls, CHAT),
)
each_agent = pytest.mark.parametrize("agent", AGENTS, ids=lambda agent: agent.command)


@dataclass(frozen=True, slots=True)
class Stage:
    """A mesh, and a folder with a secret for each agent, which its model knows as well."""

    mesh: LocalMesh
    folder: Path
    secret: str

    def place(self, agent: Agent) -> Path:
        return self.folder / agent.command


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory, rest_binary: Path) -> Iterator[Stage]:
    folder, secret = tmp_path_factory.mktemp("agents"), secrets.token_hex(8)
    acts = [Act("again", (f"Before, the secret was {secret}.",), secret)]
    for agent in AGENTS:
        (place := folder / agent.command).mkdir()
        (place / "secret.txt").write_text(secret)
        write, read = agent.calls(place / "note.txt")
        answer = f"The sécret is {secret}. 🧵"
        turns = (f"I write the nöte.\n{write}", f"I read both.\n{read}", answer)
        acts.append(Act(agent.command, turns, secret))
    models = [
        make_scripted(folder / name, acts, size)
        for name, size in (("scripted", CONTEXT), ("scripted-8k", 8192))
    ]
    flags = ["--prefill", "0", "--kv-memory-bytes", str(128 << 20)]
    for model in models:
        flags += ["--model", list_text([str(model)]), "--model-name", model.name]
    mesh = LocalMesh(folder, *flags)
    mesh.wait_ready()
    mesh.wait_healthy()  # the workers of both models
    yield Stage(mesh, folder, secret)
    assert mesh.stop() == 0, mesh.text


def claude_looks(picture: Path) -> str:
    return call("Read", file_path=str(picture))


def codex_looks(picture: Path) -> str:
    return call("view_image", path=str(picture))


def opencode_looks(picture: Path) -> str:
    return call("read", filePath=str(picture))


def qwen_looks(picture: Path) -> str:
    return call("read_file", file_path=str(picture))


LOOKS = {
    "claude": claude_looks,
    "codex": codex_looks,
    "opencode": opencode_looks,
    "qwen": qwen_looks,
}
"""Calls of tools that show the model a picture; `cn` has none."""


@pytest.fixture(scope="module")
def gallery(tmp_path_factory: pytest.TempPathFactory, rest_binary: Path) -> Iterator[Stage]:
    """A mesh with a model that looks, and for each agent a screenshot of one colour, which is the
    secret.
    """
    folder, colour = tmp_path_factory.mktemp("gallery"), random.choice(list(COLOURS))
    acts = list[Act]()
    for agent in AGENTS:
        if agent.command in LOOKS:
            (place := folder / agent.command).mkdir()
            picture = place / "screenshot.png"
            Image.new("RGB", (320, 200), COLOURS[colour]).save(picture)
            turns = (f"I take a look.\n{LOOKS[agent.command](picture)}", LOOK)
            acts.append(Act(agent.command, turns, "<image>"))
    model = make_scripted(folder / "seeing", acts, CONTEXT, looks=True)
    flags = ["--prefill", "0", "--kv-memory-bytes", str(256 << 20)]
    mesh = LocalMesh(folder, *flags, "--model", list_text([str(model)]), "--model-name", model.name)
    mesh.wait_ready()
    yield Stage(mesh, folder, colour)
    assert mesh.stop() == 0, mesh.text


def run(
    agent: Agent,
    stage: Stage,
    home: Path,
    model: str,
    *,
    num_commands: int = 2,
    **variables: str,
) -> tuple[subprocess.CompletedProcess[str], list[Call]]:
    """Runs an agent's script, up to some of its commands, with nothing of this machine's settings.

    Returns:
        Its exit status and output, and what it asked the mesh for.
    """
    lines = (SCRIPTS / f"{agent.command}.sh").read_text().splitlines()
    script = "\n".join(["set -e", *lines[: len(lines) - 2 + num_commands]])
    # The agents' commands, and Node.js in a version that they take.
    path = f"{SCRIPTS / 'node_modules' / '.bin'}:{os.environ['PATH']}"
    environment = {"HOME": str(home), "PATH": path, "NO_PROXY": "127.0.0.1", "LANG": "C.UTF-8"}
    with recording_proxy(stage.mesh.url) as proxy:
        variables |= {"WEFT_URL": proxy.url, "WEFT_MODEL": model, "CONTEXT": str(CONTEXT)}
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=stage.place(agent),
            env={**environment, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            timeout=TIMEOUT_S,
        )
    return done, [one for one in proxy.calls if one.path.startswith(agent.route)]


@each_agent
def test_an_agent_calls_tools_answers_and_resumes(
    agent: Agent, stage: Stage, tmp_path: Path
) -> None:
    task, question = f"[{agent.command}] Begin.", "[again] What was it?"
    done, calls = run(agent, stage, tmp_path, "scripted", TASK=task, QUESTION=question)
    assert done.returncode == 0, done.stdout
    assert (stage.place(agent) / "note.txt").read_text().rstrip("\n") == NOTE.rstrip("\n")
    answer, resumed = f"The sécret is {stage.secret}. 🧵", f"Before, the secret was {stage.secret}."
    assert done.stdout.index(answer) < done.stdout.index(resumed)
    assert {one.status for one in calls} == {200}, calls
    turns = [one for one in calls if one.body.get("tools")]
    assert len(turns) >= 4, done.stdout  # writes, reads, answers; answers again
    assert all(one.body["stream"] for one in turns)


@each_agent
def test_an_agent_ends_and_says_so_where_its_prompt_does_not_fit(
    agent: Agent, stage: Stage, tmp_path: Path
) -> None:
    task = f"[{agent.command}] " + "warp weft heddle reed " * 2500
    done, calls = run(
        agent, stage, tmp_path, "scripted-8k", num_commands=1, TASK=task, COMPACTION="false"
    )
    assert re.search(r"context|too long", done.stdout), done.stdout
    refused = [one for one in calls if one.body.get("tools")]
    assert {one.status for one in refused} == {400}, done.stdout
    assert len(refused) <= 8, done.stdout


@pytest.mark.parametrize(
    "agent", [one for one in AGENTS if one.command in LOOKS], ids=lambda agent: agent.command
)
def test_an_agent_looks_at_a_screenshot(agent: Agent, gallery: Stage, tmp_path: Path) -> None:
    """A tool reads a file, and its result is an image, whose colour the model says."""
    task = f"[{agent.command}] Begin."
    done, calls = run(agent, gallery, tmp_path, "seeing", num_commands=1, TASK=task)
    assert done.returncode == 0, done.stdout
    assert seen(gallery.secret) in done.stdout
    assert {one.status for one in calls} == {200}, calls
