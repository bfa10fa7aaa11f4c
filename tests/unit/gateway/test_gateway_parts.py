"""Small parts of the gateway: admission, templates, bodies, metrics."""

from __future__ import annotations

import asyncio
import json
import random
import re
from datetime import datetime
from pathlib import Path

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram
from weft.common.rpc.errors import to_status
from weft.contract.errors import (
    DeadlineExceeded,
    InvalidRequest,
    ModelError,
    Overloaded,
    Starting,
)
from weft.gateway.admission.admission import Admission
from weft.gateway.api.openai.bodies import ChatBody
from weft.gateway.api.openai.parse import parse_body
from weft.gateway.fleet.session import ReconnectBackoff
from weft.gateway.generation.prompt_outputs import PromptVectors
from weft.gateway.telemetry.metrics import LoopHistogram
from weft.gateway.text.model_card import least_tokens, load_model_card
from weft.gateway.text.template import ChatTemplate
from weft.testing.models.tiny_tokenizers import (
    CHATML,
    byte_fallback_bpe,
    byte_level_bpe,
    write_model_dir,
)
from weft.v1 import decode_pb2

# Admission


async def test_admission_keeps_its_bounds_under_random_use() -> None:
    rng = random.Random(3)
    admission = Admission(max_running=4, max_queued=6)
    running = peak = refused = expired = cancelled = 0

    async def use(size: int, hold_s: float, limit_s: float) -> None:
        nonlocal running, peak, refused, expired
        deadline = asyncio.get_running_loop().time() + limit_s
        try:
            place = await admission.admit(size, deadline)
        except Overloaded:
            refused += 1
            return
        except DeadlineExceeded:
            expired += 1
            return
        with place:
            running += size
            peak = max(peak, running)
            assert running <= 4
            try:
                await asyncio.sleep(hold_s)
            finally:
                running -= size
                if rng.random() < 0.5:
                    place.release()

    for _ in range(30):
        tasks = []
        pause_s = rng.choice([0.0, 0.001])  # At once, they are too many on any machine.
        for _ in range(12):
            limit_s = rng.choice([0.002, 5.0])
            tasks.append(asyncio.create_task(use(rng.randint(1, 3), rng.random() / 200, limit_s)))
            await asyncio.sleep(pause_s * rng.random())
        for task in rng.sample(tasks, 3):
            cancelled += task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in tasks:
            if not task.cancelled():
                task.result()
        assert (admission.num_running, admission.num_queued) == (0, 0)
    assert peak >= 3
    assert refused
    assert expired
    assert cancelled
    await asyncio.wait_for(admission.drain(), 60)


async def test_admission_is_first_come_first_served() -> None:
    admission = Admission(1, 10)
    order: list[int] = []
    first = await admission.admit(1, 1e9)

    async def use(number: int) -> None:
        with await admission.admit(1, 1e9 + asyncio.get_running_loop().time()):
            order.append(number)

    tasks = [asyncio.create_task(use(number)) for number in range(5)]
    await asyncio.sleep(0)
    first.release()
    first.release()
    await asyncio.gather(*tasks)
    assert order == list(range(5))


async def test_larger_than_the_bound_runs_alone() -> None:
    admission = Admission(2, 10)
    with await admission.admit(5, 1e9):
        assert admission.num_running == 5
        with pytest.raises(Overloaded):
            await admission.admit(11, 1e9)


def use(admission: Admission, num: int, tenant: str, weight: float = 1.0) -> asyncio.Task[None]:
    async def pass_through() -> None:
        with await admission.admit(num, 1e9, tenant, weight):
            pass

    return asyncio.create_task(pass_through())


