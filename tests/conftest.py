"""What tests need, and what a run may not do without.

`WEFT_REQUIRE=cc,go,nixl` makes a run fail when one of these is missing, or when a test is skipped
for its sake; otherwise tests that need it are skipped, and the summary says so. Mark tests
`@pytest.mark.needs("go")`, or skip with a reason that begins `go: `. Mark cross products and storms
`@pytest.mark.full`, tests with many cases, of which the first n represent the others,
`@pytest.mark.full_after(n)`, crosses of parameters and parametrised fixtures of which each value is
to be met, but not each pair, `@pytest.mark.each_of("name", "name")`, tests of tests/unit that
`make check` leaves out `@pytest.mark.slow`, and tests beside which no others run on a GPU
`@pytest.mark.whole_device`.
"""

import atexit
import gc
import importlib.util
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# Machines that run tests are slow at times: no case fails for its duration.
hypothesis.settings.register_profile("weft", deadline=None)
hypothesis.settings.load_profile("weft")

# Before torch loads its OpenMP runtime: test processes share their cores, so threads must not spin.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# Nor wait for each other: of tests side by side, those of kernels and meshes of a real model alone
# have more threads than one.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# Before triton is imported: without a GPU its kernels run by the interpreter.
if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("TRITON_INTERPRET", "1")

ROOT = Path(__file__).resolve().parent.parent


def _missing_cc() -> str | None:
    return None if shutil.which("cc") else "no C compiler `cc` on the PATH"


def _missing_go() -> str | None:
    beside_python = Path(sys.executable).parent / "go"
    return None if shutil.which("go") or beside_python.exists() else "no `go` on the PATH"


def _missing_rest() -> str | None:
    is_there = (ROOT / "services" / "rest" / "bin" / "weft-rest").exists()
    return None if is_there else "the REST edge is not built; `make rest` builds it"


def _missing_nixl() -> str | None:
    return None if importlib.util.find_spec("nixl") else "the package `nixl` is not installed"


def _missing_cuda() -> str | None:
    return None if shutil.which("nvidia-smi") else "no NVIDIA driver (`nvidia-smi`) on the PATH"


def _missing_fa3() -> str | None:
    return None if importlib.util.find_spec("fa3_fwd") else "the package `fa3-fwd` is not installed"


def _missing_triton_interpreter() -> str | None:
    if not importlib.util.find_spec("triton"):
        return "the package `triton` is not installed"
    is_on = os.environ.get("TRITON_INTERPRET") == "1"
    return None if is_on else "Triton's kernels run on the GPU in this process (tests/gpu)"


def _missing_kubernetes(*names: str) -> str | None:
    """Of programs that scripts/get_kubernetes.py builds."""
    is_there = all((ROOT / "k8s" / "tools" / "bin" / name).exists() for name in names)
    return None if is_there else "it is not built; `make test-k8s` builds it and runs these tests"


def _missing_gguf_converter() -> str | None:
    is_there = (ROOT / "tests" / "tools" / "gguf-converter" / "conversion").exists()
    return None if is_there else "it is not there; scripts/get_gguf_converter.py gets it"


def _missing_chromium() -> str | None:
    if not importlib.util.find_spec("playwright"):
        return "the package `playwright` is not installed"
    return None if shutil.which("chromium") else "no `chromium` on the PATH; Debian has it"


def _missing_valkey() -> str | None:
    if not importlib.util.find_spec("valkey"):
        return "the package `valkey` is not installed"
    names = ("valkey-server", "redis-server")
    unpacked = ROOT / "tests" / "tools" / "valkey" / "usr" / "bin"
    if any(shutil.which(name) or (unpacked / name).exists() for name in names):
        return None
    return "no `valkey-server` or `redis-server`; scripts/get_valkey.py unpacks Debian's"


def _missing_rootfs() -> str | None:
    if os.geteuid():
        return "needs root"
    return None if shutil.which("debootstrap") else "no `debootstrap` on the PATH; Debian has it"


def _missing_envoy() -> str | None:
    is_there = (ROOT / "tests" / "tools" / "envoy" / ".wheels").exists()
    return None if is_there else "it is not there; `make test-k8s` gets it and runs these tests"


CLIENTS = ROOT / ".venv-clients"
NOT_INSTALLED = "not installed; `make test-clients` installs them"


def _missing_python_clients() -> str | None:
    return None if (CLIENTS / ".requirements").exists() else NOT_INSTALLED


def _missing_load_clients() -> str | None:
    return None if (CLIENTS / ".requirements-load").exists() else NOT_INSTALLED


def _missing_trainers() -> str | None:
    is_there = (ROOT / ".venv-trainers" / ".requirements-trainers").exists()
    return None if is_there else "not installed; `scripts/get_clients.py --trainers` installs them"


