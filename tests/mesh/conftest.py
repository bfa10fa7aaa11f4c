"""Meshes for the tests of this folder: each kind is started once, and one at a time runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from weft.checkpoint.demo import DEMO_NAME
from weft.checkpoint.resolve import resolve_model
from weft.testing.meshes.local_mesh import LocalMesh
from weft.testing.meshes.mesh_kinds import (
    DRAFTED_TOKENS,
    KINDS,
    NUM_TOKENS,
    PREEMPTED_TOKENS,
    TINY_KINDS,
)
from weft.testing.meshes.mesh_prompts import COVER, DRAFTED, PROMPTS, SOME
from weft.testing.meshes.text_reference import TextReference
from weft.testing.meshes.tiny_mesh import Greedy, TinyMesh


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"mesh(kind): runs on a mesh; kinds: {', '.join(KINDS)}")


def kind_of(item: pytest.Item) -> str:
    """Of the mesh that a test runs on; empty = none that is shared."""
    marker = item.get_closest_marker("mesh")
    return "" if marker is None else str(marker.args[0])


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the tests on shared meshes where the first of them is, those of one mesh together."""
    order = {name: number for number, name in enumerate(KINDS)}
    shared = sorted(filter(kind_of, items), key=lambda item: order[kind_of(item)])
    if shared:
        first = next(index for index, item in enumerate(items) if kind_of(item))
        others = [item for item in items[first:] if not kind_of(item)]
        items[first:] = [*shared, *others]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Stops a shared mesh behind its last test: even idle ones take their share of the cores."""
    yield
    meshes = item.config.stash.get(MESHES, None)
    if meshes is not None and (nextitem is None or not kind_of(nextitem)):
        meshes.stop()


class Meshes:
    """The mesh that runs now."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders
        self._kind = ""
        self._mesh: LocalMesh | None = None

    def get(self, kind: str) -> LocalMesh:
        """A mesh of this kind; one of another kind is stopped."""
        if self._mesh is None or kind != self._kind:
            self.stop()
            self._kind = kind
            mesh = TinyMesh if kind in TINY_KINDS else LocalMesh
            self._mesh = mesh(self._folders.mktemp(kind), *KINDS[kind])
            self._mesh.wait_ready()
        return self._mesh

    def stop(self) -> None:
        mesh, self._mesh = self._mesh, None
        if mesh is not None:
            assert mesh.stop() == 0, mesh.text


MESHES = pytest.StashKey[Meshes]()


@pytest.fixture(scope="session")
def meshes(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory, rest_binary: Path
) -> Iterator[Meshes]:
    meshes = Meshes(tmp_path_factory)
    pytestconfig.stash[MESHES] = meshes
    yield meshes
    meshes.stop()


@pytest.fixture
def mesh(request: pytest.FixtureRequest, meshes: Meshes) -> Iterator[LocalMesh]:
    """The mesh of the kind that the test is marked with: whole before, idle after it."""
    mesh = meshes.get(request.node.get_closest_marker("mesh").args[0])
    mesh.wait_healthy()
    yield mesh
    mesh.wait_idle()


@pytest.fixture
def greedy(mesh: TinyMesh) -> Greedy:
    """Transformers' greedy continuations, of a tiny model."""
    return Greedy(mesh.model_dir)


@pytest.fixture(scope="session")
def reference(pytestconfig: pytest.Config) -> TextReference:
    """Transformers' own greedy answers in float32."""
    folder = pytestconfig.cache.mkdir("weft-text-reference")
    made = TextReference(resolve_model(DEMO_NAME), folder)
    prompts = PROMPTS if pytestconfig.getoption("--full") else SOME
    made.prepare(
        [
            *((prompt, NUM_TOKENS, False) for prompt in prompts),
            *((prompt, PREEMPTED_TOKENS, True) for prompt in COVER),
            *((prompt, DRAFTED_TOKENS, True) for prompt in DRAFTED),
        ]
    )
    return made
