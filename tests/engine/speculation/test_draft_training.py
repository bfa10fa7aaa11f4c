"""The training of EAGLE-3 heads: against inference one token at a time, on tiny models."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from weft.contract.request import SamplingParams, StopCriteria
from weft.engine.loop.llm import LLM
from weft.engine.model.decoder_only import DecoderOnlyLM
from weft.engine.model.heads.draft_adapter import read_draft_adapter
from weft.engine.model.heads.eagle3 import load_eagle3
from weft.engine.model.loader import load_model
from weft.testing.models.threads import one_thread
from weft.testing.models.tiny_drafts import NaiveHead
from weft.testing.models.tiny_models import make_tiny

SCRIPTS = Path(__file__).resolve().parents[3] / "scripts"
sys.path.insert(0, str(SCRIPTS))
try:
    from draft_training.head import DraftHead, HeadShape
    from draft_training.layout import load_head, save_head, with_vocabulary
    from draft_training.lora import add_lora, save_lora
    from draft_training.measure import (
        DEPTHS,
        Walk,
        accepted_lengths,
        lookup_lengths,
        measure_head,
        walk,
    )
    from draft_training.target import Target
    from draft_training.texts import Text, load_texts, plan_epoch, save_texts
    from draft_training.training import Trainer, TrainingSettings
    from draft_training.trees import accepted_of, tree_ranks
    from draft_training.vocabulary import choose, coverage
    from draft_training.writing import Script
finally:
    sys.path.pop(0)

VOCAB, DRAFT_VOCAB = 517, 48


@pytest.fixture(autouse=True, scope="module")
def single_thread() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture
def rng() -> random.Random:
    seed = random.randrange(10**9)
    print(f"seed {seed}")
    return random.Random(seed)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target") / "model"
    return make_tiny("llama", folder, num_hidden_layers=5, vocab_size=VOCAB)


@pytest.fixture(scope="module")
def target(model_dir: Path) -> Target:
    return Target(model_dir, torch.float32, torch.device("cpu"))


def random_head(target: Target, rng: random.Random) -> DraftHead:
    """Far from what training begins with: norms and map too are random."""
    generator = torch.Generator().manual_seed(rng.getrandbits(40))
    token_ids = torch.randperm(VOCAB, generator=generator)[:DRAFT_VOCAB].sort().values
    shape = HeadShape.of(target.config, DRAFT_VOCAB)
    head = DraftHead(shape, token_ids, target.embedding, target.lm_head)
    with torch.no_grad():
        for weight in head.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(noise / weight.shape[1] ** 0.5 if weight.ndim == 2 else 1 + 0.3 * noise)
    return head


def read_naive(head: DraftHead, target: Target, folder: Path) -> tuple[DraftHead, NaiveHead]:
    """The head as it is after a way through its files, read twice."""
    save_head(head, target, folder)
    return load_head(folder, target), NaiveHead(folder, target.embedding, target.lm_head)


def text_of(tokens: list[int], num_prompt: int, kind: str) -> Text:
    return Text(np.array(tokens, np.uint32), num_prompt, kind)


def random_texts(rng: random.Random, count: int, tokens: list[int]) -> list[Text]:
    kinds = ("chat", "summary", "code")
    return [
        text_of(rng.choices(tokens, k=rng.randint(8, 40)), rng.randint(1, 7), rng.choice(kinds))
        for _ in range(count)
    ]


def test_the_states_are_what_enters_the_layers(model_dir: Path, target: Target) -> None:
    ids = torch.randint(0, VOCAB, (2, 9))
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.no_grad():
        expected = model.model(ids, output_hidden_states=True)
    states = target.states(ids)
    assert target.aux_layers == (2, 2, 2)
    assert Target(model_dir, torch.float32, ids.device, (0, 3, 1)).aux_layers == (0, 3, 1)
    other = Target(model_dir, torch.float32, ids.device, (0, 3, 1)).states(ids)
    wanted = torch.cat([expected.hidden_states[i] for i in (0, 3, 1)], -1)
    torch.testing.assert_close(other.aux, wanted)
    torch.testing.assert_close(states.last, expected.last_hidden_state)


def test_the_unrolled_forward_is_inference_with_a_cache(
    target: Target, rng: random.Random, tmp_path: Path
) -> None:
    head, naive = read_naive(random_head(target, rng), target, tmp_path)
    num_tokens, num_steps = 13, 5
    ids = torch.tensor([rng.choices(range(VOCAB), k=num_tokens) for _ in range(2)])
    aux = target.states(ids).aux
    with torch.no_grad():
        states = list(head.unroll(aux, ids, target.rope(1, num_tokens), num_steps))
        unrolled = [head.logits(state) for state in states]
    for row, tokens in enumerate(ids.tolist()):
        known = naive.fuse(aux[row])
        for anchor in range(1, num_tokens):
            expected = naive.taught(known[:anchor], tokens[: anchor + num_steps])
            assert len(expected) == min(num_steps, num_tokens - anchor)
            for step, logits in enumerate(expected):
                found = unrolled[step][row, anchor + step - 1]
                torch.testing.assert_close(found.double(), logits, atol=2e-4, rtol=2e-4)


def test_accepted_lengths_are_those_of_drafting(
    target: Target, rng: random.Random, tmp_path: Path
) -> None:
    head, naive = read_naive(random_head(target, rng), target, tmp_path)
    named = naive.ids.tolist()
    tokens = rng.choices(named, k=6)
    while len(tokens) < 28:
        # Mostly what the head would draft, so that chains are accepted to all depths.
        known = naive.fuse(target.states(torch.tensor([tokens])).aux[0])
        (liked,) = naive.chain(known[:-1], tokens, 1)
        tokens.append(liked if rng.random() < 0.8 else rng.choice(named))
    text = text_of(tokens, 4, "code")
    known = naive.fuse(target.states(torch.tensor([tokens])).aux[0])
    expected = []
    for anchor in range(1, len(tokens)):
        chain = naive.chain(known[:anchor], tokens[: anchor + 1], max(DEPTHS))
        coming = tokens[anchor + 1 :]
        length = 0
        while length < min(len(chain), len(coming)) and chain[length] == coming[length]:
            length += 1
        expected.append(length)
    (found,) = accepted_lengths(head, target, [text]).chain
    assert found[1:] == expected
    assert max(expected) >= 1
    check_trees(head, target, naive, text)
    check_grown(head, target, naive, text)
    table = measure_head(head, target, [text])
    assert table["code"] == table["all"]
    assert table["chat"] == [0.0] * len(DEPTHS)
    assert table["all"][0] > 1.0


def check_trees(head: DraftHead, target: Target, naive: NaiveHead, text: Text) -> None:
    """Trees of width 3, by asking after every true beginning for the most likely tokens."""
    tokens, width = text.tokens.tolist(), 3
    accepted = accepted_lengths(head, target, [text], width)
    known = naive.fuse(target.states(torch.tensor([tokens])).aux[0])
    for anchor in range(1, len(tokens)):
        coming = tokens[anchor + 1 :][: max(DEPTHS)]
        taught = naive.taught(known[:anchor], tokens[: anchor + max(DEPTHS)])
        ranks = []
        for logits, token in zip(taught, coming, strict=False):
            best = [naive.ids[index].item() for index in logits.argsort(descending=True)[:width]]
            ranks.append(best.index(token) if token in best else width)
        chain = next((at for at, rank in enumerate(ranks) if rank > 0), len(ranks))
        beside = chain < len(ranks) and ranks[chain] < width
        full = next((at for at, rank in enumerate(ranks) if rank == width), len(ranks))
        assert accepted.chain[0][anchor] == chain
        assert accepted.siblings[0][anchor] == chain + beside
        assert accepted.full[0][anchor] == full


def check_grown(head: DraftHead, target: Target, naive: NaiveHead, text: Text) -> None:
    """Trees of width 3, grown path by path."""
    tokens, width, deepest = text.tokens.tolist(), 3, 4
    ranks = tree_ranks(head, target, text, width)
    known = naive.fuse(target.states(torch.tensor([tokens])).aux[0])
    for anchor in range(text.num_prompt, len(tokens) - 1, 3):
        scores: dict[tuple[int, ...], float] = {}
        level: list[tuple[int, ...]] = [()]
        for _ in range(deepest):
            found = {}
            for path in level:
                logits = naive.taught(known[:anchor], [*tokens[: anchor + 1], *path])[len(path)]
                logprobs = logits.log_softmax(-1)
                for index in logprobs.argsort(descending=True)[:width].tolist():
                    score = scores.get(path, 0.0) + logprobs[index].item()
                    found[(*path, naive.ids[index].item())] = score
            scores |= found
            level = sorted(found, key=found.__getitem__, reverse=True)[:width]
        for depth in range(1, deepest + 1):
            nodes = [path for path in scores if len(path) <= depth]
            nodes.sort(key=lambda path: -scores[path])
            for num_nodes in (1, 3, 5, 8, 13, 100):
                kept, length = set(nodes[:num_nodes]), 0
                while tuple(tokens[anchor + 1 : anchor + 2 + length]) in kept:
                    length += 1
                    if anchor + 1 + length == len(tokens):
                        break
                accepted = accepted_of(ranks, depth, num_nodes)
                assert accepted[anchor - text.num_prompt] == length, (anchor, depth, num_nodes)


def test_lookup_drafts_what_followed_before(rng: random.Random) -> None:
    def brute(tokens: list[int], position: int) -> int:
        known, coming = tokens[: position + 1], tokens[position + 1 :]
        for size in (4, 3, 2):
            for start in range(len(known) - size - 1, -1, -1):
                if known[start : start + size] == known[-size:]:
                    draft = known[start + size :][: max(DEPTHS)]
                    length = 0
                    while length < min(len(draft), len(coming)) and draft[length] == coming[length]:
                        length += 1
                    return length
        return 0

    for letters in (2, 3, 6):
        tokens = rng.choices(range(letters), k=80)
        assert lookup_lengths(tokens) == [brute(tokens, p) for p in range(len(tokens))]


def test_a_walk_takes_the_steps_of_an_engine() -> None:
    text = text_of([9, 9, 1, 2, 3, 4, 5, 6], 2, "chat")
    # From token 1 two are right, then none after 4, then one more than there is.
    accepted = [7, 7, 2, 0, 0, 0, 5, 0]
    total = Walk()
    walk(text, accepted, 7, total)
    assert (total.steps, total.tokens) == (3, 5)
    total = Walk()
    walk(text, accepted, 1, total)
    assert (total.steps, total.tokens) == (4, 5)


def test_the_layout_is_the_published_one(
    model_dir: Path, target: Target, rng: random.Random, tmp_path: Path
) -> None:
    head = random_head(target, rng)
    save_head(head, target, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    hidden, inner, q_size, kv_size = 72, 136, 6 * 24, 2 * 24
    layer = "midlayer"
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "fc.weight": (hidden, 3 * hidden),
        f"{layer}.hidden_norm.weight": (hidden,),
        f"{layer}.input_layernorm.weight": (hidden,),
        f"{layer}.self_attn.q_proj.weight": (q_size, 2 * hidden),
        f"{layer}.self_attn.k_proj.weight": (kv_size, 2 * hidden),
        f"{layer}.self_attn.v_proj.weight": (kv_size, 2 * hidden),
        f"{layer}.self_attn.o_proj.weight": (hidden, q_size),
        f"{layer}.post_attention_layernorm.weight": (hidden,),
        f"{layer}.mlp.gate_proj.weight": (inner, hidden),
        f"{layer}.mlp.up_proj.weight": (inner, hidden),
        f"{layer}.mlp.down_proj.weight": (hidden, inner),
        "norm.weight": (hidden,),
        "lm_head.weight": (DRAFT_VOCAB, hidden),
        "d2t": (DRAFT_VOCAB,),
        "t2d": (VOCAB,),
    }
    assert {t.dtype for t in tensors.values() if t.is_floating_point()} == {torch.bfloat16}
    drafted = tensors["d2t"] + torch.arange(DRAFT_VOCAB)
    assert tensors["d2t"].dtype == torch.int64
    assert torch.equal(drafted, head.token_ids)
    assert torch.equal(tensors["t2d"].nonzero().flatten(), drafted)
    assert torch.equal(tensors["lm_head.weight"], target.lm_head[drafted].bfloat16())
    model = load_model(model_dir, "float32").model
    assert isinstance(model, DecoderOnlyLM)
    assert load_eagle3(tmp_path, model).aux_layers == target.aux_layers


def test_another_vocabulary_drafts_the_same_among_its_tokens(
    target: Target, rng: random.Random, tmp_path: Path
) -> None:
    head = random_head(target, rng)
    kept = sorted(rng.sample(range(DRAFT_VOCAB), 20))
    smaller = with_vocabulary(head, target, head.token_ids[kept])
    save_head(smaller, target, tmp_path)
    read = load_head(tmp_path, target)
    assert read.token_ids.tolist() == head.token_ids[kept].tolist()
    states = torch.randn(3, 72)
    with torch.no_grad():
        torch.testing.assert_close(smaller.logits(states), head.logits(states)[:, kept])


def test_an_lm_head_in_the_file_is_the_heads(
    target: Target, rng: random.Random, tmp_path: Path
) -> None:
    head = random_head(target, rng)
    head.lm_head = torch.randn(head.lm_head.shape)
    read, naive = read_naive(head, target, tmp_path)
    assert torch.equal(read.lm_head, head.lm_head.bfloat16().float())
    states = torch.randn(3, 72)
    with torch.no_grad():
        logits = torch.stack([naive._logits(state.double()) for state in states])
        torch.testing.assert_close(read.logits(states).double(), logits, atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="LM head is not the target's"):
        with_vocabulary(read, target, read.token_ids[:20])


def settings_of(steps: int, **changes: float) -> TrainingSettings:
    given = {"batch_tokens": 256, "chain": 3, "learning_rate": 3e-3, "warmup_steps": 2, **changes}
    return TrainingSettings(steps=steps, **given)  # type: ignore[arg-type]


def test_training_lowers_the_loss(target: Target, rng: random.Random, tmp_path: Path) -> None:
    head = random_head(target, rng)
    head.initialise(torch.Generator().manual_seed(rng.getrandbits(40)))
    texts = random_texts(rng, 12, head.token_ids.tolist())
    trainer = Trainer(head, target, texts, settings_of(40), tmp_path)
    trainer.run(checkpoint_steps=1)
    first, last = trainer.log[0]["losses"], trainer.log[-1]["losses"]
    assert len(first) == 3
    assert all(after < 0.9 * before for before, after in zip(first, last, strict=True))


def test_a_stopped_run_ends_as_an_uninterrupted_one(
    target: Target, rng: random.Random, tmp_path: Path
) -> None:
    settings = settings_of(6)
    seed = rng.getrandbits(40)
    texts = random_texts(rng, 12, list(range(VOCAB)))

    def trainer(folder: str) -> Trainer:
        head = random_head(target, random.Random(seed))
        return Trainer(head, target, texts, settings, tmp_path / folder)

    whole = trainer("whole")
    whole.run(checkpoint_steps=6)
    trainer("parts").run(checkpoint_steps=6, max_steps=2)
    stopped = trainer("parts")
    assert stopped.step == 2
    stopped.run(checkpoint_steps=1)
    assert [entry["step"] for entry in stopped.log] == [2, 3, 4, 5, 6]
    for name, expected in whole.head.state_dict().items():
        assert torch.equal(stopped.head.state_dict()[name], expected), name
    with pytest.raises(SystemExit, match="other settings"):
        Trainer(stopped.head, target, texts, settings_of(7), tmp_path / "parts")
    with pytest.raises(SystemExit, match="other texts"):
        Trainer(stopped.head, target, texts[1:], settings, tmp_path / "parts")
    # More texts may choose another vocabulary, of which the rows of the LM head are.
    moved = random_head(target, random.Random(seed + 1))
    moved.load_state_dict({**moved.state_dict(), "t2d": stopped.head.t2d})
    with pytest.raises(SystemExit, match="vocabulary"):
        Trainer(moved, target, texts, settings, tmp_path / "parts")


def test_a_draft_adapter_is_all_that_changes_and_is_read_as_it_was_trained(
    target: Target, rng: random.Random, tmp_path: Path
) -> None:
    """Stopped and gone on with, as any training."""
    head_seed, seed = rng.getrandbits(30), rng.getrandbits(30)
    head = random_head(target, random.Random(head_seed))
    before = {name: tensor.clone() for name, tensor in head.state_dict().items()}
    texts = random_texts(rng, 12, list(range(VOCAB)))
    added = add_lora(head, 4, 8.0, seed)
    trainer = Trainer(head, target, texts, settings_of(6), tmp_path / "run")
    trainer.run(checkpoint_steps=3, max_steps=3)
    for changed_seed, alpha in ((head_seed + 1, 8.0), (head_seed, 32.0)):
        changed = random_head(target, random.Random(changed_seed))
        add_lora(changed, 4, alpha, seed)
        with pytest.raises(SystemExit, match="another"):
            Trainer(changed, target, texts, settings_of(6), tmp_path / "run")
    other = random_head(target, random.Random(head_seed))
    others = add_lora(other, 4, 8.0, seed)
    trainer = Trainer(other, target, texts, settings_of(6), tmp_path / "run")
    trainer.run(checkpoint_steps=3)
    for name, tensor in other.state_dict().items():
        if not name.endswith((".a", ".b")):
            assert torch.equal(tensor, before[name.replace(".base.", ".")]), name
    assert all(layer.b.abs().max() > 0 for layer in others.values())
    assert added.keys() == others.keys()
    save_lora(others, 8.0, tmp_path / "draft")
    shapes = {name: (layer.b.shape[0], layer.a.shape[1]) for name, layer in others.items()}
    changes = read_draft_adapter(tmp_path / "draft", shapes)
    for name, layer in others.items():
        a, b = (half.detach().to(torch.bfloat16).float() for half in (layer.a, layer.b))
        torch.testing.assert_close(changes[name], 2.0 * b @ a)


def test_texts_are_kept_and_each_is_seen_once_an_epoch(rng: random.Random, tmp_path: Path) -> None:
    texts = random_texts(rng, 50, list(range(VOCAB)))
    save_texts(tmp_path / "a.npz", texts[:20])
    save_texts(tmp_path / "b.npz", texts[20:])
    kept = load_texts(tmp_path)
    assert [(t.tokens.tolist(), t.num_prompt, t.kind) for t in kept] == [
        (t.tokens.tolist(), t.num_prompt, t.kind) for t in texts
    ]
    plan = plan_epoch(texts, 120, seed=rng.getrandbits(30))
    assert sorted(index for group in plan for index in group) == list(range(50))
    assert all(len(g) * max(len(texts[i].tokens) for i in g) <= 120 for g in plan)


def test_the_vocabulary_is_what_occurs_most(rng: random.Random) -> None:
    counts = torch.tensor([rng.randint(0, 1000) for _ in range(60)])
    chosen = choose(counts, 20, {57, 3})
    assert {57, 3} <= set(chosen.tolist())
    assert chosen.tolist() == sorted(set(chosen.tolist()))
    assert len(chosen) == 20
    least = min(int(counts[i]) for i in chosen.tolist() if i not in (57, 3))
    left = set(range(60)) - set(chosen.tolist())
    assert all(int(counts[i]) <= least for i in left)
    assert coverage(counts, choose(counts, 60, ())) == 1.0


def test_what_is_held_out_is_never_asked_in_training() -> None:
    prompts = json.loads((SCRIPTS / "draft_training" / "held_out.json").read_text())
    kinds = [prompt["kind"] for prompt in prompts]
    assert {kind: kinds.count(kind) for kind in ("chat", "summary", "code")} == {
        "chat": 32,
        "summary": 32,
        "code": 32,
    }
    words = {prompt["messages"][0]["content"].lower() for prompt in prompts}
    script = Script(random.Random())
    asked = {
        script.ask(name, "chat").messages[0]["content"].lower()
        for name in ("chat", "articles", "code")
        for _ in range(2000)
    }
    assert not words & asked


def test_each_prompt_is_drawn_with_its_own_parameters(model_dir: Path, rng: random.Random) -> None:
    prompt = rng.choices(range(5, VOCAB), k=9)
    drawn = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, seed=rng.getrandbits(40)),
        SamplingParams(temperature=1.0, seed=rng.getrandbits(40)),
    ]
    stop = StopCriteria(max_tokens=8, ignore_eos=True)
    with LLM(model_dir, kv_memory_bytes=1 << 24, num_threads=1) as llm:
        together = llm.generate([prompt] * 3, drawn, stop)
        alone = [llm.generate([prompt], one, stop)[0] for one in drawn]
    assert [s.token_ids for s in together] == [s.token_ids for s in alone]
    assert len({tuple(s.token_ids) for s in together}) == 3
