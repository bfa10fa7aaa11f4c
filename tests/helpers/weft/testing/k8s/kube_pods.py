"""Controllers over a kube-apiserver, and nodes on which pods are ready at once and run nothing."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

from weft.testing.k8s.kube_api import BIN, KubeApi
from weft.testing.k8s.manifests import Object

CONTROLLERS = ("statefulset", "endpointslice", "disruption")


class KubePods:
    """Starts kube-controller-manager and kwok; `stop` ends them.

    Args:
        folder: For logs.
    """

    def __init__(self, api: KubeApi, folder: Path) -> None:
        self._folder = folder
        config = api.kubeconfig()
        self._processes = [
            self._run(
                "kube-controller-manager",
                f"--kubeconfig={config}",
                f"--controllers={','.join(CONTROLLERS)}",
                "--leader-elect=false",
                "--secure-port=0",
            ),
            self._run(
                "kwok",
                f"--kubeconfig={config}",
                f"--config={BIN / 'kwok.yaml'}",
                "--manage-all-nodes",
            ),
        ]

    def _run(self, name: str, *flags: str) -> subprocess.Popen[bytes]:
        with (self._folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [str(BIN / name), *flags],
                stdout=log,
                stderr=log,
                env={"HOME": str(self._folder)},
            )

    @property
    def log(self) -> str:
        """The ends of both logs."""
        logs = sorted(self._folder.glob("k*.log"))
        return "\n".join(path.read_text(errors="replace")[-2000:] for path in logs)

    def stop(self) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGTERM)
        for process in self._processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def node(name: str) -> Object:
    """A node on which pods are said to run."""
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}