async def turn() -> None:
    """Lets tasks go as far as they can."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_nobody_is_dropped_for_a_request_that_is_refused_all_the_same() -> None:
    admission = Admission(max_running=1, max_queued=10)
    place = await admission.admit(1, 1e9)
    many = [use(admission, 1, "many") for _ in range(6)]
    some = [use(admission, 1, "some") for _ in range(4)]
    await turn()
    # Two of the six could go before it would have more than they.
    with pytest.raises(Overloaded):
        await admission.admit(5, 1e9, "large")
    await turn()
    assert not any(task.done() for task in many + some)
    fits = use(admission, 3, "large")
    await turn()
    assert [task.done() for task in many + some] == [False] * 3 + [True] * 3 + [False] * 4
    assert admission.num_queued == 10
    place.release()
    await asyncio.wait_for(asyncio.gather(*many[:3], *some, fits), 60)
    for task in many[3:]:
        with pytest.raises(Overloaded):
            task.result()
    assert (admission.num_running, admission.num_queued) == (0, 0)


async def test_a_light_tenants_one_request_does_not_hide_a_flood() -> None:
    admission = Admission(max_running=1, max_queued=8)
    place = await admission.admit(1, 1e9)
    light = use(admission, 1, "light", 0.01)
    flood = [use(admission, 1, "flood") for _ in range(7)]
    await turn()
    chat = use(admission, 3, "chat")
    await turn()
    assert not chat.done(), "it waits: the others have more for their weight"
    assert [task.done() for task in [light, *flood]] == [True] + [False] * 5 + [True] * 2
    place.release()
    await asyncio.wait_for(asyncio.gather(chat, *flood[:5]), 60)
    dropped = await asyncio.gather(light, *flood[5:], return_exceptions=True)
    assert all(isinstance(error, Overloaded) for error in dropped)


async def test_a_refused_client_comes_again_when_the_queue_will_be_served() -> None:
    now_s = 0.0
    loop = asyncio.get_running_loop()
    admission = Admission(max_running=2, max_queued=6)
    assert admission.retry_after_s() == 1.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "time", lambda: now_s)
        for _ in range(40):  # places are held for 10 s each
            place = await admission.admit(1, 1e9)
            now_s += 10.0
            place.release()
        places = [await admission.admit(1, 1e9) for _ in range(2)]
        waiting = [asyncio.create_task(admission.admit(1, 1e9)) for _ in range(6)]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded) as refused:
            await admission.admit(1, 1e9)
        # Six wait, two at a time are served.
        assert refused.value.retry_after_s == pytest.approx(30.0)
        for place in places:
            place.release()
        for task in waiting:
            (await task).release()


# Templates


def render(source: str, **arguments: object) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>"}, now=lambda: datetime(2026, 3, 4))
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": " b "}]
    return template.render(messages, **arguments)  # type: ignore[arg-type]


async def test_a_peer_that_starts_is_asked_often(monkeypatch: pytest.MonkeyPatch) -> None:
    delays: list[float] = []

    async def note(delay_s: float) -> None:
        delays.append(delay_s)

    monkeypatch.setattr(asyncio, "sleep", note)
    backoff = ReconnectBackoff()
    details = ("grpc-status-details-bin", to_status(Starting("loads")).SerializeToString())
    for trailer, longest in (((), 1.0), ((details,), 0.2), ((), 1.0)):
        error = grpc.aio.AioRpcError(
            grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(*trailer)
        )
        delays.clear()
        for _ in range(20):
            backoff.failed(error)
            await backoff.sleep()
        assert longest / 2 <= max(delays) <= longest


def test_template_features() -> None:
    assert render("{{ bos_token }}{{ messages|length }}") == "<s>2"
    assert render("{% generation %}x{{ 1 + 1 }}{% endgeneration %}") == "x2"
    assert render("{{ strftime_now('%Y-%m-%d') }}") == "2026-03-04"
    loop = "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}"
    assert render(loop + "{% break %}{% endfor %}") == "assistant"
    assert render("{{ {'é': [1]}|tojson }}") == '{"é": [1]}'
    assert render("{{ messages[0]|tojson(indent=1) }}") == '{\n "role": "user",\n "content": "a"\n}'
    assert render("{{ thinking }}", variables={"thinking": 3}) == "3"
    assert render("{% if tools %}t{% endif %}{{ messages[1].content.strip() }}") == "b"
    assert render("{% if true %}\n  x\n{% endif %}\ny") == "  x\ny"


@pytest.mark.parametrize("content", ["b", "<", "|", "i", "end", "", "Sure, ", "\n", "im_end"])
def test_a_message_is_continued_where_it_ends(content: str) -> None:
    """Also where the template's own text behind it has the same characters."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": content}]
    template = ChatTemplate(CHATML, {})
    whole = template.render(messages, add_generation_prompt=False)
    begin, _, _ = whole.rpartition("assistant\n")
    text = template.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text == f"{begin}assistant\n{content}"


def test_template_equals_transformers() -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [{"role": "user", "content": "x <é>"}, {"role": "assistant", "content": "y\n"}]
    source = "{%- for m in messages %}\n  {{- m|tojson }} {{ m.content }}\n{% endfor %}\n" + CHATML
    for prompt in (False, True):
        expected, _ = render_jinja_template(
            [messages], chat_template=source, add_generation_prompt=prompt, bos_token="<s>"
        )
        ours = ChatTemplate(source, {"bos_token": "<s>"})
        assert ours.render(messages, add_generation_prompt=prompt) == expected[0]


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}{{ ().__class__.__base__.__subclasses__() }}",
        "{{ range(10 ** 12)|list }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[7].role.x }}",
        "{% set n = messages|length %}{{ 1 // (n - n) }}",
        "{{ messages|dictsort }}",
        "{% macro again(x) %}{{ again(x) }}{% endmacro %}{{ again(1) }}",
    ],
)
def test_template_refusals_are_invalid_requests(source: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        render(source)
    assert caught.value.param == "messages"


def test_template_that_does_not_compile() -> None:
    with pytest.raises(ModelError, match="does not compile"):
        ChatTemplate("{% for %}", {})


# Model directories


def test_model_directory_variants(tmp_path: Path) -> None:
    folder = write_model_dir(tmp_path / "m")
    model = load_model_card(folder)
    assert model.name == "m"
    assert model.template is not None
    assert model.max_context_tokens == 512
    assert model.eos_ids == {model.tokenizer.token_to_id("<|im_end|>")}
    (folder / "chat_template.jinja").write_text("from file")
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 2], "temperature": 0.1}')
    model = load_model_card(folder, "name", 100)
    assert (model.name, model.max_context_tokens) == ("name", 100)
    assert model.template is not None
    assert model.template.render([]) == "from file"
    assert model.eos_ids == {1, 2}


