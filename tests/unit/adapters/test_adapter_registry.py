"""The registry of adapters: what it refuses, what it keeps, and that changes do not get lost."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from weft.checkpoint.adapters.digest import adapter_digest
from weft.checkpoint.adapters.files import DRAFT_FOLDER
from weft.common.adapters.manifest import (
    AdapterExists,
    Entry,
    LoadUnderWay,
    Manifest,
    parse,
    serialise,
)
from weft.common.adapters.paths import components
from weft.common.adapters.registry import MANIFEST, Registry
from weft.contract.errors import AdapterError, ConfigError, InvalidRequest, Overloaded, WeftError
from weft.testing.models.adapter_files import CONFIG, WEIGHTS, write_adapter

MAX_BYTES = 1 << 20


def entry(name: str = "pirate", digest: bytes = b"\1" * 32, **values: object) -> Entry:
    fields: dict[str, object] = {
        "model": "tiny",
        "path": name,
        "state": "loading",
        "generation": 0,
        "created": 1.0,
        "until": 100.0,
        **values,
    }
    return Entry(name=name, digest=digest.hex(), **fields)  # type: ignore[arg-type]


def add(registry: Registry, path: str) -> bytes:
    return registry.add_copy(path, adapter_digest, MAX_BYTES)


def copies(root: Path) -> list[str]:
    folder = root / ".weft"
    return (
        sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.exists() else []
    )


@pytest.fixture
def seed() -> int:
    value = random.randrange(2**31)
    print(f"seed {value}")
    return value


def test_a_copy_is_named_by_its_content_and_does_not_change(tmp_path: Path, seed: int) -> None:
    registry = Registry(tmp_path)
    original = write_adapter(tmp_path / "pirates" / "first", seed)
    write_adapter(tmp_path / "same", seed)
    digest = add(registry, "pirates/first")
    assert digest == adapter_digest(original)
    assert add(registry, "same") == add(registry, "./pirates//first/") == digest
    kept = {name: (registry.directory(digest) / name).read_bytes() for name in (CONFIG, WEIGHTS)}
    write_adapter(original, seed + 1)
    other = add(registry, "pirates/first")
    assert other != digest
    for name, data in kept.items():
        assert (registry.directory(digest) / name).read_bytes() == data
    assert copies(tmp_path) == sorted([digest.hex(), other.hex()])


@pytest.mark.parametrize(
    "path",
    ["", "/etc", "..", "good/../../secret", "good/..", ".weft/x", "missing", "good\0x", "x" * 2000],
)
def test_paths_out_of_the_root_are_refused(tmp_path: Path, path: str, seed: int) -> None:
    root = tmp_path / "root"
    write_adapter(root / "good", seed)
    write_adapter(tmp_path / "secret", seed)
    registry = Registry(root)
    with pytest.raises(InvalidRequest) as caught:
        add(registry, path)
    assert caught.value.param == "path"
    assert copies(root) == []


@pytest.mark.parametrize("path", [".", "./", "././."])
def test_the_root_itself_is_refused_as_such(path: str) -> None:
    with pytest.raises(InvalidRequest, match="not the root itself"):
        components(path)


def test_absolute_paths_name_what_lies_below_the_root_alone(tmp_path: Path, seed: int) -> None:
    """Trainers name adapters so, and save them in folders like `.vllm_lora`."""
    root = tmp_path / "root"
    saved = write_adapter(root / ".saved" / "good", seed)
    digest = add(Registry(root), str(saved))
    assert copies(root) == [digest.hex()]
    for other in (tmp_path / "root-2" / "good", tmp_path / "good"):
        write_adapter(other, seed)
        with pytest.raises(InvalidRequest, match="absolute"):
            add(Registry(root), str(other))
    with pytest.raises(InvalidRequest):
        add(Registry(root), f"{root}/../good")
    with pytest.raises(InvalidRequest):
        add(Registry(root), str(root / ".weft" / digest.hex()))


@pytest.mark.parametrize("link", ["folder", "parent", WEIGHTS, CONFIG])
def test_links_are_not_followed(tmp_path: Path, link: str, seed: int) -> None:
    root, secret = tmp_path / "root", write_adapter(tmp_path / "secret" / "adapter", seed)
    inner = write_adapter(root / "team" / "mine", seed)
    if link == "folder":
        (root / "team" / "linked").symlink_to(secret)
        path = "team/linked"
    elif link == "parent":
        (root / "linked").symlink_to(tmp_path / "secret")
        path = "linked/adapter"
    else:
        (inner / link).unlink()
        (inner / link).symlink_to(secret / link)
        path = "team/mine"
    with pytest.raises(InvalidRequest, match="links"):
        add(Registry(root), path)
    assert copies(root) == []


def test_a_draft_adapter_is_copied_and_has_no_part_in_the_digest(tmp_path: Path, seed: int) -> None:
    registry = Registry(tmp_path)
    plain = add(registry, write_adapter(tmp_path / "mine", seed).name)
    copied = registry.directory(plain) / DRAFT_FOLDER
    assert not copied.exists()
    for attempt in (1, 2):  # The second one replaces the first one.
        draft = write_adapter(tmp_path / "mine" / DRAFT_FOLDER, seed + attempt)
        (draft / "notes.txt").write_text("stays")
        assert add(registry, "mine") == plain
        assert sorted(path.name for path in copied.iterdir()) == sorted([CONFIG, WEIGHTS])
        for name in (CONFIG, WEIGHTS):
            assert (copied / name).read_bytes() == (draft / name).read_bytes()
    assert copies(tmp_path) == [plain.hex()]
    shutil.rmtree(tmp_path / "mine" / DRAFT_FOLDER)
    add(registry, "mine")
    assert not copied.exists()
    assert adapter_digest(registry.directory(plain)) == plain


def test_copies_of_one_adapter_at_once(tmp_path: Path, seed: int) -> None:
    registry = Registry(tmp_path)
    draft = write_adapter(write_adapter(tmp_path / "mine", seed) / DRAFT_FOLDER, seed + 1)
    with ThreadPoolExecutor(4) as pool:
        digests = list(pool.map(lambda _: add(registry, "mine"), range(60)))
    assert len(set(digests)) == 1
    copied = registry.directory(digests[0]) / DRAFT_FOLDER
    assert (copied / WEIGHTS).read_bytes() == (draft / WEIGHTS).read_bytes()
    assert copies(tmp_path) == [digests[0].hex()]


@pytest.mark.parametrize("what", ["folder", "file", "missing", "large"])
def test_a_draft_adapter_leads_nowhere(tmp_path: Path, what: str, seed: int) -> None:
    root, secret = tmp_path / "root", write_adapter(tmp_path / "secret", seed)
    draft = write_adapter(root / "mine", seed) / DRAFT_FOLDER
    if what == "folder":
        draft.symlink_to(secret)
    else:
        (write_adapter(draft, seed) / WEIGHTS).unlink()
    if what == "file":
        (draft / WEIGHTS).symlink_to(secret / WEIGHTS)
    if what == "large":
        (draft / WEIGHTS).write_bytes(bytes(MAX_BYTES))
    with pytest.raises(InvalidRequest, match="too large" if what == "large" else "links"):
        add(Registry(root), "mine")
    assert copies(root) == []


def test_what_is_no_file_or_too_large_is_refused(tmp_path: Path, seed: int) -> None:
    registry = Registry(tmp_path)
    piped = write_adapter(tmp_path / "piped", seed)
    (piped / WEIGHTS).unlink()
    os.mkfifo(piped / WEIGHTS)
    with pytest.raises(InvalidRequest, match="not a file"):
        add(registry, "piped")
    large = write_adapter(tmp_path / "large", seed)
    with (large / WEIGHTS).open("r+b") as file:
        file.truncate(1 << 40)  # Which nobody waits for to be copied.
    with pytest.raises(InvalidRequest, match="too large"):
        add(registry, "large")
    (write_adapter(tmp_path / "half", seed) / CONFIG).unlink()
    with pytest.raises(InvalidRequest, match=CONFIG):
        add(registry, "half")
    assert copies(tmp_path) == []


def test_damaged_files_are_refused_by_the_path_that_was_given(tmp_path: Path, seed: int) -> None:
    registry = Registry(tmp_path)
    damaged = write_adapter(tmp_path / "damaged", seed)
    whole = (damaged / WEIGHTS).read_bytes()
    for data in (whole[:-1], whole[:5], b"\xff" * 8 + whole[8:], b""):
        (damaged / WEIGHTS).write_bytes(data)
        with pytest.raises(AdapterError) as caught:
            add(registry, "damaged")
        assert "damaged" in caught.value.message
        assert str(tmp_path) not in caught.value.message
    assert copies(tmp_path) == []


def test_a_name_goes_from_loading_to_serving_to_retired() -> None:
    first, second = entry(), entry(digest=b"\2" * 32)
    manifest = Manifest().begin(first, replaces=False, now=0)
    (first,) = manifest.entries
    assert manifest.of("pirate", "serving") is None
    manifest = manifest.commit(first, now=5)
    serving = manifest.of("pirate", "serving")
    assert serving is not None
    assert (serving.digest, serving.created) == (first.digest, 5)
    with pytest.raises(AdapterExists):
        manifest.begin(second, replaces=False, now=6)
    with pytest.raises(AdapterExists, match=f"for the model `{first.model}`"):
        manifest.begin(replace(first, model="another"), replaces=False, now=6)
    manifest = manifest.begin(second, replaces=True, now=6)
    assert manifest.of("pirate", "serving") == serving, "the old one serves until the new one does"
    loading = manifest.of("pirate", "loading")
    assert loading is not None
    assert loading.generation > first.generation
    manifest = manifest.commit(loading, now=7)
    assert [one.digest for one in manifest.in_state("retired")] == [first.digest]
    manifest = manifest.retire("pirate")
    assert not list(manifest.in_state("serving"))
    assert manifest.drop(manifest.entries).entries == ()


def test_a_failed_load_of_a_retired_content_leaves_it_to_its_requests() -> None:
    first, second = entry(), entry(digest=b"\2" * 32)
    manifest = Manifest()
    for number, one in enumerate((first, second)):
        manifest = manifest.begin(one, replaces=number > 0, now=number)
        loading = manifest.of("pirate", "loading")
        assert loading is not None
        manifest = manifest.commit(loading, now=number)
    (retired,) = manifest.in_state("retired")
    manifest = manifest.begin(first, replaces=True, now=2)
    loading = manifest.of("pirate", "loading")
    assert loading is not None
    assert [*manifest.drop([loading]).in_state("retired")] == [retired]
    # Once it serves again, it stands for those requests.
    manifest = manifest.commit(loading, now=3)
    assert [one.digest for one in manifest.in_state("serving")] == [first.digest]
    assert [one.digest for one in manifest.in_state("retired")] == [second.digest]


def test_the_same_content_need_not_be_loaded_again() -> None:
    manifest = Manifest().begin(entry(), replaces=False, now=0)
    manifest = manifest.commit(manifest.entries[0], now=0)
    assert manifest.begin(entry(), replaces=False, now=1) == manifest


def test_a_load_of_what_serves_already_can_pin_it() -> None:
    manifest = Manifest().begin(entry(), replaces=False, now=0)
    manifest = manifest.commit(manifest.entries[0], now=0)
    begun = manifest.begin(entry(is_pinned=True), replaces=False, now=1)
    states = [(one.state, one.is_pinned) for one in begun.entries]
    assert states == [("serving", False), ("loading", True)], "workers may have no room"
    assert begun.generation > manifest.generation, "or workers would not see it"
    loading = begun.of("pirate", "loading")
    assert loading is not None
    assert begun.drop([loading]).entries == manifest.entries
    pinned = begun.commit(loading, now=2)
    assert [(one.state, one.is_pinned) for one in pinned.entries] == [("serving", True)]
    assert pinned.begin(entry(), replaces=False, now=3) == pinned
    retired = begun.retire("pirate")
    assert [(one.state, one.is_pinned) for one in retired.entries] == [("retired", False)]


def test_a_name_that_moves_to_another_model_serves_until_then() -> None:
    """The same content may fit two models."""
    manifest = Manifest().begin(entry(), replaces=False, now=0)
    manifest = manifest.commit(manifest.entries[0], now=0)
    moving = manifest.begin(entry(model="twin"), replaces=True, now=1)
    serving, loading = moving.of("pirate", "serving"), moving.of("pirate", "loading")
    assert serving is not None
    assert serving.model == "tiny"
    assert loading is not None
    assert loading.model == "twin"
    assert moving.drop([loading]).of("pirate", "serving") == serving
    moved = moving.commit(loading, now=2).of("pirate", "serving")
    assert moved is not None
    assert moved.model == "twin"


def test_a_second_load_of_a_name_waits_for_the_first_or_its_end() -> None:
    manifest = Manifest().begin(entry(until=100), replaces=False, now=0)
    (first,) = manifest.entries
    other = entry(digest=b"\2" * 32, until=300)
    with pytest.raises(Overloaded) as caught:
        manifest.begin(other, replaces=True, now=99)
    assert caught.value.retryable
    manifest = manifest.begin(other, replaces=True, now=101)
    assert [one.digest for one in manifest.entries] == [other.digest]
    with pytest.raises(Overloaded):
        manifest.commit(first, now=102)


def test_a_load_that_is_renewed_is_not_given_up() -> None:
    manifest = Manifest().begin(entry(until=100), replaces=False, now=0)
    (first,) = manifest.entries
    renewed = manifest.renew(first, until=200)
    assert renewed != manifest, "or it would not be written"
    assert renewed.generation == manifest.generation, "workers have nothing to do"
    other = entry(digest=b"\2" * 32, until=300)
    with pytest.raises(LoadUnderWay):
        renewed.begin(other, replaces=True, now=150)
    served = renewed.commit(first, now=150)
    assert [(one.state, one.until) for one in served.entries] == [("serving", 0.0)]
    assert served.renew(first, until=300) == served, "it loads no more"
    assert served.drop([first]) == served
    assert renewed.drop([first]).entries == ()
    assert renewed.drop_given_up([], now=150) == renewed
    assert renewed.drop_given_up([first], now=250) == renewed, "its own"
    assert renewed.drop_given_up([], now=250).entries == ()


def test_an_unload_calls_off_a_load() -> None:
    manifest = Manifest().begin(entry(), replaces=False, now=0)
    (loading,) = manifest.entries
    manifest = manifest.retire("pirate")
    assert manifest.entries == ()
    with pytest.raises(Overloaded):
        manifest.commit(loading, now=1)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "commit", "retire", "drop"]),
        st.sampled_from(["a", "b"]),
        st.integers(0, 2),
    ),
    max_size=25,
)


@settings(max_examples=150, deadline=None)
@given(ACTIONS)
def test_a_name_never_means_two_things(actions: list[tuple[str, str, int]]) -> None:
    manifest = Manifest()
    for now, (action, name, number) in enumerate(actions):
        before = manifest
        try:
            if action == "begin":
                wanted = entry(name, bytes([number + 1]) * 32, until=now + 5.0)
                manifest = manifest.begin(wanted, replaces=number > 0, now=now)
            elif action == "commit" and (loading := manifest.of(name, "loading")) is not None:
                manifest = manifest.commit(loading, now)
            elif action == "retire":
                manifest = manifest.retire(name)
            elif action == "drop":
                manifest = manifest.drop(manifest.in_state("retired"))
        except WeftError:
            assert manifest is before
        for state in ("loading", "serving"):
            named = [one.name for one in manifest.in_state(state)]  # type: ignore[arg-type]
            assert len(set(named)) == len(named)
        assert manifest.generation == before.generation + (manifest.entries != before.entries)
        assert parse(serialise(manifest), "it") == manifest


def test_files_that_are_no_registry_are_refused(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    assert registry.read() == Manifest()
    good = serialise(Manifest(generation=1, entries=(entry(),)))
    for data in (
        b"{",
        b"[]",
        good.replace(b'"format": 1', b'"format": 2'),
        good.replace(b"pirate", b"../pirate", 1),
        good.replace(b"01" * 32, b"01" * 31),
        good.replace(b'"loading"', b'"loadin"'),
    ):
        assert data != good
        (tmp_path / MANIFEST).write_bytes(data)
        with pytest.raises(ConfigError, match=MANIFEST):
            registry.read()
        with pytest.raises(ConfigError):
            registry.change(lambda old: old.retire("x"))
        assert (tmp_path / MANIFEST).read_bytes() == data, "it is not overwritten"
    with pytest.raises(ConfigError, match="no such folder"):
        Registry(tmp_path / "missing")


ADDS_TEN = """
import sys
from pathlib import Path
from weft.common.adapters.manifest import Entry
from weft.common.adapters.registry import Registry

