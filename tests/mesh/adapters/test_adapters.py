"""Adapters in a real mesh: PEFT's texts, loads, replacements and unloads while streams run."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from weft.checkpoint.adapters.files import DRAFT_FOLDER
from weft.testing.meshes.local_mesh import WEFT, wait_until
from weft.testing.meshes.mesh_adapters import (
    TIMEOUT_S,
    copies,
    listed,
    load,
    post,
    serving,
    unload,
    wait_held,
)
from weft.testing.meshes.mesh_kinds import PATIENT
from weft.testing.meshes.mesh_peft import Peft
from weft.testing.meshes.metric_names import documented
from weft.testing.meshes.storm_checks import Scale, room_flags, weather
from weft.testing.meshes.tiny_mesh import MODEL, SHAPE, VOCAB, TinyMesh
from weft.testing.models.tiny_adapters import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    make_adapter,
    make_leaning_adapter,
)
from weft.testing.models.tiny_drafts import make_draft_adapter, make_tiny_draft
from weft.testing.models.tiny_models import make_tiny, tiny_config
from weft.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc

pytestmark = [pytest.mark.needs("go"), pytest.mark.timeout(600)]

NUM_PROMPT, NUM_NEW, NUM_LONG, PAGE = 100, 10, 400, 16
NUM_TRIES = 10
RANKS = {"first": 8, "second": 20, "third": 3}
STORM = Scale(
    names=32,
    contents=40,
    max_loras=4,
    host_adapters=13,
    clients=6,
    operators=2,
    seconds=3.0,
)
WORKERS = ("prefill-0", "decode-0", "decode-1")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    config = tiny_config("llama", **SHAPE)
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    for number, (name, rank) in enumerate(RANKS.items()):
        make_adapter(folder / name, config, seed + number, rank=rank, spread=0.3)
    # For any head of the mesh's shape.
    target = make_tiny("llama", folder.parent / "target", **SHAPE)
    head = make_tiny_draft(
        folder.parent / "head", target, eagle_aux_hidden_state_layer_ids=[0, 0, 0]
    )
    make_draft_adapter(folder / "first" / DRAFT_FOLDER, head, seed)
    return folder


@pytest.fixture(scope="module")
def mesh(
    tmp_path_factory: pytest.TempPathFactory, root: Path, rest_binary: Path, pytestconfig: Any
) -> Iterator[TinyMesh]:
    room = room_flags(STORM, tmp_path_factory.mktemp("probe"))
    # With --full drafts are verified whether they pay or not, which takes everything longer.
    drafts = "--draft-width 4 --draft-gate fixed" if pytestconfig.getoption("--full") else ""
    mesh = TinyMesh(
        tmp_path_factory.mktemp("mesh"),
        f"--decode-args={room} {drafts} {PATIENT}",
        f"--prefill-args={room}",
        *("--decode", "2", "--adapter-root", str(root), "--adapter", "first=first"),
        *("--adapter", f"second={root / 'second'}", "--local-prefill-max-tokens", "0"),
        *("--gateway-args", "--decode-policy round_robin --adapter-linger-s 0.3"),
        *("--drafter", "eagle3"),
        max_context_tokens=4096,
        has_draft=True,
        draft_vocab_size=4,
    )
    wait_until(lambda: has_started(mesh), 180, lambda: mesh.text)
    yield mesh
    assert mesh.stop() == 0, mesh.text


def has_started(mesh: TinyMesh) -> bool:
    """With its adapters: what `weft up` prints comes behind them."""
    assert mesh.process.poll() is None, mesh.text
    return "Weft is ready" in mesh.text


@pytest.fixture(scope="module")
def peft(mesh: TinyMesh, root: Path) -> Peft:
    return Peft(mesh.model_dir, root, list(RANKS), NUM_NEW)


@pytest.fixture(autouse=True)
def no_adapter_outlives_its_test(mesh: TinyMesh) -> Iterator[None]:
    yield
    for name in serving(mesh).keys() - {"first", "second"}:
        unload(mesh, name)


def prompt_of(length: int = NUM_PROMPT) -> list[int]:
    return [random.randrange(3, VOCAB) for _ in range(length)]


def body_of(model: str, prompt: list[int], num_new: int) -> dict[str, object]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": num_new,
        "temperature": 0,
        "ignore_eos": True,
        "weft_timeline": True,
    }


def ask(mesh: TinyMesh, model: str, prompt: list[int], num_new: int = NUM_NEW) -> dict[str, Any]:
    answer = post(mesh, "/v1/completions", body_of(model, prompt, num_new))
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["text"])


@dataclass(slots=True)
class Stream:
    """One long answer, as it comes."""

    request_id: str = ""
    text: str = ""
    ids: list[int] = field(default_factory=list)
    error: str = ""
    worker_id: str = ""
    num_lost: int = 0
    num_trees: int = 0
    """Steps that verified trees, of the attempt that came to the end."""
    num_accepted: int = 0
    """Drafts, of that attempt."""


GREEDY = common_pb2.SamplingParams(temperature=0)


def stream(
    mesh: TinyMesh,
    model: str,
    prompt: list[int],
    seen: Stream,
    sampling: common_pb2.SamplingParams = GREEDY,
) -> Stream:
    """Follows an answer over gRPC to its end."""
    request = gateway_pb2.CompleteRequest(
        model=model,
        token_ids=common_pb2.TokenIds(ids=prompt),
        sampling=sampling,
        stop=common_pb2.StopCriteria(max_tokens=NUM_LONG, ignore_eos=True),
        stream=True,
    )
    with grpc.insecure_channel(mesh.grpc_address) as channel:
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        try:
            for message in stub.Complete(request, timeout=TIMEOUT_S):
                seen.request_id = message.request_id
                for choice in message.choices:
                    seen.text += choice.text
                    seen.ids += choice.token_ids
                if message.HasField("timeline"):
                    seen.worker_id = message.timeline.worker_id
                    seen.num_lost = len(message.timeline.lost_attempts)
                    seen.num_trees = message.timeline.tree_steps
                    seen.num_accepted = message.timeline.accepted_tokens
        except grpc.RpcError as error:
            seen.error = str(error.details())
    return seen


class Streams:
    """Long answers that run beside the test."""

    def __init__(self, mesh: TinyMesh, pool: ThreadPoolExecutor) -> None:
        self._mesh = mesh
        self._pool = pool
        self._open: list[tuple[str, list[int], Stream, Future[Stream]]] = []

    def start(self, model: str, count: int) -> None:
        """Starts some and returns when each has brought text."""
        for _ in range(count):
            prompt, seen = prompt_of(), Stream()
            done = self._pool.submit(stream, self._mesh, model, prompt, seen)
            self._open.append((model, prompt, seen, done))
        wait_until(lambda: all(seen.text or seen.error for _, _, seen, _ in self._open), 60)

    @property
    def request_ids(self) -> set[str]:
        return {seen.request_id for _, _, seen, _ in self._open}

    def check(self, peft: Peft, meaning: str) -> list[Stream]:
        """All have ended, with the text of the adapter that their name meant."""
        for _, prompt, _, done in self._open:
            seen = done.result(TIMEOUT_S)
            assert not seen.error
            peft.check_text(meaning, prompt, seen.ids, seen.text, NUM_LONG)
        return [done.result() for *_, done in self._open]


@pytest.fixture
def streams(mesh: TinyMesh) -> Iterator[Streams]:
    with ThreadPoolExecutor(8) as pool:
        yield Streams(mesh, pool)


def weft(mesh: TinyMesh, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command on this mesh."""
    return subprocess.run(
        [*WEFT, *arguments, "--address", mesh.grpc_address],
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        env={**os.environ, "NO_COLOR": "1", "COLUMNS": "200"},
    )


