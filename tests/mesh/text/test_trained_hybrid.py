"""The small trained hybrid behind the whole mesh, with drafts of its MTP head."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from weft.testing.meshes.local_mesh import LocalMesh
from weft.testing.meshes.mesh_calls import PAGE_SIZE, Ask, Caller, new_salt
from weft.testing.meshes.mesh_kinds import PATIENT
from weft.testing.meshes.mesh_prompts import MeshPrompt
from weft.testing.meshes.tiny_mesh import Greedy
from weft.testing.models.choices import OF_STATES

pytestmark = [pytest.mark.needs("go"), pytest.mark.full]

MODEL = Path(__file__).parents[3] / "models" / "tales-10m"
NUM_NEW, NUM_PROMPTS = 48, 4
WHO = ("a brave mouse", "a tired king", "a lonely robot", "a wise owl", "a young sailor")
DID = ("finds a golden key", "loses a red hat", "builds a boat", "hears a strange song")


class TrainedMesh(LocalMesh):
    """`weft up` over the model."""

    model = MODEL.name


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory, rest_binary: Path) -> Iterator[LocalMesh]:
    mesh = TrainedMesh(
        tmp_path_factory.mktemp("mesh"),
        *("--model", str(MODEL), "--dtype", "float32", "--local-prefill-max-tokens", "0"),
        *("--kv-memory-bytes", str(256 << 20), "--drafter", "mtp"),
        *("--decode-args", f"{PATIENT} --draft-gate fixed --max-draft-tokens 2"),
    )
    with mesh.serving():
        yield mesh


@pytest.fixture(scope="module")
def greedy(tmp_path_factory: pytest.TempPathFactory) -> Greedy:
    """Transformers' model of the same weights in floats."""
    folder = tmp_path_factory.mktemp("floats")
    shutil.copy(MODEL / "tokenizer.json", folder)
    config = json.loads((MODEL / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(MODEL / "model.safetensors")
    scales = {name: tensors.pop(name) for name in list(tensors) if name.endswith("_scale")}
    floats = {
        name: tensor.float() * scales.get(f"{name}_scale", 1.0) for name, tensor in tensors.items()
    }
    save_file(floats, folder / "model.safetensors", {"format": "pt"})
    return Greedy(folder, OF_STATES)


async def test_stories_are_drafted_and_gone_on_with(mesh: LocalMesh, greedy: Greedy) -> None:
    """Tokens are transformers', many drafts are right, and a second turn continues in
    the first one's states.
    """
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    drafted = accepted = 0
    async with Caller(mesh) as caller:
        for _ in range(NUM_PROMPTS):
            asked = f"Write a short story about {random.choice(WHO)} who {random.choice(DID)}."
            salt, messages, first = new_salt(), (("user", asked),), 0
            for turn in range(2):
                prompt = MeshPrompt("story", messages=messages)
                ask = Ask(prompt, NUM_NEW, salt, ignore_eos=True)
                answer = await caller.grpc(ask)
                text = "".join(f"<|im_start|>{role}\n{said}<|im_end|>\n" for role, said in messages)
                ids = tokenizer.encode(f"{text}<|im_start|>assistant\n").ids
                assert answer.prompt_tokens == len(ids)
                assert answer.token_ids is not None
                greedy.check(ids, answer.token_ids, NUM_NEW)
                drafted += answer.timeline.drafted_tokens
                accepted += answer.timeline.accepted_tokens
                first = first or len(ids)
                if turn:
                    assert answer.cached_tokens >= (first - 1) // PAGE_SIZE * PAGE_SIZE
                messages = (*messages, ("assistant", answer.text), ("user", "What then?"))
    assert accepted > 0.4 * drafted > 0