root, first = Path(sys.argv[1]), int(sys.argv[2])
for number in range(first, first + 10):
    wanted = Entry(
        name=f"a{number}",
        model="tiny",
        path="p",
        digest="01" * 32,
        state="loading",
        generation=0,
        created=1.0,
        until=100.0,
    )
    Registry(root).change(lambda old: old.begin(wanted, replaces=False, now=0))
"""


def test_changes_of_several_processes_all_count(tmp_path: Path) -> None:
    workers = [
        subprocess.Popen([sys.executable, "-c", ADDS_TEN, str(tmp_path), str(10 * number)])
        for number in range(3)
    ]
    for worker in workers:
        assert worker.wait(60) == 0
    manifest = Registry(tmp_path).read()
    assert manifest.generation == 30
    assert {one.name for one in manifest.entries} == {f"a{number}" for number in range(30)}
    assert sorted(one.generation for one in manifest.entries) == list(range(1, 31))


def test_a_lock_that_is_kept_is_an_error_and_not_a_wait(tmp_path: Path) -> None:
    registry, other = Registry(tmp_path, lock_timeout_s=0.05), Registry(tmp_path)

    def change(old: Manifest) -> Manifest:
        with pytest.raises(Overloaded, match="held"):
            registry.change(lambda manifest: manifest)
        return old

    other.change(change)
    registry.change(lambda manifest: manifest)


def test_a_registry_is_never_larger_than_what_is_read(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    long = "a" * 3900
    many = [entry(f"a{number}", path=long, state="serving") for number in range(4000)]
    registry.change(lambda old: replace(old, generation=1, entries=tuple(many)))
    more = [entry(f"b{number}", path=long, state="serving") for number in range(500)]
    with pytest.raises(Overloaded, match="unload some"):
        registry.change(lambda old: replace(old, generation=2, entries=(*old.entries, *more)))
    assert len(registry.read().entries) == 4000
    registry.change(lambda old: old.retire("a7"))
    assert registry.read().of("a7", "serving") is None


def test_copies_that_nobody_means_are_removed(tmp_path: Path, seed: int) -> None:
    registry = Registry(tmp_path)
    write_adapter(tmp_path / "one", seed)
    write_adapter(tmp_path / "two", seed + 1)
    kept, gone = add(registry, "one"), add(registry, "two")
    registry.change(lambda old: old.begin(entry(digest=kept), replaces=False, now=0))
    stale = tmp_path / ".weft" / "new-0011"
    fresh = tmp_path / ".weft" / "new-2233"
    for folder in (stale, fresh):
        folder.mkdir()
    long_ago = time.time() - 7200
    os.utime(stale, (long_ago, long_ago))
    registry.clean()
    assert copies(tmp_path) == sorted([kept.hex(), fresh.name])
    assert gone.hex() not in copies(tmp_path)
    assert (tmp_path / "two" / WEIGHTS).exists(), "what people put there is theirs"


def test_a_copy_that_was_half_removed_is_no_copy(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway dies while it tidies up; the same adapter is loaded later."""
    registry = Registry(tmp_path)
    write_adapter(tmp_path / "one", seed)
    digest = add(registry, "one")

    def die(folder: Path, **_: object) -> None:
        (Path(folder) / WEIGHTS).unlink()
        raise OSError("killed")

    with monkeypatch.context() as patched:
        patched.setattr("shutil.rmtree", die)
        registry.clean()
    assert add(registry, "one") == digest
    assert adapter_digest(registry.directory(digest)) == digest


def test_a_manifest_that_is_gone_is_not_an_empty_one(tmp_path: Path, seed: int) -> None:
    """A volume that is not mounted any more must not unload everything."""
    registry = Registry(tmp_path)
    assert registry.read() == Manifest()
    write_adapter(tmp_path / "one", seed)
    digest = add(registry, "one")
    registry.change(lambda old: old.begin(entry(digest=digest), replaces=False, now=0))
    manifest = registry.read()
    (tmp_path / MANIFEST).rename(tmp_path / "away")
    for call in (registry.read, registry.clean, lambda: registry.change(lambda old: old)):
        with pytest.raises(ConfigError, match="is gone"):
            call()
    assert copies(tmp_path) == [digest.hex()]
    (tmp_path / "away").rename(tmp_path / MANIFEST)
    assert registry.read() == manifest


def test_each_change_shows_in_the_stamp(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    stamps = [registry.stamp()]
    for number in range(5):
        wanted = replace(entry(f"a{number}"))
        registry.change(lambda old, wanted=wanted: old.begin(wanted, replaces=False, now=0))
        stamps.append(registry.stamp())
    assert len(set(stamps)) == len(stamps)
