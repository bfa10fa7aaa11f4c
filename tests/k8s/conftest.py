"""A kube-apiserver for the tests that need one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from weft.testing.k8s.kube_api import KubeApi
from weft.testing.k8s.manifests import K8S, OVERLAYS, of_kind, render


@pytest.fixture(scope="session")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubeApi]:
    """With the overlays' namespaces, and what KEDA and others define."""
    api = KubeApi(tmp_path_factory.mktemp("kube"))
    try:
        api.wait_ready()
        for overlay in OVERLAYS:
            for item in of_kind(render(overlay), "Namespace"):
                assert api.apply(item, dry_run=False).is_success
        for path in sorted((K8S / "tools" / "crds").iterdir()):
            api.define(path)
        yield api
    finally:
        api.stop()