def _missing_trl_kit() -> str | None:
    is_there = (ROOT / "build" / "trl-kit" / "site.tar.xz").exists()
    return None if is_there else "not packed; `scripts/trl_kit.py` packs it"


def _missing_node_clients() -> str | None:
    installed = ROOT / "tests" / "clients" / "node_modules" / ".done"
    return None if installed.exists() and shutil.which("node") else NOT_INSTALLED


def _missing_agents() -> str | None:
    installed = ROOT / "tests" / "clients" / "agents" / "node_modules" / ".done"
    return None if installed.exists() else NOT_INSTALLED


CAPABILITIES: dict[str, Callable[[], str | None]] = {
    "agents": _missing_agents,
    "cc": _missing_cc,
    "chromium": _missing_chromium,
    "cuda": _missing_cuda,
    "envoy": _missing_envoy,
    "fa3": _missing_fa3,
    "gguf-converter": _missing_gguf_converter,
    "go": _missing_go,
    "helm": partial(_missing_kubernetes, "helm"),
    "kube-apiserver": partial(_missing_kubernetes, "kube-apiserver", "etcd"),
    "kwok": partial(_missing_kubernetes, "kube-controller-manager", "kwok"),
    "load-clients": _missing_load_clients,
    "lwepp": partial(_missing_kubernetes, "lwepp"),
    "nixl": _missing_nixl,
    "node-clients": _missing_node_clients,
    "python-clients": _missing_python_clients,
    "rest": _missing_rest,
    "rootfs": _missing_rootfs,
    "trainers": _missing_trainers,
    "triton-interpreter": _missing_triton_interpreter,
    "trl-kit": _missing_trl_kit,
    "valkey": _missing_valkey,
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the tests marked `full` as well")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(*names): needs one of " + ", ".join(CAPABILITIES))
    config.addinivalue_line("markers", "full: long; runs with --full only")
    config.addinivalue_line(
        "markers", "full_after(n): cases after the first n run with --full only"
    )
    config.addinivalue_line(
        "markers", "each_of(*names): of a cross of these, cases with each value; --full runs all"
    )
    config.addinivalue_line("markers", "slow: seconds; `make check` leaves it out")
    config.addinivalue_line("markers", "whole_device: takes a GPU's memory, as much as is free")
    required = _required()
    if unknown := sorted(set(required) - CAPABILITIES.keys()):
        raise pytest.UsageError(f"WEFT_REQUIRE names {unknown}; known: {', '.join(CAPABILITIES)}")
    problems = [f"{name}: {why}" for name in required if (why := CAPABILITIES[name]())]
    if problems:
        raise pytest.UsageError("required by WEFT_REQUIRE, but missing: " + "; ".join(problems))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Nothing that is imported and collected is garbage, and each look for some takes a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)
        gc.enable()


