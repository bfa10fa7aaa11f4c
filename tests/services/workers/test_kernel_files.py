"""Compiled kernels that one worker takes of another: names, bounds, and what Triton finds then."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path

import pytest
from weft.common.worker import kernel_files
from weft.common.worker.kernel_files import (
    KernelFolders,
    KernelKeeper,
    digest_of,
    kernel_version,
    used_kernels,
)
from weft.contract.errors import InvalidRequest


def folders(at: Path) -> KernelFolders:
    return KernelFolders(at / "triton", at / "native")


def send(source: KernelFolders, target: KernelFolders, since: float = 0.0) -> list[str]:
    names = []
    with KernelKeeper(target) as keeper:
        for name, path in used_kernels(source, since, os.getpid()):
            content = path.read_bytes()
            keeper.take(name, content, digest_of(content))
            names.append(name)
    return names


def keep(target: KernelFolders, files: dict[str, bytes]) -> None:
    with KernelKeeper(target) as keeper:
        for name, content in files.items():
            keeper.take(name, content, digest_of(content))


def key() -> str:
    return random.randbytes(20).hex()


def test_triton_finds_what_came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Entries are written and read by Triton's own cache."""
    pytest.importorskip("triton")
    from triton.runtime.cache import FileCacheManager
    from weft.kernels.shared.kernel_cache import UsedKernels

    source, target = folders(tmp_path / "there"), folders(tmp_path / "here")
    used, unused, lone = key(), key(), key()
    content = {"k.cubin": random.randbytes(5000), "k.json": b'{"shared": 0}'}
    monkeypatch.setenv("TRITON_CACHE_DIR", str(source.triton))
    for entry in (used, unused):
        cache = FileCacheManager(entry)
        cache.put_group("k.json", {name: cache.put(data, name) for name, data in content.items()})
    FileCacheManager(lone).put(b"a launcher", "launcher.so")
    for path in source.triton.iterdir():
        os.utime(path, (1.0, 1.0))
    began_at = time.time() - 1.0
    assert send(source, target, began_at) == []
    assert UsedKernels(used).get_group("k.json") is not None
    assert UsedKernels(lone).get_file("launcher.so") is not None
    names = send(source, target, began_at)
    assert {name.split("/")[1] for name in names} == {used, lone}
    monkeypatch.setenv("TRITON_CACHE_DIR", str(target.triton))
    found = FileCacheManager(used).get_group("k.json")
    assert found is not None
    assert {name: Path(path).read_bytes() for name, path in found.items()} == content
    assert all(Path(path).parent == target.triton / used for path in found.values())
    assert FileCacheManager(unused).get_group("k.json") is None
    assert not list(target.triton.glob(".new-*"))


def test_files_that_are_there_stay(tmp_path: Path) -> None:
    target, entry, library = folders(tmp_path), key(), random.randbytes(16).hex()
    own = target.triton / entry / "k.cubin"
    own.parent.mkdir(parents=True)
    own.write_bytes(b"own")
    with KernelKeeper(target) as keeper:
        for name in (f"triton/{entry}/k.cubin", f"native/{library}.so"):
            keeper.take(name, b"theirs", digest_of(b"theirs"))
    assert own.read_bytes() == b"own"
    assert (target.native / f"{library}.so").read_bytes() == b"theirs"


def test_paths_of_another_host_are_not_kept(tmp_path: Path) -> None:
    target, entry = folders(tmp_path), key()
    group = json.dumps({"child_paths": {"k.cubin": "/etc/passwd", "../x": "/etc/shadow"}}).encode()
    with KernelKeeper(target) as keeper:
        keeper.take(f"triton/{entry}/k.cubin", b"code", digest_of(b"code"))
        keeper.take(f"triton/{entry}/__grp__k.json", group, digest_of(group))
    found = json.loads((target.triton / entry / "__grp__k.json").read_text())["child_paths"]
    assert found == {"k.cubin": str(target.triton / entry / "k.cubin")}


@pytest.mark.parametrize(
    "name",
    [
        *("triton/../../x", f"triton/{'a' * 20}/../x", f"triton/{'a' * 20}/.hidden", "native/x.so"),
        *(f"/native/{'a' * 32}.so", f"native/{'a' * 32}.so/x", f"triton/{'a' * 20}/", "", "triton"),
        *(f"triton/{'a' * 20}/a/b", f"triton/{'a' * 20}/a\n", f"native/{'A' * 32}.so"),
    ],
)
def test_other_names_are_refused(name: str, tmp_path: Path) -> None:
    files = {f"native/{'b' * 32}.so": b"good", name: b"code"}
    with pytest.raises(InvalidRequest):
        keep(folders(tmp_path), files)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("bound", ["MAX_FILES", "MAX_FILE_BYTES", "MAX_BYTES"])
def test_nothing_is_kept_of_too_much(
    bound: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_files, bound, 3)
    files = {f"triton/{key()}/k.cubin": b"abcd" if "FILE_" in bound else b"a" for _ in range(4)}
    with pytest.raises(InvalidRequest, match="too"):
        keep(folders(tmp_path), files)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_bytes_that_changed_on_their_way_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="digest"), KernelKeeper(folders(tmp_path)) as keeper:
        keeper.take(f"triton/{key()}/k.cubin", b"code", digest_of(b"Code"))


def test_a_loaded_library_is_among_those_in_use(tmp_path: Path) -> None:
    from weft.kernels.shared.build import load_native

    source = tmp_path / "one.c"
    source.write_text("int one(void) { return 1; }")
    used, other = folders(tmp_path / "a"), folders(tmp_path / "b")
    library = load_native(source, folder=used.native)
    if library.path is None:
        pytest.skip(str(library.reason))
    (used.native / f"{'0' * 32}.so").write_bytes(b"not loaded")
    assert send(used, other) == [f"native/{library.path.name}"]
    assert load_native(source, folder=other.native, compiler="cc").path is not None
    assert (other.native / library.path.name).read_bytes() == library.path.read_bytes()


def test_the_version_names_triton_and_python() -> None:
    assert kernel_version().startswith("triton ")