@pytest.mark.full_after(1)
@pytest.mark.parametrize("face", ["rest", "grpc"])
def test_texts_are_pefts_in_one_batch(mesh: TinyMesh, peft: Peft, face: str) -> None:
    """With prompts that a prefill worker has filled, of two adapters and of none, all at once."""
    models = ["first", "", "second", f"{MODEL}:first", "", "second", "first", "second"]
    meant = [model.rpartition(":")[2] for model in models]
    prompts = [
        peft.prompt(random.randrange(2 * PAGE, NUM_PROMPT), ("", adapter)) for adapter in meant
    ]
    with ThreadPoolExecutor(len(models)) as pool:
        if face == "rest":
            answers = list(
                pool.map(lambda model, ids: ask(mesh, model or MODEL, ids), models, prompts)
            )
            for answer in answers:
                assert "FILL_SOURCE_PREFILL" in {
                    fill["source"] for fill in answer["weft"]["timeline"]["fills"]
                }
            texts = [text_of(answer) for answer in answers]
        else:
            texts = list(
                pool.map(partial(complete, mesh), [model or MODEL for model in models], prompts)
            )
    expected = [peft.answer(name, ids) for name, ids in zip(meant, prompts, strict=True)]
    assert texts == expected
    base = [peft.answer("", ids) for ids in prompts]
    changed = [text for text, plain, name in zip(texts, base, meant, strict=True) if name]
    assert changed != [plain for plain, name in zip(base, meant, strict=True) if name]


