"""How adapters' configurations are matched with names, and which expressions are let in."""

from __future__ import annotations

import re
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from weft.checkpoint.adapters import patterns
from weft.checkpoint.adapters.names import parse_name
from weft.checkpoint.adapters.patterns import is_quick
from weft.checkpoint.adapters.peft_config import PeftConfig
from weft.contract.errors import AdapterError

UNSLOTH = (
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?"
    r"(?:k_proj|v_proj|q_proj|out_proj|fc1|fc2).*?)|(?:\bmodel\.layers\.[\d]{1,}\."
    r"(?:self_attn|attention|attn|mlp)\.(?:(?:q_proj|k_proj|v_proj|o_proj|down_proj)))"
)


@pytest.mark.parametrize(
    "pattern",
    [
        "q_proj",
        r".*\.(q|v)_proj",
        r"model\.layers\.(\d|1\d)\.self_attn\.[qkvo]_proj",
        r"^model.layers.\d+.mlp.(?:gate|up)_proj$",
        r"(.*\.)?layers\.[0-9]{1,2}\.[^.]+\.(?P<leaf>k_proj)",
        r"[]a]+\)x*",
        UNSLOTH,
    ],
)
def test_expressions_as_they_are_in_use_are_let_in(pattern: str) -> None:
    assert is_quick(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+$",
        "(a*)*b",
        "(a|a)*b",
        "((a+)b?){2,}",
        "(?:(?:a?){30})b",
        "(a{2,}){2,}",
        ".*.*.*.*.*.*.*x",
        "a" * 5000,
    ],
)
def test_expressions_that_may_take_very_long_are_not(pattern: str) -> None:
    assert not is_quick(pattern)


def test_a_match_that_takes_long_is_given_up_and_holds_nobody_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A busy machine lets a process stand still for most of a second.
    monkeypatch.setattr(patterns, "MATCH_S", 2.0)
    name = "model.layers.0.self_attn.q_proj"
    pattern = "".join(f"{re.escape(letter)}(|()|())" for letter in name) + "(?=X)"
    slow, ticks, has_ended = config(target_modules=pattern), list[float](), threading.Event()

    def tick() -> None:
        while not has_ended.wait(1e-3):
            ticks.append(time.monotonic())

    ticking = threading.Thread(target=tick)
    ticking.start()
    try:
        with pytest.raises(AdapterError, match="takes longer than"):
            slow.is_targeted([name])
    finally:
        has_ended.set()
        ticking.join()
    assert len(ticks) > 5, "Python's lock was held"


@pytest.mark.parametrize(
    "fields",
    [
        {"rank_pattern": {"(?i)q_proj": 4}},
        {"target_modules": ["q_proj"], "layers_pattern": "(?P<layer>h)", "layers_to_transform": 0},
    ],
)
def test_expressions_that_are_none_where_they_are_used_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(AdapterError, match="is no regular expression"):
        config(**fields)


def repeats_within_repeats(parsed: Any) -> int:
    """How deep they are nested, as Python's own parser sees an expression."""
    if not isinstance(parsed, (list, tuple, re._parser.SubPattern)):  # type: ignore[attr-defined]
        return 0
    parts = list(parsed)
    inner = max((repeats_within_repeats(part) for part in parts), default=0)
    is_repeat = len(parts) == 2 and str(parts[0]).endswith("_REPEAT")
    return inner + int(is_repeat and parts[1][1] > 1)


@given(st.text(alphabet="ab(){},|*+?.[]\\^1", max_size=24))
def test_matching_what_is_let_in_comes_to_an_end(pattern: str) -> None:
    is_let_in = is_quick(pattern)
    with warnings.catch_warnings(), suppress(re.error, RecursionError, OverflowError):
        warnings.simplefilter("ignore", FutureWarning)
        compiled = re.compile(pattern)
        depth = repeats_within_repeats(re._parser.parse(pattern))  # type: ignore[attr-defined]
        if is_let_in:
            compiled.fullmatch("a" * 40 + "!")
            assert depth <= 1


def config(**fields: Any) -> PeftConfig:
    raw = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, **fields}
    return PeftConfig.parse(raw, Path("adapter"))


NAMES = ["model.layers.1.self_attn.q_proj"]


def test_modules_are_targeted_as_in_peft() -> None:
    for targets in (["q_proj"], ["layers.1.self_attn.q_proj"], "all-linear", "ALL-LINEAR", NAMES):
        assert config(target_modules=targets).is_targeted(NAMES)
    for targets in (["k_proj"], ["proj"], "q_proj", r"layers\.1\..*", [], ["layers.1"]):
        assert not config(target_modules=targets).is_targeted(NAMES)
    assert config().is_targeted(NAMES)
    assert not config(target_modules=["q_proj"], layers_to_transform=[0, 2]).is_targeted(NAMES)
    assert config(target_modules=["q_proj"], layers_to_transform=1).is_targeted(NAMES)
    blocks = {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "blocks"}
    assert not config(**blocks).is_targeted(NAMES)
    assert not config(target_modules=["q_proj"], exclude_modules=["q_proj"]).is_targeted(NAMES)
    assert not config(target_modules=["q_proj"], exclude_modules=".*q.*").is_targeted(NAMES)


def test_the_first_pattern_that_matches_counts() -> None:
    ranks = {"k_proj": 2, r"layers\.\d\.self_attn\.q_proj": 4, "q_proj": 6}
    assert config(rank_pattern=ranks).rank_of(NAMES) == 4
    assert config(rank_pattern={"proj": 4}).rank_of(NAMES) == 8
    assert config(alpha_pattern={"q_proj": 3}).scaling_of(NAMES, 4) == 0.75
    assert config(use_rslora=True).scaling_of(NAMES, 16) == 4.0


@given(st.text(alphabet="abl_AB.0127mode", max_size=60))
def test_any_name_is_taken_apart(name: str) -> None:
    parsed = parse_name(f"base_model.model.{name}")
    assert parsed.part
    assert parsed.module.names


def test_fields_that_matter_to_training_alone_are_let_in() -> None:
    config(lora_dropout=0.3, init_lora_weights="gaussian", bias="none", task_type="CAUSAL_LM")
    config(init_lora_weights=False)
    for kind in ("pissa", "pissa_niter_16", "olora", "corda", "loftq", "lora_ga"):
        # PEFT changes the base's weights with them.
        with pytest.raises(AdapterError, match=f"init_lora_weights: {kind}"):
            config(init_lora_weights=kind)
    with pytest.raises(AdapterError, match="kasa_config: KaSA is not supported"):
        config(kasa_config={"beta": 1})
