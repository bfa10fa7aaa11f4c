"""Loads the native form of one C file with ctypes: a wheel's, else it is compiled on first use.

It imports no torch, so that code without torch can use native code too. A cache folder keeps each
library under a hash of everything that its machine code depends on. Of several processes that want
a library at the same time, one compiles it.
"""

import contextlib
import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from weft.contract.cache_folder import cache_folder
from weft.contract.start_work import COMPILING, START_WORK
from weft.kernels.shared.packaged import find_packaged

logger = logging.getLogger(__name__)

COMMON_FLAGS = (
    *("-O3", "-std=c11", "-fno-math-errno", "-fPIC"),
    # Without this flag a compiler may fuse a*b+c in some copies of a loop and not in others.
    "-ffp-contract=off",
)
"""Of each compilation, for a wheel too."""
BASE_FLAGS = (*COMMON_FLAGS, "-march=native")

COMPILE_TIMEOUT_S = 300.0
_LOOK_EVERY_S = 0.05
_WORK_PREFIX = ".build-"
_DIGEST_BYTES = 16
"""Bytes of the library's digest, which is appended to its file."""


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """A loaded library, or the reason why there is none."""

    library: ctypes.CDLL | None
    """The loaded library; calls through it release the GIL. None if it could not be built."""
    path: Path | None
    """The file it was loaded from."""
    reason: str | None
    """Why the build failed, in one line for a log; None on success."""


class _BuildError(Exception):
    """The reason why a library could not be built."""


def loaded_openmp_library() -> Path | None:
    """The OpenMP runtime that this process has loaded already (after `import torch`: torch's own).

    A second OpenMP runtime in one process would start threads that compete with the first one's for
    the cores. None if no runtime is loaded, or the system does not name it.
    """
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    mapped = {Path(fields[5]) for line in lines if len(fields := line.split(maxsplit=5)) == 6}
    found = sorted(p for p in mapped if p.name.startswith(("libgomp", "libiomp5", "libomp")))
    beside_torch = [p for p in found if any(p.parent.glob("libtorch_cpu.*"))]
    return next(iter(beside_torch + found), None)


def load_packaged(
    source: Path, *, openmp_library: Path | None = None, flags: Sequence[str] = ()
) -> NativeLibrary:
    """Loads the form that a wheel has of `source` for this CPU; without one, as `load_native`."""
    packaged = find_packaged(source)
    if packaged is not None:
        try:
            _load_openmp(openmp_library)
            return NativeLibrary(ctypes.CDLL(str(packaged)), packaged, None)
        except OSError as error:
            logger.warning("cannot load %s: %s; it is compiled instead", packaged, error)
    return load_native(source, openmp_library=openmp_library, flags=flags)


def find_compiler(compiler: str = "cc") -> str | None:
    """The path of the C compiler; None: it is not on PATH."""
    return shutil.which(compiler)


def load_native(
    source: Path,
    *,
    openmp_library: Path | None = None,
    flags: Sequence[str] = (),
    compiler: str = "cc",
    folder: Path | None = None,
) -> NativeLibrary:
    """Compiles `source` unless that was done before, and loads the result.

    Args:
        source: A C11 file that includes system headers only (others are not part of the hash).
        openmp_library: Shared OpenMP runtime to compile for and to bind to; without it OpenMP
            pragmas are ignored. Pass the one the process uses (`loaded_openmp_library`).
        flags: Compiler flags in addition to `BASE_FLAGS`.
        compiler: Name or path of the C compiler.
        folder: Where to keep the result; default `cache_folder() / "native"`.

    Returns:
        The library, or the reason why it could not be built or loaded. Never raises for a
        missing compiler, a failing compilation or an unwritable folder.

    Raises:
        OSError: `source` cannot be read. A package without its sources is broken, not slow.
    """
    code = source.read_bytes()
    try:
        folder = folder or cache_folder() / "native"
        compiler_path = find_compiler(compiler)
        if compiler_path is None:
            raise _BuildError(f"no C compiler: '{compiler}' is not on PATH")
        all_flags = [*BASE_FLAGS, *flags]
        key = _build_key(code, all_flags, compiler_path, openmp_library)
        target = folder / f"{key}.so"
        _load_openmp(openmp_library)
        library = _load_existing(target)
        if library is None:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with START_WORK.time(COMPILING), _locked(folder):
                library = _load_existing(target)
                if library is None:
                    _compile(source, target, all_flags, compiler_path, openmp_library)
                    library = ctypes.CDLL(str(target))
        return NativeLibrary(library, target, None)
    except (_BuildError, OSError, RuntimeError) as error:
        return NativeLibrary(None, None, f"{source.name}: {error}")