def complete(mesh: TinyMesh, model: str, prompt: list[int]) -> str:
    with grpc.insecure_channel(mesh.grpc_address) as channel:
        request = gateway_pb2.CompleteRequest(
            model=model,
            token_ids=common_pb2.TokenIds(ids=prompt),
            sampling=common_pb2.SamplingParams(temperature=0),
            stop=common_pb2.StopCriteria(max_tokens=NUM_NEW, ignore_eos=True),
        )
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        (message,) = stub.Complete(request, timeout=TIMEOUT_S)
        return str(message.choices[0].text)


def test_drafts_of_an_adapter_are_its_own(mesh: TinyMesh) -> None:
    """Its texts are those of the test before; a prefill worker drafts nothing."""
    if os.environ.get("WEFT_UP_DEVICE", "cpu") != "cpu":
        pytest.skip("on GPUs a draft adapter lies in the places of the one that brought it")
    for worker in WORKERS:
        expected = 1 if worker.startswith("decode") else None
        wait_until(lambda w=worker, e=expected: sizes(mesh, w).get("draft_adapters") == e, 30)


def test_metrics_count_reads_and_writes(mesh: TinyMesh) -> None:
    listed = {one.name for one in documented()["Prefill and decode workers"]}
    for worker in WORKERS:
        address = mesh.service(worker)["metrics_address"]
        text = httpx.get(f"http://{address}/metrics", timeout=30, trust_env=False).text
        for name in ("reads", "writes", "evictions"):
            metric = f"weft_engine_adapter_{name}_total"
            (line,) = (line for line in text.splitlines() if line.startswith(metric))
            assert metric in listed
            assert (float(line.split()[1]) >= 2) == (name != "evictions")


def sizes(mesh: TinyMesh, worker: str) -> dict[str, int]:
    """What its engine holds."""
    return dict(mesh.dump(worker)["engine"]["sizes"])


def test_one_prompt_has_other_pages_with_each_adapter(mesh: TinyMesh, peft: Peft) -> None:
    """What one has cached, here or in a prefill worker, is no hit for another."""
    prompt = peft.prompt(NUM_PROMPT, ("first", "second", ""))
    for model in ("first", "", "second", "", "first", "second"):
        for _ in range(2):  # decode workers take turns
            assert text_of(ask(mesh, model or MODEL, prompt)) == peft.answer(model, prompt)


