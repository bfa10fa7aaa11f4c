"""Images on a GPU: first tokens over REST, repeats, and text beside images.

    python bench/gpu_images.py [--only idle encode attention] [--device cuda:0] [--apart cuda:1]

The model is Qwen3-VL-8B's shape with made-up weights; its vocabulary is the demo tokenizer's with
the marks of images. All requests go through the REST edge of a `weft up`, so decoding JPEG files is
included.

`idle`: one request at a time; a picture is new in each, 1024 x 1024 JPEG, with 200 tokens of text.
Then the same pictures with another question, beside a text prompt as long of which as much is
cached. `beside`: text requests at a rate, alone and beside requests with pictures; with `--apart`
prompts are computed on another GPU.

`trace` keeps the turns of some steps beside pictures, as `weft profile` writes them.

`encode`: the tower alone, in this process, as a CUDA graph and as launches.
`attention`: one layer's of its attentions beside torch's.
"""

from __future__ import annotations

import base64
import io
import json
import random
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from harness import Harness, Run, spread
from open_loop.clients import Outcome, Target
from open_loop.clients import run as run_clients
from open_loop.report import Goal, summarize
from open_loop.workload import arrivals, single_requests
from PIL import Image
from serving.mesh import WEFT, MeshProcess
from weft.checkpoint.resolve import resolve_model

NUM_WORDS = 49_152
MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
IDS = {mark: NUM_WORDS + number for number, mark in enumerate(MARKS)}
TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n'}}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "image_token_id": IDS["<|image_pad|>"],
    "video_token_id": IDS["<|video_pad|>"],
    "vision_start_token_id": IDS["<|vision_start|>"],
    "vision_end_token_id": IDS["<|vision_end|>"],
    "tie_word_embeddings": False,
    "eos_token_id": 2,
    "text_config": {
        "model_type": "qwen3_vl_text",
        "vocab_size": NUM_WORDS + 128,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "eos_token_id": 2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5e6,
            "mrope_section": [24, 20, 20],
            "mrope_interleaved": True,
        },
    },
    "vision_config": {
        "model_type": "qwen3_vl",
        "depth": 27,
        "hidden_size": 1152,
        "hidden_act": "gelu_pytorch_tanh",
        "intermediate_size": 4304,
        "num_heads": 16,
        "in_channels": 3,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 4096,
        "num_position_embeddings": 2304,
        "deepstack_visual_indexes": [8, 16, 24],
    },
}
PROCESSOR: dict[str, Any] = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "processor_class": "Qwen3VLProcessor",
    "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
SIDE = 1024
MEDIA_ROWS, STEP_PATCHES = 16384, 4096
"""Defaults of workers."""
QUESTION_TOKENS = 200
MAX_TEXT_REQUEST_S = 60.0

harness = Harness(__file__, __doc__, repeats=7)
harness.flag("--device", default="cuda:0")
harness.flag("--dtype", default="bfloat16")
harness.flag("--apart", default="", help="device of a prefill worker; default: one worker")
harness.flag("--layers", type=int, help="of text and of the tower; default their own numbers")
harness.flag("--tokenizer", type=Path, help="folder of its files; default the demo model's")
harness.flag("--text-rate", type=float, default=20.0, help="text requests a second")
harness.flag("--image-rate", type=float, default=5.0, help="requests with an image a second")
harness.flag("--seconds", type=float, default=20.0, help="of each load")
harness.flag("--processes", type=int, default=4, help="of text clients")
trace_file = Path("images-trace.json.gz")
harness.flag("--trace", type=Path, default=trace_file, help="where its part leaves the trace")
harness.flag("--num-pages", type=int, default=9000)
harness.flag("--worker-args", default="", help="further flags of the workers")