def _load_openmp(library: Path | None) -> None:
    """First and by its own path, so that the names in our library resolve to it."""
    if library is not None:
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def _load_existing(target: Path) -> ctypes.CDLL | None:
    try:
        content = target.read_bytes()
        is_whole = _digest(content[:-_DIGEST_BYTES]) == content[-_DIGEST_BYTES:]
        # Loading a damaged library may end the process by a signal.
        return ctypes.CDLL(str(target)) if is_whole else None
    except OSError:
        return None


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()


def _build_key(
    code: bytes, flags: Sequence[str], compiler_path: str, openmp_library: Path | None
) -> str:
    version = _run([compiler_path, "--version"]).splitlines()
    parts: Iterable[str] = (
        "\0".join(flags),
        version[0] if version else "",
        platform.system(),
        platform.machine(),
        cpu_features(),
        str(openmp_library or ""),
    )
    digest = hashlib.blake2b(code, digest_size=16)
    for part in parts:
        digest.update(hashlib.blake2b(part.encode(), digest_size=16).digest())
    return digest.hexdigest()


def cpu_features() -> str:
    """Part of a library's name, since machines with different CPUs may share a cache folder, and
    `-march=native` depends on these.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    wanted = ("model name", "flags", "Features", "CPU implementer", "CPU part")
    features: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in wanted:
            features.setdefault(name.strip(), " ".join(sorted(value.split())))
    return repr(sorted(features.items()))


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """The engines of a host start together, and compiling takes a core half a minute. Without a
    lock, be it that the file system has none or that its owner takes too long, each compiles for
    itself.
    """
    deadline = time.monotonic() + COMPILE_TIMEOUT_S
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        while time.monotonic() < deadline:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_LOOK_EVERY_S)
            except OSError:
                break
        yield
    finally:
        os.close(descriptor)


def _compile(
    source: Path,
    target: Path,
    flags: Sequence[str],
    compiler_path: str,
    openmp_library: Path | None,
) -> None:
    """Other processes see either no file or the whole file."""
    logger.info("compiling %s for this machine; a later start finds the result", source.name)
    _remove_abandoned(target.parent)
    # Same file system as the target, so that the last step is a rename.
    with tempfile.TemporaryDirectory(prefix=_WORK_PREFIX, dir=target.parent) as work:
        compiled, linked = Path(work) / "code.o", Path(work) / "code.so"
        openmp_flags = [] if openmp_library is None else ["-fopenmp"]
        compile_command = [*flags, *openmp_flags, "-c", str(source), "-o", str(compiled)]
        _run([compiler_path, *compile_command])
        # -fopenmp is left out here: it would bind to the compiler's own runtime.
        link_command = ["-shared", str(compiled), "-o", str(linked)]
        if openmp_library is not None:
            link_command += [str(openmp_library), f"-Wl,-rpath,{openmp_library.parent}"]
        _run([compiler_path, *link_command, "-lm"])
        # Loaders ignore bytes after a library's end. The digest is written before the file gets its
        # final name.
        with linked.open("r+b") as file:
            digest = _digest(file.read())
            file.write(digest)
            file.flush()
            os.fsync(file.fileno())
        os.replace(linked, target)


def _remove_abandoned(folder: Path) -> None:
    for work in folder.glob(f"{_WORK_PREFIX}*"):
        with contextlib.suppress(OSError):
            if time.time() - work.stat().st_mtime > 2 * COMPILE_TIMEOUT_S:
                shutil.rmtree(work, ignore_errors=True)


def _run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=COMPILE_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise _BuildError(f"{command[0]} ran past {COMPILE_TIMEOUT_S:.0f} s") from error
    if done.returncode != 0:
        complaint = " | ".join(done.stderr.strip().splitlines()[:5])
        raise _BuildError(f"{command[0]} failed with status {done.returncode}: {complaint}")
    return done.stdout