def test_the_command_line_shows_what_is_loaded(mesh: TinyMesh) -> None:
    assert serving(mesh).keys() == {"first", "second"}
    told = json.loads(weft(mesh, "adapter", "list", "--json").stdout)["adapters"]
    assert {one["adapter"]["name"]: one["adapter"]["digest"] for one in told} == serving(mesh)
    table = weft(mesh, "adapter", "list").stdout
    for name in ("first", "second"):
        assert any(line.split()[:3] == [name, MODEL, "serving"] for line in table.splitlines())
    status = weft(mesh, "status").stdout
    rows = [line.split()[:2] for line in status.splitlines()]
    for worker in WORKERS:
        assert [worker, "first"] in rows
        assert [worker, "second"] in rows
    models = httpx.get(f"{mesh.url}/v1/models", timeout=30, trust_env=False).json()["data"]
    assert {(one["id"], one["parent"]) for one in models} == {
        (MODEL, None),
        ("first", MODEL),
        ("second", MODEL),
    }


def test_a_load_and_an_unload_while_streams_run(
    mesh: TinyMesh, peft: Peft, streams: Streams
) -> None:
    assert unload(mesh, "third").status_code == 404
    before = serving(mesh)
    streams.start("first", 3)
    done = weft(mesh, "adapter", "load", "third", "third")
    assert done.returncode == 0, done.stderr
    for name in WORKERS:
        assert name in done.stdout
    prompt = peft.prompt(NUM_PROMPT, ("third",))
    assert text_of(ask(mesh, "third", prompt)) == peft.answer("third", prompt)
    long = Streams(mesh, streams._pool)
    long.start("third", 2)
    done = weft(mesh, "adapter", "unload", "third")
    assert done.returncode == 0, done.stderr
    under_way = set(mesh.dump("gateway")["requests"])
    assert not long.request_ids & under_way, "it waits for the requests under way"
    long.check(peft, "third")
    gone = post(mesh, "/v1/completions", body_of("third", prompt, NUM_NEW))
    assert gone.status_code == 404
    assert "`first`" in gone.json()["error"]["message"]
    wait_held(mesh, WORKERS, list(before.values()))
    streams.check(peft, "first")


def test_a_lenient_load_lists_what_it_leaves_out(mesh: TinyMesh, root: Path) -> None:
    folder = shutil.copytree(root / "third", root / "with-norm")
    extra = "base_model.model.model.norm.weight"
    tensors = load_file(folder / WEIGHTS_FILE) | {extra: torch.ones(64)}
    save_file(tensors, folder / WEIGHTS_FILE)
    try:
        refused = weft(mesh, "adapter", "load", "lenient", "with-norm")
        assert refused.returncode == 1
        assert extra in refused.stderr
        done = weft(mesh, "adapter", "load", "lenient", "with-norm", "--lenient")
        assert done.returncode == 0, done.stderr
        assert f"left out: {extra}" in done.stdout
        assert unload(mesh, "lenient").status_code == 200
    finally:
        shutil.rmtree(folder)


def test_a_replacement_while_streams_run(
    mesh: TinyMesh, peft: Peft, root: Path, streams: Streams
) -> None:
    assert load(mesh, "name", "third").status_code == 200
    old = serving(mesh)["name"]
    streams.start("name", 4)
    refused = load(mesh, "name", "second")
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "adapter_exists"
    assert load(mesh, "name", "second", load_inplace=True).status_code == 200
    after = Streams(mesh, streams._pool)
    after.start("name", 2)
    streams.check(peft, "third")
    after.check(peft, "second")
    meant = serving(mesh)
    assert meant["name"] == meant["second"] != old, "the same content"
    wait_held(mesh, WORKERS, list(set(meant.values())))
    assert unload(mesh, "name").status_code == 200
    prompt = peft.prompt(NUM_PROMPT, ("second",))
    assert text_of(ask(mesh, "second", prompt)) == peft.answer("second", prompt)


