"""A request that another owner has begun: it goes on as if it had never been moved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from dataclasses import replace as changed
from pathlib import Path
from typing import Any

import pytest
from weft.contract.messages import Inbox
from weft.contract.request import SamplingParams, StopCriteria, TokenLogprob
from weft.contract.submits import Finished, Ping, SampleProgress, Submit
from weft.contract.timeline import FillCandidate
from weft.engine.loop.groups import first_to_run
from weft.engine.loop.llm import LLM
from weft.engine.loop.outgoing import Outgoing
from weft.testing.models.threads import one_thread
from weft.testing.models.tiny_models import make_tiny

pytestmark = pytest.mark.usefixtures("overlap")

PAGE_SIZE = 8
NUM_NEW = 24
PROMPT = [7, 3, 21, 9, 30, 11, 2, 17, 5, 29, 8, 14, 33, 6, 19, 27, 4, 12, 25, 31]
PENALISED = SamplingParams(
    temperature=0.8,
    seed=11,
    repetition_penalty=1.3,
    presence_penalty=0.5,
    frequency_penalty=0.7,
    logit_bias={5: 1.5},
)
KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "seeded": SamplingParams(temperature=1.0, seed=2**64 - 3, top_p=0.9),
    "penalised": PENALISED,
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    return make_tiny("llama", folder, seed=5, vocab_size=40, num_hidden_layers=2)


def make_llm(model_dir: Path, **settings: Any) -> LLM:
    sizes = {"page_size": PAGE_SIZE, "num_pages": 200, "prefill_chunk_tokens": 16}
    return LLM(model_dir, dtype="float32", num_threads=1, **(sizes | settings))


@pytest.fixture(scope="module")
def owners(model_dir: Path, overlap: None) -> Iterator[tuple[LLM, LLM]]:
    """Two workers."""
    with one_thread(), make_llm(model_dir) as first, make_llm(model_dir) as second:
        yield first, second


@dataclass
class Answer:
    """What the samples of one attempt were told."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    first_index: dict[int, int] = field(default_factory=dict)
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)
    finished: dict[int, Finished] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)


def take(llm: LLM, answer: Answer, inbox: Inbox | None) -> None:
    """One turn, and what it told."""
    for batch in llm.engine.turn(inbox).gateways:
        answer.failures += [failed.failure.reason for failed in batch.failed]
        new_samples = {tokens.sample for tokens in batch.all_tokens()} - answer.tokens.keys()
        assert batch.has_first_tokens == bool(new_samples)
        for tokens in batch.all_tokens():
            start = answer.first_index.setdefault(tokens.sample, tokens.first_index)
            known = answer.tokens.setdefault(tokens.sample, [])
            assert tokens.first_index == start + len(known)
            known += tokens.ids
            answer.logprobs.setdefault(tokens.sample, []).extend(tokens.logprobs)
        answer.finished |= {finished.sample: finished for finished in batch.finished}


def run(llm: LLM, submit: Submit, num_ends: int) -> Answer:
    """Runs a submit until so many samples have ended, or it failed."""
    answer = Answer()
    inbox: Inbox | None = Inbox(submits=[submit])
    while len(answer.finished) < num_ends and not answer.failures:
        take(llm, answer, inbox)
        inbox = None
    if llm.engine.pipeline.num_steps:
        llm.engine.turn()
    assert llm.engine.is_idle
    return answer


def submit_of(params: SamplingParams, **fields: Any) -> Submit:
    stop = StopCriteria(max_tokens=NUM_NEW, ignore_eos=True)
    values: dict[str, Any] = {"attempt": 1, "stop": stop} | fields
    return Submit(gateway=1, request_id="r", prompt=list(PROMPT), sampling=params, **values)


