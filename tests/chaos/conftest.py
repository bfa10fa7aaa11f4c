"""One mesh with a proxy on every link, two of each service and a tiny model, for all tests here."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from weft.chaos.command import mesh_settings
from weft.chaos.mesh import ChaosMesh
from weft.chaos.tiny import TINY_NAME, make_tiny_model
from weft.testing.meshes.chaos_mesh import Chaos, for_tests, in_peace


@pytest_asyncio.fixture(loop_scope="package", scope="package")
async def chaos(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Chaos]:
    folder = tmp_path_factory.mktemp("chaos")
    seed = random.randrange(1 << 31)
    print(f"seed {seed}")
    model_dir = make_tiny_model(folder / TINY_NAME, seed)
    settings = for_tests(mesh_settings(folder / "state", is_tiny=True, gateways=2))
    async with ChaosMesh.running(settings, model_dir, TINY_NAME) as mesh:
        yield await in_peace(mesh, model_dir, seed)