def test_a_stream_that_loses_its_worker_keeps_its_adapter(
    mesh: TinyMesh, peft: Peft, streams: Streams
) -> None:
    for _ in range(NUM_TRIES):
        streams.start("first", 4)
        kill(mesh, "decode-0")
        seen = streams.check(peft, "first")
        mesh.wait_healthy()
        if any(one.num_lost for one in seen):
            break
    else:
        raise AssertionError(f"{NUM_TRIES} times the kill came too late to show anything")
    wait_held(mesh, WORKERS, list(set(serving(mesh).values())))


@pytest.mark.full
def test_drafts_in_trees_change_no_text_through_a_kill(mesh: TinyMesh, root: Path) -> None:
    """Prompts are filled by the prefill worker; some requests have an adapter, others none. The
    head can draft a few tokens only, to which the adapter leans: so many drafts are accepted."""
    tensors = load_file(mesh.draft_dir / "model.safetensors")
    drafted = (tensors["d2t"] + torch.arange(len(tensors["d2t"]))).tolist()
    make_leaning_adapter(root / "leaning", mesh.model_dir, drafted, random.randrange(2**31))
    make_draft_adapter(root / "leaning" / DRAFT_FOLDER, mesh.draft_dir, random.randrange(2**31))
    assert load(mesh, "leaning", "leaning").status_code == 200
    asks = [
        (model, prompt_of(), common_pb2.SamplingParams(temperature=1, seed=random.getrandbits(60)))
        for model in ("leaning", "leaning", "leaning", MODEL)
    ]
    with ThreadPoolExecutor(len(asks)) as pool:
        expected = []
        for model, prompt, sampling in asks:
            plain = common_pb2.SamplingParams(speculate=False)
            plain.MergeFrom(sampling)
            expected.append(pool.submit(stream, mesh, model, prompt, Stream(), plain))
        texts = [done.result(TIMEOUT_S).text for done in expected]
        for _ in range(NUM_TRIES):
            seen = [Stream() for _ in asks]
            running = [
                pool.submit(stream, mesh, model, prompt, one, sampling)
                for (model, prompt, sampling), one in zip(asks, seen, strict=True)
            ]
            wait_until(lambda seen=seen: all(one.text or one.error for one in seen), 60)
            kill(mesh, "decode-1")
            assert [(done.result(TIMEOUT_S).text, done.result().error) for done in running] == [
                (text, "") for text in texts
            ]
            mesh.wait_healthy()
            print([(one.num_lost, one.num_trees, one.num_accepted) for one in seen])
            if any(one.num_lost for one in seen):
                break
        else:
            raise AssertionError(f"{NUM_TRIES} times the kill came too late to show anything")
    assert sum(one.num_trees for one in seen) > NUM_LONG // 4
    assert sum(one.num_accepted for one in seen if not one.num_lost) > NUM_LONG // 10
    assert unload(mesh, "leaning").status_code == 200


@pytest.mark.full_after(1)
@pytest.mark.parametrize("victim", ["prefill-0", "decode-1"])
def test_a_worker_killed_during_a_load(mesh: TinyMesh, peft: Peft, victim: str) -> None:
    """The name is served everywhere or nowhere."""
    name = f"during-{victim}"
    engine = psutil.Process(mesh.service(victim)["engine_pid"])
    engine.suspend()  # so that the load is under way when the worker dies
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(load, mesh, name, "third")
        wait_until(lambda: any(one.adapter.name == name for one in listed(mesh)) or call.done(), 30)
        early = post(mesh, "/v1/completions", body_of(name, [5], 1)).status_code
        # A worker that stands still for two seconds is not waited for any more.
        if early != 404:
            wait_until(call.done, 1.0)
        kill(mesh, victim)
        answer = call.result(TIMEOUT_S)
    mesh.wait_healthy()
    wait_held(mesh, WORKERS, list(set(serving(mesh).values())))
    if answer.status_code == 200:
        for _ in range(4):
            prompt = peft.prompt(NUM_PROMPT, ("third",))
            assert text_of(ask(mesh, name, prompt)) == peft.answer("third", prompt)
        assert unload(mesh, name).status_code == 200
    else:
        assert name not in serving(mesh)
        assert post(mesh, "/v1/completions", body_of(name, [5], 1)).status_code == 404