def model_folder(folder: Path, options: Any) -> Path:
    """A directory without weights."""
    source = options.tokenizer or resolve_model("demo")
    config = json.loads(json.dumps(CONFIG))
    if options.layers:
        config["text_config"]["num_hidden_layers"] = options.layers
        config["vision_config"] |= {"depth": options.layers, "deepstack_visual_indexes": [0]}
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    kind = tokenizer["added_tokens"][0]
    tokenizer["added_tokens"] += [{**kind, "id": IDS[mark], "content": mark} for mark in MARKS]
    described = json.loads((source / "tokenizer_config.json").read_text())
    files = {
        "config.json": config,
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": described | {"chat_template": TEMPLATE},
        "preprocessor_config.json": PROCESSOR,
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def picture(seed: int) -> str:
    """A JPEG file as a data URL: smooth shapes and some noise."""
    rng = np.random.default_rng(seed)
    small = Image.fromarray(rng.integers(0, 256, (24, 24, 3), dtype=np.uint8))
    wide = np.asarray(small.resize((SIDE, SIDE), Image.Resampling.BICUBIC)).astype(np.int16)
    noisy = np.clip(wide + rng.integers(-8, 9, wide.shape), 0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(noisy).save(file, "JPEG", quality=90)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


def words(seed: int, count: int) -> str:
    """About so many tokens of text."""
    rng = random.Random(seed)
    return " ".join(rng.choice(("red", "sea", "two", "old", "sun", "box")) for _ in range(count))


class Asked:
    """Requests of one answer token over one connection; a first token is an answer."""

    def __init__(self, url: str) -> None:
        self._client = httpx.Client(base_url=url, timeout=120.0)
        self.model = self._client.get("/v1/models").json()["data"][0]["id"]

    def chat(self, images: list[str], text: str, tokens: int = 1) -> tuple[float, dict[str, Any]]:
        """Milliseconds to the answer, and its usage."""
        parts: list[dict[str, Any]] = [
            {"type": "image_url", "image_url": {"url": image}} for image in images
        ]
        messages = [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
        return self._post("/v1/chat/completions", {"messages": messages}, tokens)

    def text(self, prompt: list[int]) -> tuple[float, dict[str, Any]]:
        return self._post("/v1/completions", {"prompt": prompt}, 1)

    def _post(self, path: str, body: dict[str, Any], tokens: int) -> tuple[float, dict[str, Any]]:
        more = {"model": self.model, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        content = json.dumps(body | more).encode()
        began = time.perf_counter()
        answer = self._client.post(path, content=content)
        took = 1e3 * (time.perf_counter() - began)
        answer.raise_for_status()
        return took, answer.json()["usage"]


def start(run: Run) -> MeshProcess:
    """The mesh of all parts, of one worker or of two."""
    if _started:
        return _started[0]
    options = run.options
    folder = Path(run.stack.enter_context(tempfile.TemporaryDirectory()))
    model = model_folder(folder, options)
    worker = f"--dummy-weights --num-pages {options.num_pages} {options.worker_args}"
    flags = f"--decode 1 --decode-args {shlex.quote(worker)} "
    if options.apart:
        more = f"{worker} --device {options.apart}"
        flags += f"--prefill 1 --device {options.device} --prefill-args {shlex.quote(more)}"
    else:
        flags += f"--prefill 0 --device {options.device}"
    mesh = MeshProcess(str(model), options.dtype, flags)
    run.stack.callback(mesh.stop)
    began = time.perf_counter()
    mesh.wait_until_ready()
    print(f"ready after {time.perf_counter() - began:.0f} s", flush=True)
    _started.append(mesh)
    return mesh


_started: list[MeshProcess] = []


def cached(usage: dict[str, Any]) -> int:
    return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


@harness.part
def idle(run: Run) -> None:
    """First tokens, one request at a time."""
    mesh = start(run)
    asked, repeats = Asked(mesh.url), run.options.repeats
    seeds = iter(range(10_000))
    question = words(0, QUESTION_TOKENS)

    def measured(name: str, ask: Callable[[], tuple[float, dict[str, Any]]]) -> None:
        found = [ask() for _ in range(repeats + 1)][1:]
        usage = found[-1][1]
        run.row(
            name=name,
            first_token_ms=spread([took for took, _ in found]),
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=cached(usage),
            table="idle",
        )

    for count in (1, 4):
        images = f"{count} x {SIDE} x {SIDE}"
        measured(
            f"{images}, new",
            lambda n=count: asked.chat([picture(next(seeds)) for _ in range(n)], question),
        )
        old = [picture(next(seeds)) for _ in range(count)]
        _, usage = asked.chat(old, question)
        measured(f"{images}, seen", lambda old=old: asked.chat(old, words(next(seeds), 200)))
        rng = random.Random(count)
        prefix = [rng.randrange(10, NUM_WORDS) for _ in range(usage["prompt_tokens"] - 200)]
        measured(
            f"{images}: text as long",
            lambda prefix=prefix, rng=rng: asked.text(
                [*prefix, *(rng.randrange(10, NUM_WORDS) for _ in range(200))]
            ),
        )


@harness.part
def beside(run: Run) -> None:
    """Gaps between tokens of text, alone and beside images."""
    mesh, options = start(run), run.options
    rng = random.Random(1)
    for turn in range(2):
        for with_images in (False, True):
            outcomes, images = _load(mesh, options, rng, options.image_rate * with_images)
            row = summarize("beside images" if with_images else "text alone", outcomes, GOAL)
            if row.failed:
                run.fail(f"{row.failed} failed: {row.errors}")
            run.row(
                name=row.name,
                turn=turn,
                requests=row.requests,
                tokens_per_s=row.tokens_per_s,
                ttft_p50=row.ttft_p50,
                ttft_p99=row.ttft_p99,
                gap_p50=row.gap_p50,
                gap_p99=row.gap_p99,
                images=len(images),
                image_ttft_p50=statistics.median(images) if images else 0.0,
                table="beside",
            )


@harness.part_if_named
def trace(run: Run) -> None:
    """A profile of steps beside images, from the middle of a load."""
    mesh, options = start(run), run.options
    profile = [*WEFT, "profile", "--steps", "100", "--state-dir", str(mesh.state)]
    profile += ["--limit", str(options.seconds), "--output", str(options.trace)]
    with ThreadPoolExecutor(1) as pool:
        load = pool.submit(_load, mesh, options, random.Random(1), options.image_rate)
        time.sleep(options.seconds / 3)
        subprocess.run(profile, check=True, timeout=options.seconds + MAX_TEXT_REQUEST_S)
        outcomes, images = load.result()
    row = summarize("beside images", outcomes, GOAL)
    size = options.trace.stat().st_size
    run.row(name=row.name, gap_p99=row.gap_p99, images=len(images), bytes=size, table="trace")


GOAL = Goal(ttft_s=1.0, itl_s=0.1)


def _load(
    mesh: MeshProcess, options: Any, rng: random.Random, image_rate: float
) -> tuple[list[Outcome], list[float]]:
    """Text requests; with a rate of images also the times of those, ms."""
    count = int(options.text_rate * options.seconds)
    times = list(arrivals(options.text_rate, count, "poisson", rng))
    visits = single_requests(times, (512, 512), (200, 200), rng)
    found: list[float] = []
    is_over = threading.Event()

    def send() -> None:
        asked = [Asked(mesh.url) for _ in range(8)]
        with ThreadPoolExecutor(len(asked)) as pool:
            number, due = 0, time.monotonic()
            seeds = random.Random(rng.random())
            while not is_over.is_set():
                image = picture(seeds.getrandbits(32))
                time.sleep(max(0.0, due - time.monotonic()))
                due += 1 / image_rate
                future = pool.submit(asked[number % len(asked)].chat, [image], words(number, 30))
                future.add_done_callback(lambda done: found.append(done.result()[0]))
                number += 1

    sender = threading.Thread(target=send, daemon=True)
    if image_rate:
        sender.start()
    outcomes = run_clients(
        visits, Target(mesh.url, NUM_WORDS, MAX_TEXT_REQUEST_S), options.processes
    )
    is_over.set()
    if image_rate:
        sender.join()
    return outcomes, found


@harness.part
def encode(run: Run) -> None:
    """The tower alone."""
    import torch
    from clocks import event_s
    from weft.engine.executor.embeddings import MediaEmbeddings
    from weft.engine.model.loader import load_model

    options, device = run.options, torch.device(run.options.device)
    with tempfile.TemporaryDirectory() as folder:
        model = model_folder(Path(folder), options)
        encoder = load_model(model, options.dtype, options.device, dummy=True, images=True).encoder
        assert encoder is not None
        dtype = getattr(torch, options.dtype)
        media = MediaEmbeddings(encoder, encoder.row_width, MEDIA_ROWS, dtype, device, STEP_PATCHES)
        media.capture()
        for count, side in ((1, 256), (1, 512), (1, SIDE), (4, SIDE)):
            shape = (count, side, side, 3)
            pixels = torch.randint(0, 256, shape, dtype=torch.uint8, device=device)
            ways = {"graph": media.encoded, "launches": encoder.encode}
            times: dict[str, list[float]] = {name: [] for name in ways}
            with torch.inference_mode():
                for _ in range(options.repeats + 2):
                    for name, way in ways.items():
                        times[name].append(1e3 * event_s(partial(way, pixels)))
            for name, found in times.items():
                run.row(
                    name=f"{count} x {side} x {side}, {name}",
                    encode_ms=spread(found[2:]),
                    rows=encoder.rows_of(shape[1:]),
                    table="encode",
                )


@harness.part
def attention(run: Run) -> None:
    """One layer's attention of the tower, beside torch's."""
    import torch
    import torch.nn.functional as F
    from clocks import event_s
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from weft.kernels.ops.encoder_attention import encoder_attention
    from weft.kernels.ops.encoder_attention.spec import Bounds

    options, vision = run.options, CONFIG["vision_config"]
    heads, device = vision["num_heads"], torch.device(options.device)
    dim, length = vision["hidden_size"] // heads, (SIDE // vision["patch_size"]) ** 2
    for count in (1, 4):
        qkv = torch.randn(count * length, 3, heads, dim, dtype=torch.bfloat16, device=device)
        q, k, v = qkv.unbind(1)
        bounds = Bounds.even(count, length, device)
        batch = [one.unflatten(0, (count, length)).transpose(1, 2) for one in (q, k, v)]
        ways: dict[str, Callable[[], object]] = {"own": partial(encoder_attention, q, k, v, bounds)}

        def torchs(backend: SDPBackend, batch: list[torch.Tensor]) -> object:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(*batch)

        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
            ways[f"torch, {backend.name}"] = partial(torchs, backend, batch)
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(options.repeats + 3):
            for name, way in ways.items():
                times[name].append(1e3 * event_s(way))
        for name, found in times.items():
            run.row(
                name=f"{count} x {length} rows, {heads} heads of {dim}: {name}",
                layer_ms=spread(found[3:]),
                table="attention",
            )


if __name__ == "__main__":
    sys.exit(harness.main())
