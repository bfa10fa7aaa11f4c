"""Constrained output of a whole engine: every answer is of its grammar, and nobody else notices."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from weft.contract.errors import Internal, InvalidRequest
from weft.contract.messages import Inbox
from weft.contract.request import Constraint, Reasoning, StopCriteria
from weft.contract.submits import Cancel, Ping, SampleProgress
from weft.engine.features.constraints import compiling, masks
from weft.engine.features.constraints.grammar import GrammarSource
from weft.engine.features.constraints.grammar_state import too_slow
from weft.engine.loop.llm import LLM
from weft.engine.scheduler.ports import Masks
from weft.testing.engine.constrained import Desk, Outcome, check_schemas, check_valid, schema
from weft.testing.engine.random_schemas import person, varied_schemas
from weft.testing.models.threads import one_thread
from weft.testing.models.tiny_models import EOS_TOKEN_ID, make_tiny

pytestmark = pytest.mark.usefixtures("overlap")

VOCAB = 517


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(
        "llama",
        tmp_path_factory.mktemp("tiny"),
        seed=11,
        tokenizer=True,
        vocab_size=VOCAB,
        num_hidden_layers=1,
    )


@pytest.fixture(scope="module")
def desk(model_dir: Path, overlap: None) -> Iterator[Desk]:
    with (
        one_thread(),
        LLM(model_dir, dtype="float32", num_pages=4096, num_threads=1) as llm,
    ):
        yield Desk(llm.engine, model_dir)
        sizes = llm.engine.sizes()
        assert all(count == 0 for count in sizes.values()), sizes


def prompt(length: int = 5) -> list[int]:
    return [random.randrange(3, VOCAB) for _ in range(length)]


def compiler_threads() -> int:
    return sum(thread.name == "grammars" for thread in threading.enumerate())


@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_the_vocabulary_is_read_before_it_is_needed(tmp_path: Path, has_tokenizer: bool) -> None:
    """Not by a worker without constrained requests, until it hears that some may come."""
    folder = make_tiny(
        "llama", tmp_path / "tiny", seed=1, tokenizer=has_tokenizer, vocab_size=VOCAB
    )
    before = compiler_threads()
    with LLM(folder, dtype="float32", num_pages=64, num_threads=1) as llm:
        llm.engine.turn(Inbox(pings=[Ping(gateway=1, nonce=1)]))
        assert compiler_threads() == before
        for _ in range(2):
            llm.engine.turn(Inbox(pings=[Ping(gateway=1, nonce=1, expects_constraints=True)]))
        assert compiler_threads() == before + has_tokenizer
    assert compiler_threads() == before


@pytest.mark.each_of("overlap", "temperature")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_hundred_answers_are_valid_under_their_schemas(desk: Desk, temperature: float) -> None:
    """Every other one with steps that overlap, the rest in turn."""
    schemas = varied_schemas(100)[desk.engine.config.is_overlapped :: 2]
    for begin in range(0, len(schemas), 50):
        check_schemas(desk, schemas[begin : begin + 50], temperature)


@pytest.mark.parametrize(
    "expression",
    ["[0-9]{3}-[a-f]{2,4}", r"(yes|no|maybe), [A-Z]\w{0,5}\.", "é+🎉?x", r"\d{1,3}(\.\d{1,3}){3}"],
)
def test_texts_match_the_whole_expression(desk: Desk, expression: str) -> None:
    constraint = Constraint(kind="regex", text=expression)
    submits = [desk.submit(constraint, prompt(), temperature=1.0, seed=seed) for seed in range(8)]
    for outcome in desk.run(*submits):
        assert isinstance(outcome, Outcome), outcome
        assert outcome.reason == "stop"
        assert re.fullmatch(expression, desk.text(outcome), re.ASCII), desk.text(outcome)


def test_texts_are_one_of_the_choices(desk: Desk) -> None:
    choices = ("yes", "no", 'say "hi"', "back\\slash", "line\none", "\x01f", "été 🎉", "[a-z]")
    constraint = Constraint(kind="choice", choices=choices)
    submits = [desk.submit(constraint, prompt(), temperature=1.0, seed=s) for s in range(24)]
    found = {desk.text(o) if isinstance(o, Outcome) else str(o) for o in desk.run(*submits)}
    assert found <= set(choices)
    assert len(found) > 1


def test_texts_follow_a_recursive_grammar(desk: Desk) -> None:
    grammar = 'root ::= "(" (root | [ab]) ")"'
    submits = [
        desk.submit(Constraint(kind="ebnf", text=grammar), prompt(), temperature=1.0, seed=seed)
        for seed in range(4)
    ]
    for outcome in desk.run(*submits):
        assert isinstance(outcome, Outcome), outcome
        text = desk.text(outcome)
        depth = text.count("(")
        assert re.fullmatch(r"\(+[ab]\)+", text)
        assert text.count(")") == depth


NOT_WHOLE: dict[str, Any] = {"oneOf": [{"type": "integer"}, {"type": "number"}]}


@pytest.mark.parametrize(
    ("constraint", "told"),
    [
        (Constraint(kind="json_schema", text='{"type": '), "line 1, column 10"),
        (Constraint(kind="json_schema", text="[]"), "not a JSON schema"),
        (schema({"properties": {"a": {"type": "strin"}}}), "#/properties/a/type"),
        (schema({"properties": {"a/b": {"$ref": "#/$defs/b"}}}), "#/properties/a~1b/$ref"),
        (schema({"type": "array", "uniqueItems": True, "minItems": 1000}), "#/uniqueItems"),
        (schema({"items": {"not": {"pattern": "a(b|c)d"}}}), "#/items/not"),
        (schema({"anyOf": [{"type": "null"}, {"pattern": "a(?=b)"}]}), "#/anyOf/1/pattern"),
        (schema({"type": "array", "uniqueItems": True, "items": NOT_WHOLE}), "#/items/oneOf"),
        (schema({"type": "object", "required": ["a"], "additionalProperties": False}), "'a'"),
        (schema({"type": "integer", "minimum": 3, "maximum": 2}), "no value satisfies"),
        (Constraint(kind="regex", text="(a"), "position"),
        (Constraint(kind="regex", text="a(?=b)"), "position"),
        (Constraint(kind="ebnf", text='root ::= "a" b'), "line 1, column 14"),
        (Constraint(kind="ebnf", text='start: "a" b'), "line 1, column 8: unknown name"),
        (Constraint(kind="structural_tag", text='{"structures": []}'), "#/triggers"),
    ],
)
def test_what_cannot_be_enforced_is_refused_with_its_place(
    desk: Desk, constraint: Constraint, told: str
) -> None:
    (error,) = desk.run(desk.submit(constraint, prompt()))
    assert isinstance(error, InvalidRequest)
    assert error.param == "constraint"
    assert told in error.message
    assert "x-guidance" not in error.message


@pytest.mark.each_of("expression", "overlap", "min_tokens")
@pytest.mark.parametrize("min_tokens", [0, 9])
@pytest.mark.parametrize("expression", [r"ab[^\s\S]c", "[^\\s\\S]"])
def test_a_dead_end_is_told_as_one(desk: Desk, expression: str, min_tokens: int) -> None:
    constraint = Constraint(kind="regex", text=expression)
    stop = StopCriteria(max_tokens=20, min_tokens=min_tokens)
    (error,) = desk.run(desk.submit(constraint, prompt(), stop=stop))
    assert isinstance(error, InvalidRequest)
    assert error.param == "constraint"
    assert "no text satisfies it" in error.message


def test_tags_are_constrained_within_free_text(desk: Desk) -> None:
    structure = {"begin": "<f>", "schema": {"type": "integer", "maximum": 99}, "end": "</f>"}
    tags = {"structures": [structure], "triggers": ["<f"]}
    constraint = Constraint(kind="structural_tag", text=json.dumps(tags))
    bias = {desk.tokenizer.token_to_id("<"): 9.0, EOS_TOKEN_ID: 3.0}
    found = 0
    for seed in range(8):
        outcome = desk.one(
            desk.submit(constraint, prompt(), temperature=1.0, seed=seed, logit_bias=bias)
        )
        text = desk.text(outcome)
        found += text.count("<f>")
        assert re.fullmatch(r"(?:(?!<f).|<f>-?\d+</f>)*", text, re.DOTALL) or (
            outcome.reason == "length"
        ), text


def test_texts_follow_a_grammar_of_lark(desk: Desk) -> None:
    grammar = 'start: pair ("," pair)*\npair: /[a-c]+/ "=" %json {"type": "boolean"}'
    submits = [
        desk.submit(Constraint(kind="ebnf", text=grammar), prompt(), temperature=1.0, seed=seed)
        for seed in range(4)
    ]
    for outcome in desk.run(*submits):
        assert isinstance(outcome, Outcome), outcome
        pair = "[a-c]+=(true|false)"
        pattern = f"{pair}(,{pair})*" if outcome.reason == "stop" else "[a-c=,truefals]*"
        assert re.fullmatch(pattern, desk.text(outcome)), desk.text(outcome)


def test_a_constraint_ends_the_sample_whatever_the_stop_criteria_are(desk: Desk) -> None:
    choice = Constraint(kind="choice", choices=("ab", "cd"))
    for stop in (
        StopCriteria(max_tokens=50, ignore_eos=True),
        StopCriteria(max_tokens=50, min_tokens=20),
        StopCriteria(max_tokens=50, min_tokens=20, ignore_eos=True, stop_token_ids=(7,)),
    ):
        outcome = desk.one(desk.submit(choice, prompt(), stop=stop))
        assert (outcome.reason, desk.text(outcome)) in {("stop", "ab"), ("stop", "cd")}


def test_min_tokens_keeps_a_grammar_from_ending_early(desk: Desk) -> None:
    digits = Constraint(kind="regex", text="[0-9]+")
    stop = StopCriteria(max_tokens=100, min_tokens=20)
    bias = {EOS_TOKEN_ID: 30.0}
    assert len(desk.one(desk.submit(digits, prompt(), logit_bias=bias)).ids) == 2
    assert len(desk.one(desk.submit(digits, prompt(), logit_bias=bias, stop=stop)).ids) == 21


def test_a_limit_cuts_a_constrained_sample(desk: Desk) -> None:
    stop = StopCriteria(max_tokens=4)
    constraint = Constraint(kind="regex", text="[a-z]{300}")
    outcome = desk.one(desk.submit(constraint, prompt(), stop=stop))
    assert outcome.reason == "length"
    assert re.fullmatch("[a-z]{4,8}", desk.text(outcome))


def test_stop_tokens_may_end_a_text_within_its_grammar(desk: Desk) -> None:
    comma = desk.tokenizer.token_to_id(",")
    constraint = Constraint(kind="regex", text="a{3},b{3}")
    stop = StopCriteria(max_tokens=50, stop_token_ids=(comma,))
    outcome = desk.one(desk.submit(constraint, prompt(), stop=stop))
    assert (outcome.reason, desk.text(outcome)) == ("stop", "aaa,")


def test_samples_of_one_prompt_follow_the_grammar_each_for_itself(desk: Desk) -> None:
    submit = desk.submit(schema(person()), prompt(40), temperature=1.0, seed=9, n=4)
    (samples,) = desk.run_all(submit)
    assert isinstance(samples, list)
    for sample in samples:
        check_valid(desk, sample, person())
    assert len({tuple(sample.ids) for sample in samples}) > 1


def test_log_probabilities_are_the_models_own(desk: Desk) -> None:
    asked = prompt()
    free = desk.one(desk.submit(None, asked, top_logprobs=3, stop=StopCriteria(max_tokens=1)))
    choice = Constraint(kind="choice", choices=("ab", "cd"))
    held = desk.one(desk.submit(choice, asked, top_logprobs=3))
    # As without the constraint, though the most likely tokens may be forbidden.
    assert held.logprobs[0].top == free.logprobs[0].top
    assert all(entry.logprob < 0 for entry in held.logprobs)


@pytest.mark.each_of("overlap", "temperature")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_resumed_sample_goes_on_in_its_grammar(desk: Desk, temperature: float) -> None:
    constraint, asked = schema(person()), prompt()
    whole = desk.one(desk.submit(constraint, asked, temperature=temperature, seed=3))
    for cut in (1, len(whole.ids) // 2, len(whole.ids) - 1):
        progress = [SampleProgress(sample=0, tokens=whole.ids[:cut])]
        rest = desk.one(
            desk.submit(constraint, asked, temperature=temperature, seed=3, progress=progress)
        )
        assert whole.ids[:cut] + rest.ids == whole.ids
        assert rest.reason == "stop"


END_OF_REASONING, CALL = 300, 301
"""Tokens that the bias makes likely."""
LIKELY = {END_OF_REASONING: 7.0, EOS_TOKEN_ID: -20.0}


def behind_reasoning(**beside: Any) -> Constraint:
    reasoning = Reasoning(end=(END_OF_REASONING,))
    given: dict[str, Any] = {"reasoning": reasoning, **beside}
    return Constraint(kind="regex", text="[0-9]{3,5}", **given)


def test_a_constraint_begins_behind_the_reasoning(desk: Desk) -> None:
    """Also of a sample that is resumed, before the end of the reasoning and behind it."""
    for seed in range(6):
        settings: dict[str, Any] = {"temperature": 1.0, "seed": seed, "logit_bias": LIKELY}
        asked, constraint = prompt(), behind_reasoning()
        whole = desk.one(desk.submit(constraint, asked, **settings))
        end = whole.ids.index(END_OF_REASONING)
        answer = desk.tokenizer.decode(whole.ids[end + 1 :], skip_special_tokens=True)
        assert re.fullmatch("[0-9]{3,5}", answer), whole.ids
        assert whole.reason == "stop"
        for cut in {1, end, end + 1, end + 2, len(whole.ids) - 1} - {0}:
            progress = [SampleProgress(sample=0, tokens=whole.ids[:cut])]
            rest = desk.one(desk.submit(constraint, asked, progress=progress, **settings))
            assert whole.ids[:cut] + rest.ids == whole.ids


def test_a_first_token_opens_reasoning_or_lifts_the_constraint(desk: Desk) -> None:
    beside = {"reasoning": Reasoning(begin=CALL, end=(END_OF_REASONING,))}
    outcomes = {}
    for bias in (-50.0, 50.0):
        settings: dict[str, Any] = {"temperature": 1.0, "logit_bias": LIKELY | {CALL: bias}}
        outcomes[bias] = desk.one(desk.submit(behind_reasoning(**beside), prompt(), **settings))
    assert re.fullmatch("[0-9]{3,5}", desk.text(outcomes[-50.0]))
    assert outcomes[50.0].ids[0] == CALL
    stop = StopCriteria(max_tokens=30)
    bias_of = {CALL: 50.0, EOS_TOKEN_ID: -50.0}
    lifted = Constraint(kind="regex", text="[0-9]{3,5}", alternatives=(CALL,))
    free = desk.one(desk.submit(lifted, prompt(), logit_bias=bias_of, stop=stop))
    assert free.ids == [CALL] * 30


def test_a_request_is_cancelled_while_its_grammar_is_compiled(desk: Desk) -> None:
    submit = desk.submit(schema({"const": "never seen before"}), prompt())
    cancel = Cancel(gateway=0, request_id=submit.request_id, attempt=1)
    desk.engine.turn(Inbox(submits=[submit]))
    outbox = desk.engine.turn(Inbox(cancels=[cancel]))
    assert [event.reason for batch in outbox.gateways for event in batch.finished] == ["cancelled"]
    desk.one(desk.submit(schema({"const": "never seen before"}), prompt()))


def test_preempted_samples_go_on_in_their_grammars(model_dir: Path) -> None:
    text = Constraint(kind="regex", text="([a-z]{9} [0-9]{4}\n){6}")
    with (
        one_thread(),
        LLM(model_dir, dtype="float32", page_size=4, num_pages=60, num_threads=1) as llm,
    ):
        desk = Desk(llm.engine, model_dir)
        submits = [desk.submit(text, prompt(), temperature=1.0, seed=seed) for seed in range(4)]
        outcomes = desk.run(*submits)
    assert sum(o.num_preemptions for o in outcomes if isinstance(o, Outcome)) > 0
    for outcome in outcomes:
        assert isinstance(outcome, Outcome), outcome
        assert re.fullmatch("([a-z]{9} [0-9]{4}\n){6}", desk.text(outcome)), desk.text(outcome)


@pytest.mark.each_of("overlap", "slow_mask")
@pytest.mark.parametrize("slow_mask", [1, 6])
def test_a_constraint_that_was_too_slow_is_refused_from_then_on(
    desk: Desk, slow_mask: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether its masks are computed beside the model, or awaited."""
    texts = f"[ab]{{{40 + slow_mask}}}", "[cd]{4}"
    slow, other = (Constraint(kind="regex", text=text) for text in texts)
    next_masks, num_masks = masks.ConstraintState.next_masks, 0

    def slow_once(
        state: masks.ConstraintState, tokens: Sequence[int], drafts: Sequence[int]
    ) -> Masks:
        nonlocal num_masks
        num_masks += 1
        if num_masks == slow_mask:
            time.sleep(3.0)
            raise too_slow()
        return next_masks(state, tokens, drafts)

    stats = desk.engine.stats
    with monkeypatch.context() as patch:
        patch.setattr(stats, "_longest_step_s", 0.0)
        patch.setattr(masks.ConstraintState, "next_masks", slow_once)
        patch.setattr(masks.ConstraintState, "in_group", None)
        error, beside = desk.run(*(desk.submit(slow, prompt()) for _ in range(2)))
        # Else the engine would wait so much longer before it counts as stalled.
        assert 0.0 < stats._longest_step_s < 3.0
    for failed in (error, beside):  # Who has the same constraint need not be slow as well.
        assert isinstance(failed, InvalidRequest)
        assert "too ambiguous" in failed.message
    assert num_masks < slow_mask + 5
    again, fine = desk.run(desk.submit(slow, prompt()), desk.submit(other, prompt()))
    assert isinstance(again, InvalidRequest)
    assert (again.param, again.message) == ("constraint", error.message)
    assert isinstance(fine, Outcome)
    assert fine.reason == "stop"


