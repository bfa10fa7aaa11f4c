"""Builds the root file systems of k8s/images without Docker, and starts a program in one.

python scripts/build_rootfs.py build gateway worker   as root, with debootstrap; prints sizes
python scripts/build_rootfs.py run gateway --help     the entry point, as the image's user

The Dockerfiles' own instructions are carried out in a chroot. In place of their base image, which
needs a registry, stands Debian with its own Python, from debootstrap. A step sees this machine's
certificates and resolver; they are mounted, and stay outside. A program that `run` starts has the
machine's network, and neither its processes nor its files, but for the folder `--home`. What it
writes elsewhere is in memory and ends with it.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import string
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IMAGES = ROOT / "k8s" / "images"
NAMES = sorted(path.stem for path in IMAGES.glob("*.Dockerfile"))
FOLDER = ROOT / "build" / "rootfs"
PACKAGES = "ca-certificates,python3,python3-pip,python3-venv"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
STEP_TIMEOUT_S = 1800
OF_INDEXES = ("PIP_INDEX", "PIP_CERT", "UV_INDEX", "UV_DEFAULT", "SSL_CERT", "REQUESTS_CA")
ENTER = """
set -e
root=$1 layer=$2 user=$3 home=$4; shift 4
if [ -z "$layer" ]; then
  mount --bind "$root" "$root"
else
  mount -t tmpfs tmpfs "$layer"
  mkdir "$layer/upper" "$layer/work" "$layer/root"
  layers="lowerdir=$root,upperdir=$layer/upper,workdir=$layer/work"
  mount -t overlay overlay -o "$layers" "$layer/root"
  root=$layer/root
  [ -z "$home" ] || { mkdir -p "$root$home"; mount --bind "$home" "$root$home"; }
fi
mkdir -p -m 1777 "$root/proc" "$root/dev" "$root/tmp"
mount -t proc proc "$root/proc"
mount -t tmpfs tmpfs "$root/dev"
mkdir -m 1777 "$root/dev/shm"
for device in null zero random urandom; do
  touch "$root/dev/$device"
  mount --bind "/dev/$device" "$root/dev/$device"
done
for file in /etc/resolv.conf /etc/ssl/certs/ca-certificates.crt; do
  [ ! -e "$root$file" ] || mount --bind "$file" "$root$file"
done
chroot --userspec="$user" "$root" "$@" &
trap 'kill -TERM $!' TERM INT
status=0
wait $! || status=$?
[ ! -e "/proc/$!" ] || { status=0; wait $! || status=$?; }  # after a signal
exit $status
"""
"""Run as the first process of a mount and a process namespace: all that it starts ends with it."""


@dataclass(slots=True)
class Stage:
    """A root file system, and what its image says of programs in it."""

    root: str
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": PATH, "HOME": "/"})
    folder: str = "/"
    user: str = "0:0"
    entry: list[str] = field(default_factory=list)


def instructions(name: str) -> Iterator[tuple[str, str]]:
    """Instructions of a Dockerfile, continued lines joined."""
    text = (IMAGES / f"{name}.Dockerfile").read_text().replace("\\\n", " ")
    for line in text.splitlines():
        if line and not line.startswith("#"):
            word, _, rest = line.partition(" ")
            yield word, rest.strip()


def make_base() -> Path:
    """Debian with Python, made once."""
    base = FOLDER / "base"
    if not base.exists():
        work = FOLDER / "base.part"
        shutil.rmtree(work, ignore_errors=True)
        work.parent.mkdir(parents=True, exist_ok=True)
        flags = ["--variant=minbase", f"--include={PACKAGES}"]
        run(["debootstrap", *flags, "bookworm", str(work)])
        # As in the official image, pip may install beside Debian's packages.
        for marker in work.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
            marker.unlink()
        shutil.rmtree(work / "var" / "cache" / "apt" / "archives")
        work.rename(base)
    return base


def build(name: str) -> None:
    """Leaves the last stage in FOLDER/name, and the others nowhere."""
    stages: dict[str, Stage] = {}
    stage = Stage("")
    for number, (word, rest) in enumerate(instructions(name)):
        print(f"{name}: {word} {rest}", flush=True)
        match word:
            case "ARG" | "EXPOSE":
                pass
            case "FROM":
                source, _, stage_name = rest.partition(" AS ")
                stage = Stage(str(FOLDER / f"{name}.{number}"))
                stages[stage_name] = stage
                shutil.rmtree(stage.root, ignore_errors=True)
                if source == "scratch":
                    Path(stage.root).mkdir(parents=True)
                else:
                    run(["cp", "-a", "--reflink=auto", str(make_base()), stage.root])
            case "ENV":
                for pair in shlex.split(rest):
                    key, _, value = pair.partition("=")
                    stage.environment[key] = string.Template(value).substitute(stage.environment)
            case "WORKDIR":
                stage.folder = rest
                (Path(stage.root) / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
            case "USER":
                stage.user = rest
            case "ENTRYPOINT":
                stage.entry = json.loads(rest)
            case "COPY":
                copy(rest.split(), stage, stages)
            case "RUN":
                command = ["/bin/sh", "-euc", f"cd {shlex.quote(stage.folder)}; {rest}"]
                here = {k: v for k, v in os.environ.items() if k.startswith(OF_INDEXES)}
                run(entered(stage, command), {**here, **stage.environment, "HOME": "/root"})
            case _:
                raise SystemExit(f"{name}.Dockerfile: {word} is not known here")
    final = FOLDER / name
    shutil.rmtree(final, ignore_errors=True)
    Path(stage.root).rename(final)
    stage.root = str(final)
    final.with_suffix(".json").write_text(json.dumps(asdict(stage)))
    for other in stages.values():
        if other is not stage:
            shutil.rmtree(other.root)


def copy(words: Sequence[str], stage: Stage, stages: Mapping[str, Stage]) -> None:
    """A COPY instruction; a folder's content is copied, as Docker does."""
    *sources, target = [word for word in words if not word.startswith("--")]
    origin = ROOT
    if words[0].startswith("--from="):
        origin = Path(stages[words[0].removeprefix("--from=")].root)
    into = Path(stage.root) / Path(stage.folder, target).relative_to("/")
    for source in sources:
        path = origin / source.lstrip("/")
        is_inside = path.is_dir() or target.endswith("/")
        (into if is_inside else into.parent).mkdir(parents=True, exist_ok=True)
        run(["cp", "-a", f"{path}/." if path.is_dir() else str(path), str(into)])