NUM_LONG = pytest.StashKey[int]()
"""Of the tests that were left out since they run with `--full` only."""


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["num_long"] = session.config.stash.get(NUM_LONG, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Each process of xdist has collected the same tests."""
    node.config.stash[NUM_LONG] = getattr(node, "workeroutput", {}).get("num_long", 0)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    missing = {name: why() for name, why in CAPABILITIES.items()}
    cases: Counter[str] = Counter()
    repeated = _repeated(items)
    left_out: list[pytest.Item] = []
    for item in items:
        cases[function := item.nodeid.partition("[")[0]] += 1
        marker = item.get_closest_marker("full_after")
        is_late = marker is not None and cases[function] > marker.args[0]
        is_long = is_late or item.get_closest_marker("full") or item.nodeid in repeated
        if is_long and not config.getoption("--full"):
            left_out.append(item)
        for marker in item.iter_markers("needs"):
            for name in marker.args:
                if missing[name] is not None:
                    item.add_marker(pytest.mark.skip(reason=f"{name}: {missing[name]}"))
    if left_out:  # To skip each of thousands takes a minute.
        left = set(left_out)
        items[:] = [item for item in items if item not in left]
        config.hook.pytest_deselected(items=left_out)
    config.stash[NUM_LONG] = len(left_out)
    if hasattr(config, "workerinput"):  # of xdist
        _longest_first(items)


def _repeated(items: list[pytest.Item]) -> set[str]:
    """Cases that tests marked `each_of` can do without: those off the diagonals of their crosses.

    Values are numbered as they come. A case is on a diagonal if the numbers of each two neighbours
    are alike, modulo the count of values of the one with fewer. Names that a test of a marked
    module lacks count for nothing.
    """
    numbers: dict[tuple[str, str], dict[str, int]] = {}
    indices: dict[str, dict[str, list[int]]] = {}
    for item in items:
        marker = item.get_closest_marker("each_of")
        if marker is not None:
            function = item.nodeid.partition("[")[0]
            given = item.callspec.params if hasattr(item, "callspec") else {}
            row = []
            for name in filter(given.__contains__, marker.args):
                known = numbers.setdefault((function, name), {})
                row.append(known.setdefault(repr(given[name]), len(known)))
            indices.setdefault(function, {})[item.nodeid] = row
    repeated: set[str] = set()
    for rows in indices.values():
        counts = [max(column) + 1 for column in zip(*rows.values(), strict=True)]
        for nodeid, row in rows.items():
            pairs = zip(row, counts, row[1:], counts[1:], strict=False)
            if any((one - other) % min(m, n) for one, m, other, n in pairs):
                repeated.add(nodeid)
    return repeated


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`pytest -n 5` runs five turns at a time, and the tests of a turn one after the other.
    `--dist` names another way to share them.
    """
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    # In the order of the collection: see `_longest_first`.
    config.option.loadscopereorder = False

    class Turns(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _turn(nodeid.partition("::")[0])

    return Turns(config, log)


MESH_TURNS = ("meshes", "other meshes")
OTHER_MESHES = [
    *("adapter_storm", "adapters", "hybrid", "observability", "ranks", "resources", "resumption"),
    *("security", "store", "store_valkey", "tiers", "trainer", "two_models"),
]
"""Modules of tests/mesh with meshes of their own, half of the work: the rest shares some."""


def _turn(file: str) -> str:
    """A file's own, but one of two for all that start meshes, which need the cores at times."""
    if file.startswith(("tests/chaos/", "tests/clients/")):
        return MESH_TURNS[1]
    if file.startswith("tests/mesh/"):
        return MESH_TURNS[Path(file).stem.removeprefix("test_") in OTHER_MESHES]
    return file


LONG_FILES = (
    *("captured_steps", "triton_compiles", "triton_moe", "triton_lora_product", "constraints"),
    *("portable_cpu", "demo_model", "rest_go", "attention"),
)
"""Files of few tests that take a minute and more, by name."""


def _longest_first(items: list[pytest.Item]) -> None:
    """Turns with meshes, then long files, then those of the most tests: none that is long is left
    for the end.
    """
    turns = {item.nodeid: _turn(item.nodeid.partition("::")[0]) for item in items}
    counts = Counter(turns.values())

    def place(item: pytest.Item) -> tuple[bool, bool, int, str]:
        turn = turns[item.nodeid]
        is_long = Path(turn).stem.removeprefix("test_") in LONG_FILES
        return turn not in MESH_TURNS, not is_long, -counts[turn], turn

    items.sort(key=place)


@pytest.fixture(scope="module")
def seed() -> int:
    """Of a module's random models; shown with failures."""
    value = random.randrange(10**6)
    print(f"seed {value}")
    return value


@pytest.fixture(autouse=True)
def _interpreter(request: pytest.FixtureRequest) -> None:
    """See `fast_interpreter`."""
    if any("triton-interpreter" in marker.args for marker in request.node.iter_markers("needs")):
        from weft.testing.kernels.fast_interpreter import replace_functions_once

        replace_functions_once()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport]:
    """Turns skips for the sake of something required into failures."""
    report = yield
    reason = _skip_reason(report)
    if report.skipped and reason.partition(":")[0] in _required():
        report.outcome = "failed"
        report.longrepr = f"skipped, though WEFT_REQUIRE asks for it: {reason}"
    return report


def _required() -> list[str]:
    return [name for name in os.environ.get("WEFT_REQUIRE", "").split(",") if name]


def _skip_reason(report: pytest.TestReport) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    ran: Counter[str] = Counter()
    for outcome in ("passed", "failed", "error"):
        for report in terminalreporter.stats.get(outcome, []):
            ran[_group(report.nodeid)] += 1
    skipped: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        skipped[_skip_reason(report)] += 1
    terminalreporter.section("what ran")
    for name, why in CAPABILITIES.items():
        terminalreporter.line(f"{name}: {why() or 'there'}")
    for group, count in sorted(ran.items()):
        terminalreporter.line(f"{group}: {count} ran")
    for reason, count in sorted(skipped.items()):
        terminalreporter.line(f"skipped {count}: {reason}")
    if num_long := terminalreporter.config.stash.get(NUM_LONG, 0):
        terminalreporter.line(f"left out {num_long}: long, run with --full")


def _group(nodeid: str) -> str:
    """tests/unit/test_x.py::test_y -> tests/unit."""
    return nodeid.split("::", maxsplit=1)[0].rpartition("/")[0]


@pytest.fixture(scope="session")
def rest_binary() -> Path:
    """The Go edge, built from the sources; skipped where Go is missing."""
    if why := _missing_go():
        pytest.skip(f"go: {why}")
    command = [sys.executable, str(ROOT / "scripts" / "build_rest.py"), "--require"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return ROOT / "services" / "rest" / "bin" / "weft-rest"
