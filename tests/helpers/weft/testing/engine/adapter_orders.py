"""Adapters that are loaded and unloaded at random while requests use them, in one engine."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from weft.contract.adapters import AdapterOrder
from weft.engine.loop.engine import Engine
from weft.testing.engine.engine_pair import EnginePair, ManualClock, make_engine
from weft.testing.models.lora_reference import BASE, PeftModels, unload_all

NUM_NEW = 8
VOCAB = 517


def check_random_orders(
    peft: PeftModels,
    prepare: Callable[[Engine, random.Random], object] = lambda engine, rng: None,
    num_turns: int = 400,
    **settings: Any,
) -> None:
    """Three places for all adapters: every text is PEFT's, and nothing is left in the end.

    Args:
        peft: Adapters and their texts.
        prepare: Called with the engine before anything runs.
        num_turns: Of the engine, in which orders and requests come; more until one is evicted.
        **settings: Of the engine.
    """
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    rng = random.Random(seed)
    right: dict[tuple[bytes, int], list[int]] = {}
    prompts: list[list[int]] = []
    while len(prompts) < 3:
        prompt = [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 40))]
        texts = {one: peft.clear_greedy(one, prompt, NUM_NEW) for one in (BASE, *peft.digests)}
        if min(ahead for _, ahead in texts.values()) > 1e-5:
            right |= {(adapter, len(prompts)): ids for adapter, (ids, _) in texts.items()}
            prompts.append(prompt)
    clock = ManualClock()
    given = {"enable_lora": True, "overlap": "on", "max_loras": 3, "num_pages": 40, **settings}
    engine = make_engine(peft.model_dir, "decode", clock, **given)
    prepare(engine, rng)
    pair = EnginePair(engine, [], clock)
    wanted: dict[str, list[int]] = {}
    manager = engine.adapters
    assert manager is not None
    num_orders = 0
    try:
        while num_turns > 0 or not engine.counters()["adapter_evictions"]:
            num_turns -= 1
            assert num_turns > -4000, "no adapter was evicted"
            if rng.random() < 0.1:
                digest = rng.choice(peft.digests)
                num_orders += 1
                action: Any = "unload" if rng.random() < 0.3 else "load"
                directory = str(peft.directories[digest])
                order = AdapterOrder(
                    query=num_orders, action=action, digest=digest, directory=directory
                )
                pair.send(adapter_orders=[order])
            served = [digest for digest in peft.digests if manager.serves(digest)]
            if rng.random() < 0.3 and len(wanted) - num_finished(pair) < 12:
                # An unload may be in the same inbox: it comes first.
                gone = {o.digest for o in pair._to_owner.adapter_orders if o.action == "unload"}
                adapter = rng.choice([BASE, *(d for d in served if d not in gone)])
                index = rng.randrange(len(prompts))
                request = pair.submit(prompts[index], NUM_NEW, adapter=adapter)
                wanted[request] = right[adapter, index]
            pair.turn()
        found = dict(zip(wanted, pair.finish(*wanted), strict=True))
        wrong = {name: (found[name], wanted[name]) for name in found if found[name] != wanted[name]}
        assert not wrong, f"seed {seed}: {wrong}"
        pair.settle()
        unload_all(engine)
    finally:
        pair.close()


def num_finished(pair: EnginePair) -> int:
    """Number of requests that have ended."""
    return sum(bool(answer.finished) for answer in pair.answers.values())