def kill(mesh: TinyMesh, name: str) -> None:
    """SIGKILL, and the return of the service."""
    pid = mesh.service(name)["pid"]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: (mesh.ready_file(name) or {}).get("pid", pid) != pid, 120)


def damage(folder: Path, kind: str, root: Path) -> str:
    """Makes an adapter of the root bad in a way; returns what the error must name."""
    weights = folder / WEIGHTS_FILE
    tensors = load_file(weights)
    names = sorted(tensors)
    if kind == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
        return folder.name
    if kind == "header":
        weights.write_bytes(b"\xff" * 8 + weights.read_bytes()[8:])
        return folder.name
    if kind == "no weights":
        weights.unlink()
        return WEIGHTS_FILE
    if kind == "link":
        weights.unlink()
        weights.symlink_to(root / "first" / WEIGHTS_FILE)
        return "links"
    if kind == "half":
        name = next(one for one in names if "lora_B" in one)
        del tensors[name]
        told = name.rpartition(".lora_")[0].removeprefix("base_model.model.")
    elif kind == "nan":
        name = next(one for one in names if "down_proj.lora_A" in one)
        tensors[name][1, 2] = torch.nan
        told = "down_proj"
    elif kind == "shape":
        name = next(one for one in names if "o_proj.lora_A" in one)
        tensors[name] = tensors[name][:, :-1].contiguous()
        told = "o_proj"
    else:
        assert kind == "rank"
        config = json.loads((folder / CONFIG_FILE).read_text())
        (folder / CONFIG_FILE).write_text(json.dumps({**config, "r": 80}))
        repeat = -(-80 // config["r"])
        for name in names:
            dim = 0 if "lora_A" in name else 1
            tensors[name] = torch.cat([tensors[name]] * repeat, dim).narrow(dim, 0, 80).contiguous()
        told = "80"
    save_file(tensors, weights)
    return told


@pytest.mark.parametrize(
    "kind", ["truncated", "header", "no weights", "link", "half", "nan", "shape", "rank"]
)
def test_a_bad_adapter_is_an_error_and_nothing_else(
    mesh: TinyMesh, peft: Peft, root: Path, kind: str
) -> None:
    before = serving(mesh)
    folder = root / f"bad-{kind.replace(' ', '-')}"
    shutil.copytree(root / "third", folder)
    told = damage(folder, kind, root)
    answer = load(mesh, "bad", folder.name)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert told in error["message"]
    assert str(root) not in error["message"], "paths of the server are not the caller's"
    assert serving(mesh) == before
    prompt = peft.prompt(NUM_PROMPT, ("first",))
    assert text_of(ask(mesh, "first", prompt)) == peft.answer("first", prompt)
    wait_held(mesh, WORKERS, list(set(before.values())))
    wait_until(lambda: copies(root) == set(before.values()), 30)


def test_a_storm_of_adapters(mesh: TinyMesh, peft: Peft, root: Path) -> None:
    """More than fit, loaded, replaced and unloaded at random under load: see `storm_checks`."""
    for name in serving(mesh):
        assert unload(mesh, name).status_code == 200
    wait_held(mesh, WORKERS, [])
    weather(mesh, root, STORM)
    for name in ("first", "second"):
        assert load(mesh, name, name).status_code == 200
        prompt = peft.prompt(NUM_PROMPT, (name,))
        assert text_of(ask(mesh, name, prompt)) == peft.answer(name, prompt)


@pytest.mark.parametrize("path", ["../first", "/etc", ".weft", "linked", "nothing"])
def test_paths_out_of_the_root_are_refused(mesh: TinyMesh, root: Path, path: str) -> None:
    linked = root / "linked"
    if not linked.is_symlink():
        linked.symlink_to(root / "third")
    answer = load(mesh, "trick", path)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "lora_path"
    assert "trick" not in serving(mesh)