def test_a_grammar_that_takes_too_much_fails_alone(desk: Desk) -> None:
    """Beside others, by the limits of llguidance: within a few steps, none of which takes long."""
    attacks = ["((a{1,100}){1,100}){1,100}", "(a?){1000}a{1000}", "(a|a?)+(b|c)*" * 400]
    submits = [desk.submit(Constraint(kind="regex", text=text), prompt()) for text in attacks]
    fine = desk.submit(Constraint(kind="regex", text="[a-z]{40}"), prompt())
    *failed, outcome = desk.run(*submits, fine)
    assert isinstance(outcome, Outcome)
    assert outcome.reason == "stop"
    for one in failed:
        if isinstance(one, Outcome):
            assert set(desk.text(one)) <= set("abc")
        else:
            assert isinstance(one, InvalidRequest)
            assert one.param == "constraint"


def test_a_thread_that_cannot_be_started_fails_what_waits_for_it(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the next request tries again."""
    letters = Constraint(kind="regex", text="[a-z]{3}")
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "grammar":
            raise RuntimeError("can't start new thread")
        start(thread)

    with one_thread(), LLM(model_dir, dtype="float32", num_pages=64, num_threads=1) as llm:
        desk = Desk(llm.engine, model_dir)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            failed = desk.run(*(desk.submit(letters, prompt()) for _ in range(2)))
        for error in failed:
            assert isinstance(error, Internal)
            assert "try again" in error.message
        assert desk.text(desk.one(desk.submit(letters, prompt()))).isalpha()


def test_a_constraint_that_is_not_compiled_in_time_fails_alone(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, compile_one = threading.Event(), GrammarSource.compile

    def slowly(source: GrammarSource, constraint: Constraint) -> object:
        if constraint.text == "late":
            release.wait(60)
        return compile_one(source, constraint)

    monkeypatch.setattr(GrammarSource, "compile", slowly)
    late, fine = (Constraint(kind="regex", text=text) for text in ("late", "fine"))
    settings = {"num_pages": 64, "num_threads": 1, "constraint_compile_s": 2.0}
    with one_thread(), LLM(model_dir, dtype="float32", **settings) as llm:
        desk = Desk(llm.engine, model_dir)
        # The vocabulary is read before: that takes a busy machine part of the time.
        desk.one(desk.submit(Constraint(kind="regex", text="first"), prompt()))
        error, outcome = desk.run(desk.submit(late, prompt()), desk.submit(fine, prompt()))
        assert isinstance(error, InvalidRequest)
        assert "over 2 s" in error.message
        assert isinstance(outcome, Outcome)
        release.set()
        assert llm.engine.sizes()["compiling"] == 0


def test_what_fails_to_compile_in_an_unknown_way_fails_alone(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_one = GrammarSource.compile

    def break_letters(source: GrammarSource, constraint: Constraint) -> object:
        if "a-z" in constraint.text:
            raise MemoryError
        return compile_one(source, constraint)

    monkeypatch.setattr(GrammarSource, "compile", break_letters)
    letters, digits = (Constraint(kind="regex", text=text) for text in ("[a-z]{3}", "[0-9]{3}"))
    with one_thread(), LLM(model_dir, dtype="float32", num_pages=64, num_threads=1) as llm:
        desk = Desk(llm.engine, model_dir)
        (error,) = desk.run(desk.submit(letters, prompt()))
        assert isinstance(error, Internal)
        assert desk.text(desk.one(desk.submit(digits, prompt()))).isdigit()


def test_no_more_grammars_are_kept_than_there_may_be(model_dir: Path) -> None:
    constraints = [Constraint(kind="regex", text=f"[a-z]{{{i}}}") for i in range(1, 9)]
    settings = {"num_pages": 256, "num_threads": 1, "constraint_cache": 2}
    with one_thread(), LLM(model_dir, dtype="float32", **settings) as llm:
        desk = Desk(llm.engine, model_dir)
        grammars = llm.engine._constraints._compiled
        for _ in range(2):
            for outcome in desk.run(*(desk.submit(one, prompt()) for one in constraints)):
                assert isinstance(outcome, Outcome)
            assert len(grammars._kept) == 2


def test_a_vocabulary_that_cannot_be_read_fails_requests(
    model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(compiler: compiling.Compiler) -> GrammarSource:
        raise ValueError("no vocabulary")

    monkeypatch.setattr(compiling.Compiler, "_source", fail)
    with one_thread(), LLM(model_dir, dtype="float32", num_pages=64, num_threads=1) as llm:
        desk = Desk(llm.engine, model_dir)
        for _ in range(2):
            (error,) = desk.run(desk.submit(Constraint(kind="regex", text="a"), prompt()))
            assert isinstance(error, Internal)
            assert "no vocabulary" in error.message


def test_a_model_without_a_tokenizer_refuses_constraints(tmp_path: Path) -> None:
    folder = make_tiny("llama", tmp_path / "bare", num_hidden_layers=1)
    with one_thread(), LLM(folder, dtype="float32", num_pages=64, num_threads=1) as llm:
        llm.engine.turn(Inbox())
        desk = Desk.__new__(Desk)
        desk.engine = llm.engine
        (error,) = desk.run(desk.submit(Constraint(kind="regex", text="a"), [5, 6]))
    assert isinstance(error, InvalidRequest)
    assert "tokenizer.json" in error.message


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_a_sample_that_is_cancelled_while_its_grammar_compiles_leaves_the_others_theirs(
    overlap: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release, compile_one = threading.Event(), GrammarSource.compile

    def held_up(source: GrammarSource, constraint: Constraint) -> object:
        assert constraint.kind != "choice" or release.wait(60)
        return compile_one(source, constraint)

    monkeypatch.setattr(GrammarSource, "compile", held_up)
    seed = random.randrange(2**31)
    path = make_tiny("llama", tmp_path, seed, tokenizer=True, vocab_size=517, num_hidden_layers=1)
    settings = {"dtype": "float32", "num_pages": 2000, "num_threads": 1, "overlap": overlap}
    with LLM(path, **settings) as llm:
        desk = Desk(llm.engine, path)
        # Beside one that is constrained and one that is free.
        beside = [
            desk.submit(Constraint(kind="regex", text="[a-z]{100}"), [5, 6, 8]),
            desk.submit(None, [5, 6, 9], stop=StopCriteria(max_tokens=200, ignore_eos=True)),
        ]
        outboxes = [llm.engine.turn(Inbox(submits=beside))]
        deadline = time.monotonic() + 60
        while llm.engine.sizes()["held"] and time.monotonic() < deadline:
            outboxes.append(llm.engine.turn(None))
        choice = Constraint(kind="choice", choices=("yes", "no"))
        submit = desk.submit(choice, [5, 6, 7], n=2)
        cancel = Cancel(gateway=0, request_id=submit.request_id, attempt=1, sample=0)
        outboxes.append(llm.engine.turn(Inbox(submits=[submit])))
        assert llm.engine.sizes()["held"] == 1
        outboxes.append(llm.engine.turn(Inbox(cancels=[cancel])))
        release.set()
        while any(llm.engine.sizes().values()) and time.monotonic() < deadline:
            outboxes.append(llm.engine.turn(None))
        batches = [batch for outbox in outboxes for batch in outbox.gateways]
        assert not any(batch.failed for batch in batches)
        own = [t for b in batches for t in b.all_tokens() if t.request_id == submit.request_id]
        assert {tokens.sample for tokens in own} == {1}
        ids = [token for tokens in own for token in tokens.ids if token != EOS_TOKEN_ID]
        assert desk.tokenizer.decode(ids) in ("yes", "no")
        ended = {(done.request_id, done.sample) for b in batches for done in b.finished}
        assert {(one.request_id, 0) for one in beside} | {(submit.request_id, 1)} <= ended