def entered(stage: Stage, command: Sequence[str], layer: str = "", home: str = "") -> list[str]:
    """The command line that runs `command` in the stage's root.

    It changes the root, unless `layer` names a folder: what it writes is then in memory, above it.
    A layered root has the folder `home` in its place.
    """
    alone = ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--fork"]
    enter = [*alone, "--kill-child", "--mount-proc", "/bin/sh", "-c", ENTER, "enter"]
    return [*enter, stage.root, layer, stage.user, home, *command]


def run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
    subprocess.run(command, env=environment, check=True, timeout=STEP_TIMEOUT_S)


def attend(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Runs what `entered` made to its end, and passes SIGTERM on; the exit status."""
    process = subprocess.Popen(command, env=environment)

    def pass_on(number: int, _: object) -> None:
        # unshare itself takes no notice of it.
        for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            os.kill(int(child), number)

    signal.signal(signal.SIGTERM, pass_on)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # A terminal sends it to all of them.
    return process.wait()


def num_bytes(folder: Path) -> int:
    done = subprocess.run(["du", "-sB1", str(folder)], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[0])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = parser.add_subparsers(dest="action", required=True)
    building = actions.add_parser("build", help="build images' root file systems")
    building.add_argument("names", nargs="*", default=NAMES, metavar="|".join(NAMES))
    running = actions.add_parser("run", help="start an image's entry point")
    running.add_argument("--home", type=Path, help="a folder of this machine that it has as home")
    running.add_argument("--entry", help="a program in place of the entry point")
    running.add_argument("name", choices=NAMES)
    running.add_argument("arguments", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    if arguments.action == "run":
        stage = Stage(**json.loads((FOLDER / f"{arguments.name}.json").read_text()))
        layer = FOLDER / "layer"
        layer.mkdir(exist_ok=True)
        entry = stage.entry if arguments.entry is None else [arguments.entry]
        home = arguments.home.resolve() if arguments.home else ""
        command = entered(stage, [*entry, *arguments.arguments], str(layer), str(home))
        stage.environment["HOME"] = str(home or "/")
        return attend(command, stage.environment)
    for name in arguments.names:
        build(name)
    print(f"{'base':10}{num_bytes(make_base()) / 1e6:10.0f} MB")
    for name in arguments.names:
        print(f"{name:10}{num_bytes(FOLDER / name) / 1e6:10.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