def test_the_chat_template_may_be_a_file_or_one_of_several(tmp_path: Path) -> None:
    folder = write_model_dir(tmp_path / "m")
    (folder / "chat_template.jinja").write_text("default")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    (folder / "additional_chat_templates" / "plain.jinja").write_text("plain")
    (tmp_path / "mine.jinja").write_text("mine")
    for chosen, text in (
        ("", "default"),
        ("plain", "plain"),
        (str(tmp_path / "mine.jinja"), "mine"),
    ):
        model = load_model_card(folder, chat_template=chosen)
        assert model.template is not None
        assert model.template.render([]) == text
        assert (model.tool_template is None) == bool(chosen)
    for wrong in ("other", "{% for message in messages %}" * 20, "~no-such-user/mine.jinja"):
        told = re.escape(wrong[:20]) + r".* is no file, .*\(default, plain, tool_use\)"
        with pytest.raises(ModelError, match=told):
            load_model_card(folder, chat_template=wrong)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", None),
        ("config.json", "[]"),
        ("config.json", '{"vocab_size": "many"}'),
        ("tokenizer.json", None),
        ("tokenizer.json", "{}"),
        ("generation_config.json", "{"),
        ("generation_config.json", '{"eos_token_id": ["x"]}'),
        ("generation_config.json", '{"temperature": "hot"}'),
        ("generation_config.json", '{"top_p": 0}'),
        ("generation_config.json", '{"top_k": 1.5}'),
    ],
)
def test_bad_model_directories(tmp_path: Path, file: str, content: str | None) -> None:
    folder = write_model_dir(tmp_path / "m")
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(content)
    with pytest.raises(ModelError) as caught:
        load_model_card(folder)
    assert file in caught.value.message or "eos_token_id" in caught.value.message


def test_least_tokens_is_a_lower_bound(tmp_path: Path) -> None:
    rng = random.Random(9)
    models = [
        load_model_card(write_model_dir(tmp_path / "level", byte_level_bpe())),
        load_model_card(write_model_dir(tmp_path / "fallback", byte_fallback_bpe())),
    ]
    assert models[0].max_token_bytes > 0
    for model in models:
        for _ in range(100):
            text = "".join(rng.choice("the fox <|im_start|>é你🎉 →") for _ in range(300))
            text += "<|im_start|>" * rng.randrange(50)
            assert least_tokens(model, [text]) <= len(model.tokenizer.encode(text).ids)


# Bodies and metrics


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
        max_leaves=8,
    ),
    st.sampled_from(sorted(ChatBody.model_fields)),
)
def test_any_value_of_any_field_is_taken_or_named(value: object, field: str) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], field: value}
    error = None
    try:
        parse_body(ChatBody, json.dumps(body).encode(), 1 << 20)
    except InvalidRequest as caught:
        error = caught
    if error is not None and error.param is None:  # numbers that JSON itself has no room for
        assert "JSON" in error.message
    elif error is not None and error.param is not None:
        assert error.param.split(".")[0].split("[")[0] == field
        assert error.message.startswith(error.param)


def test_histogram_equals_the_client_library() -> None:
    rng = random.Random(5)
    bounds = (0.1, 0.5, 2.0)
    registry = CollectorRegistry()
    registry.register(LoopHistogram("ours", "d", bounds))
    ours = LoopHistogram("mine", "d", bounds)
    registry.register(ours)
    theirs = Histogram("theirs", "d", buckets=bounds, registry=registry)
    for value in [*bounds, *(rng.uniform(0, 3) for _ in range(100))]:
        ours.observe(value, 2)
        theirs.observe(value)
        theirs.observe(value)
    for suffix, labels in [
        ("_count", {}),
        *(("_bucket", {"le": le}) for le in ("0.1", "0.5", "2.0", "+Inf")),
    ]:
        read = registry.get_sample_value
        assert read("mine" + suffix, labels) == read("theirs" + suffix, labels)
    assert registry.get_sample_value("mine_sum") == pytest.approx(
        registry.get_sample_value("theirs_sum")
    )


# Vectors


def test_vectors_that_are_sent_again_are_taken_once() -> None:
    """By another owner behind the last one, or by one that was preempted, in other pieces."""
    rows = [random.randbytes(12) for _ in range(5)]

    def event(first: int, end: int) -> decode_pb2.SessionEvent.Vectors:
        values = b"".join(rows[first:end])
        return decode_pb2.SessionEvent.Vectors(width=3, values=values, first_row=first)

    vectors = PromptVectors(5)
    for first, end in ((0, 2), (0, 1), (1, 4), (4, 5)):
        assert not vectors.add(event(first, end))
    vectors.restart()
    assert not vectors.add(event(0, 5))
    assert vectors.is_complete
    assert vectors.values == b"".join(rows)
    assert "behind 0" in PromptVectors(5).add(event(1, 2))