def progress(tokens: dict[int, Sequence[int]], ended: Sequence[int] = ()) -> list[SampleProgress]:
    return [
        *(SampleProgress(sample=i, tokens=list(ids)) for i, ids in tokens.items()),
        *(SampleProgress(sample=i, tokens=[], is_finished=True) for i in ended),
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_before", [1, 7, 12, NUM_NEW - 1])
def test_the_rest_is_what_it_would_have_been(
    owners: tuple[LLM, LLM], kind: str, num_before: int
) -> None:
    first, second = owners
    whole = run(first, submit_of(KINDS[kind], top_logprobs=2, cache_salt=f"{num_before}"), 1)
    before = whole.tokens[0][:num_before]
    resumed = run(
        second,
        submit_of(
            KINDS[kind],
            attempt=2,
            top_logprobs=2,
            cache_salt=f"{kind}-{num_before}",
            progress=progress({0: before}),
        ),
        1,
    )
    assert resumed.first_index[0] == num_before
    assert resumed.tokens[0] == whole.tokens[0][num_before:]
    ours, theirs = resumed.logprobs[0], whole.logprobs[0][num_before:]
    assert [entry.token_id for entry in ours] == [entry.token_id for entry in theirs]
    assert [entry.logprob for entry in ours] == pytest.approx([e.logprob for e in theirs], abs=1e-4)
    end = resumed.finished[0]
    assert (end.reason, end.completion_tokens) == ("length", NUM_NEW)
    assert end.cached_prompt_tokens == 0
    assert end.timeline.first_token_s is not None
    assert end.timeline.local_prefill_tokens == len(PROMPT) + num_before


def test_a_ping_tells_what_is_unknown(owners: tuple[LLM, LLM]) -> None:
    """A submit in the same batch is known; one that has ended, another attempt or Session not."""
    llm, submit = owners[0], submit_of(KINDS["greedy"])
    key = (submit.request_id, submit.attempt)

    def unknown(inbox: Inbox, gateway: int = 1) -> list[tuple[str, int]]:
        inbox.pings.append(Ping(gateway=gateway, nonce=5, asked=[key, ("r", 2)]))
        (batch,) = [b for b in llm.engine.turn(inbox).gateways if b.gateway == gateway]
        (pong,) = batch.pongs
        assert pong.nonce == 5
        return pong.unknown

    assert unknown(Inbox(submits=[submit])) == [("r", 2)]
    assert unknown(Inbox()) == [("r", 2)]
    assert unknown(Inbox(), gateway=2) == [key, ("r", 2)]
    while not llm.engine.is_idle:
        llm.engine.turn()
    assert unknown(Inbox()) == [key, ("r", 2)]


def test_only_unfinished_samples_go_on(owners: tuple[LLM, LLM]) -> None:
    first, second = owners
    params = changed(KINDS["seeded"], n=4)
    whole = run(first, submit_of(params), 4)
    assert len({tuple(ids) for ids in whole.tokens.values()}) == 4
    # Sample 0 has ended, 1 has not begun, 2 and 3 are at different places.
    before = {2: whole.tokens[2][:5], 3: whole.tokens[3][:17]}
    resumed = run(second, submit_of(params, attempt=2, progress=progress(before, [0])), 3)
    assert set(resumed.tokens) == set(resumed.finished) == {1, 2, 3}
    for sample, start in ((1, 0), (2, 5), (3, 17)):
        assert resumed.first_index[sample] == start
        assert resumed.tokens[sample] == whole.tokens[sample][start:]
        assert resumed.finished[sample].completion_tokens == NUM_NEW


def test_a_sample_that_had_ended_already_is_only_reported(owners: tuple[LLM, LLM]) -> None:
    first, second = owners
    params = changed(KINDS["seeded"], n=3)
    whole = run(first, submit_of(params, cache_salt="ended"), 3)
    stop_token = next(token for token in whole.tokens[1] if token != whole.tokens[0][-1])
    num_before = whole.tokens[1].index(stop_token) + 1
    stop = StopCriteria(max_tokens=NUM_NEW, ignore_eos=True, stop_token_ids=(stop_token,))
    before = {0: whole.tokens[0], 1: whole.tokens[1][:num_before]}
    submit = submit_of(params, attempt=2, stop=stop, progress=progress(before, [2]))
    resumed = run(second, submit, 2)
    assert not resumed.tokens
    by_length, by_token = resumed.finished[0], resumed.finished[1]
    assert (by_length.reason, by_length.completion_tokens) == ("length", NUM_NEW)
    assert (by_token.reason, by_token.stop_token_id) == ("stop", stop_token)
    assert by_token.completion_tokens == num_before


def test_the_first_sample_left_to_run_has_the_fillers(owners: tuple[LLM, LLM]) -> None:
    intake = owners[0].engine.parts.intake
    submit = submit_of(
        changed(KINDS["greedy"], n=3),
        attempt=2,
        progress=progress({0: PROMPT[:1] * NUM_NEW}),
        candidates=[FillCandidate(worker_id="p", address="p", epoch=1)],
    )
    leader = first_to_run(intake.from_submit(submit, 0.0), intake, Outgoing(), 0.0)
    assert leader is not None
    assert (leader.sample, list(leader.unforked_samples)) == (1, [2])
    assert leader.sources.candidates == submit.candidates


def test_a_stop_token_before_min_tokens_did_not_end_it(owners: tuple[LLM, LLM]) -> None:
    llm = owners[0]
    whole = run(llm, submit_of(KINDS["greedy"]), 1).tokens[0]
    stop = StopCriteria(
        max_tokens=NUM_NEW, min_tokens=10, ignore_eos=True, stop_token_ids=(whole[3],)
    )
    submit = submit_of(
        KINDS["greedy"], attempt=2, stop=stop, progress=progress({0: whole[:4]}), cache_salt="min"
    )
    resumed = run(llm, submit, 1)
    assert resumed.first_index[0] == 4
    # Until there are ten tokens the stop token is masked.
    assert whole[3] not in resumed.tokens[0][:6]
    assert resumed.finished[0].completion_tokens >= 10


def test_cached_pages_are_counted_up_to_the_prompt(owners: tuple[LLM, LLM]) -> None:
    llm = owners[0]
    whole = run(llm, submit_of(KINDS["greedy"], cache_salt="warm"), 1).tokens[0]
    submit = submit_of(
        KINDS["greedy"], attempt=2, cache_salt="warm", progress=progress({0: whole[:20]})
    )
    resumed = run(llm, submit, 1)
    assert resumed.tokens[0] == whole[20:]
    assert resumed.finished[0].cached_prompt_tokens == len(PROMPT)
    assert resumed.finished[0].timeline.matched_tokens == len(PROMPT) + 19


@pytest.mark.parametrize(
    "entries",
    [
        progress({1: [3]}),
        progress({0: [40]}),
        progress({0: [3] * (NUM_NEW + 1)}),
        progress({}, [0]),
    ],
    ids=["sample", "token", "length", "nothing"],
)
def test_nonsense_is_refused(owners: tuple[LLM, LLM], entries: list[SampleProgress]) -> None:
    submit = submit_of(KINDS["greedy"], attempt=2, progress=entries)
    assert run(owners[0], submit, 1).failures == ["INVALID_REQUEST"]


def test_resumed_requests_are_preempted_and_come_back(model_dir: Path) -> None:
    with one_thread(), make_llm(model_dir) as large, make_llm(model_dir, num_pages=14) as small:
        params = changed(KINDS["seeded"], n=2)
        wholes = [run(large, submit_of(changed(params, seed=seed)), 2).tokens for seed in range(2)]
        submits = [
            changed(
                submit_of(
                    changed(params, seed=seed),
                    attempt=2,
                    progress=progress({0: tokens[0][:4], 1: tokens[1][:9]}),
                ),
                request_id=f"r{seed}",
            )
            for seed, tokens in enumerate(wholes)
        ]
        told: dict[tuple[str, int], list[int]] = {}
        num_ended = 0
        inbox: Inbox | None = Inbox(submits=submits)
        while num_ended < 4:
            for batch in small.engine.turn(inbox).gateways:
                for tokens in batch.all_tokens():
                    told.setdefault((tokens.request_id, tokens.sample), []).extend(tokens.ids)
                num_ended += len(batch.finished)
            inbox = None
        assert small.engine.scheduler.num_preemptions
        for seed, tokens in enumerate(wholes):
            assert told[f"r{seed}", 0] == tokens[0][4:]
            assert told[f"r{seed}", 1] == tokens[1][9:]


def test_drain_hands_waiting_requests_back_and_lets_others_finish(model_dir: Path) -> None:
    with one_thread(), make_llm(model_dir, max_running_requests=1) as llm:
        running = submit_of(KINDS["greedy"])
        waiting = changed(submit_of(changed(KINDS["greedy"], n=2)), request_id="w")
        answer = Answer()
        take(llm, answer, Inbox(submits=[running, waiting]))
        take(llm, answer, Inbox(drains=[True]))
        assert answer.failures == ["DRAINING"]
        take(llm, answer, Inbox(submits=[changed(running, request_id="late")]))
        assert answer.failures == ["DRAINING", "DRAINING"]
        while not answer.finished:
            take(llm, answer, None)
        assert len(answer.tokens[0]) == NUM_NEW
        assert llm.engine.is_idle


def test_what_still_runs_is_handed_back_whole(owners: tuple[LLM, LLM], model_dir: Path) -> None:
    params = changed(KINDS["seeded"], n=2)
    whole = run(owners[0], submit_of(params, cache_salt="hand-back"), 2).tokens
    with one_thread(), make_llm(model_dir) as draining:
        answer = Answer()
        take(draining, answer, Inbox(submits=[submit_of(params)]))
        while len(answer.tokens.get(1, ())) < 5:
            take(draining, answer, None)
        take(draining, answer, Inbox(drains=[True], hand_back=True))
        assert answer.failures == ["DRAINING"]
        assert draining.engine.is_idle
    submit = submit_of(params, attempt=2, progress=progress(dict(answer.tokens)))
    resumed = run(owners[1], submit, 2)
    for sample in (0, 1):
        assert answer.tokens[sample] + resumed.tokens[sample] == whole[sample]
