"""Meshes for the tests of this folder: each kind is started once, and one at a time runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from local_mesh import LocalMesh
from mesh_kinds import DRAFTED_TOKENS, KINDS, NUM_TOKENS, PREEMPTED_TOKENS
from mesh_prompts import COVER, DRAFTED, PROMPTS
from text_reference import TextReference
from weft.engine.models.demo import DEMO_NAME, resolve_model


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", f"mesh(kind): runs on a mesh; kinds: {', '.join(KINDS)}")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the tests of one mesh one after the other."""

    def kind(item: pytest.Item) -> str:
        marker = item.get_closest_marker("mesh")
        return "" if marker is None else str(marker.args[0])

    order = {name: number for number, name in enumerate(KINDS)}
    places = [index for index, item in enumerate(items) if kind(item)]
    ordered = sorted((items[index] for index in places), key=lambda item: order[kind(item)])
    for index, item in zip(places, ordered, strict=True):
        items[index] = item


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
            self._mesh = LocalMesh(self._folders.mktemp(kind), *KINDS[kind])
            self._mesh.wait_ready()
        return self._mesh

    def stop(self) -> None:
        mesh, self._mesh = self._mesh, None
        if mesh is not None:
            assert mesh.stop() == 0, mesh.text


@pytest.fixture(scope="session")
def meshes(tmp_path_factory: pytest.TempPathFactory, rest_binary: Path) -> Iterator[Meshes]:
    meshes = Meshes(tmp_path_factory)
    yield meshes
    meshes.stop()


@pytest.fixture
def mesh(request: pytest.FixtureRequest, meshes: Meshes) -> Iterator[LocalMesh]:
    """The mesh of the kind that the test is marked with: whole before, idle after it."""
    mesh = meshes.get(request.node.get_closest_marker("mesh").args[0])
    mesh.wait_healthy()
    yield mesh
    mesh.wait_idle()


@pytest.fixture(scope="session")
def reference(pytestconfig: pytest.Config) -> TextReference:
    """Transformers' own greedy answers in float32."""
    folder = pytestconfig.cache.mkdir("weft-text-reference")
    made = TextReference(resolve_model(DEMO_NAME), folder)
    made.prepare(
        [
            *((prompt, NUM_TOKENS, False) for prompt in PROMPTS),
            *((prompt, PREEMPTED_TOKENS, True) for prompt in COVER),
            *((prompt, DRAFTED_TOKENS, True) for prompt in DRAFTED),
        ]
    )
    return made
