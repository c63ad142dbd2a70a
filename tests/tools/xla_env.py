"""Create the environment for the XLA tests on a machine without a TPU: ``make xla-env``.

torch_xla needs the torch of its own release, so it can't share an environment with a newer one. PyPI's torch for Linux
is the CUDA build, whose CUDA libraries take 5 GB that no test here uses. Both packages are therefore installed without
dependencies, followed by the few needed ones, and a stub replaces each missing CUDA library: a shared library of the
same name, with one function per symbol that torch looks up, which returns zero (torch registers its kernels through
some of them at load time). The stubs are only for these tests.

    python tests/tools/xla_env.py .venv-xla        2.6 GB, about a minute; returns at once if it is complete

Needs gcc, nm and readelf (package "build-essential" or "gcc" and "binutils"), and Linux on x86-64.
"""

from __future__ import annotations

import hashlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

TORCH = ("torch==2.9.0", "torch_xla==2.9.0")
# Dependencies of both at run time: their metadata without CUDA's packages and triton.
NEEDED = (
    "absl-py",
    "filelock",
    "fsspec",
    "jinja2",
    "networkx",
    "numpy",
    "pyyaml",
    "requests",
    "setuptools",
    "sympy",
    "typing-extensions",
)
# Dependencies of nblaunch and its tests: as in pyproject.toml, without checkers and frameworks.
TESTED_WITH = (
    "cloudpickle",
    "hypothesis",
    "ipykernel",
    "ipywidgets",
    "jupyter_client",
    "nbclient",
    "nbformat",
    "psutil",
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "safetensors",
    "scikit-learn",
    "tqdm",
)
# Frameworks that users run inside the function. Install them without dependencies, because pip would add all of
# torch's.
FRAMEWORKS = ("accelerate", "lightning-fabric==2.6.6")
NEEDED_BY_FRAMEWORKS = ("huggingface-hub", "lightning-utilities", "packaging")
TOOLS = ("gcc", "nm", "readelf")
INSTALL_TIMEOUT_S = 900.0
COMMAND_TIMEOUT_S = 120.0

CHECK = """
import torch, torch_xla
assert not torch_xla._XLAC._xla_runtime_is_initialized()
x = torch.ones(3, device="xla", requires_grad=True)
(x * x).sum().backward()
assert x.grad.cpu().tolist() == [2.0] * 3
print("torch", torch.__version__, "and torch_xla", torch_xla.__version__, "compute on PJRT CPU")
"""


class Unavailable(Exception):
    """The environment can't be created; the message says why and what to do."""


def main(folder: Path) -> int:
    """Create the environment unless it exists; return the exit code."""
    stamp = folder / ".complete"
    if stamp.exists() and stamp.read_text() == _fingerprint():
        return 0
    try:
        _check_machine()
        _install(folder)
        _stub_missing_libraries(folder)
        print(_run(_python(folder), "-c", CHECK, env={"PJRT_DEVICE": "CPU"}).strip())
    except Unavailable as reason:
        print(f"The XLA environment {folder} can't be made: {reason}", file=sys.stderr)
        return 1
    stamp.write_text(_fingerprint())
    return 0


def _fingerprint() -> str:
    """Return a value that changes with this file, the pins and the interpreter."""
    content = Path(__file__).read_bytes() + _constraints().read_bytes() + sys.version.encode()
    return hashlib.sha256(content).hexdigest()


def _constraints() -> Path:
    return Path(__file__).parents[2] / "constraints.txt"


def _check_machine() -> None:
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise Unavailable(
            f"torch_xla has wheels for Linux on x86-64, not for {platform.system()} on {platform.machine()}"
        )
    if not (3, 10) <= sys.version_info[:2] <= (3, 13):
        raise Unavailable(
            f"torch_xla 2.9.0 has wheels for Python 3.10 to 3.13, not for {platform.python_version()}; name another "
            "one: make xla-env PYTHON=/path/to/python3.11"
        )
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        raise Unavailable(f"{', '.join(missing)} not found; install gcc and binutils")


def _python(folder: Path) -> str:
    return str(folder / "bin" / "python")


def _run(*command: str, timeout_s: float = COMMAND_TIMEOUT_S, env: dict[str, str] | None = None) -> str:
    """Return the standard output of a command.

    Raises:
        Unavailable: it failed or took too long; the message has the end of its output.
    """
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, stdin=subprocess.DEVNULL, env=env
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(
            f"`{' '.join(command)[:200]}` did not end within {timeout_s:g} s; is the package index reachable?"
        ) from None
    if answer.returncode != 0:
        end = "\n".join((answer.stdout + answer.stderr).splitlines()[-15:])
        raise Unavailable(f"`{' '.join(command)[:200]}` failed:\n{end}")
    return answer.stdout


def _install(folder: Path) -> None:
    venv.create(folder, with_pip=True, symlinks=True)
    print(f"Installing {' and '.join(TORCH)} into {folder} (1 GB to download) ...", flush=True)
    pip = (_python(folder), "-m", "pip", "install", "--quiet")
    _pip(*pip, "--upgrade", "pip")  # an older pip takes minutes to choose releases
    _pip(*pip, "--no-deps", *TORCH)
    constrained = (*pip, "--constraint", str(_constraints()))
    _pip(*constrained, *NEEDED, *TESTED_WITH, *NEEDED_BY_FRAMEWORKS)
    _pip(*constrained, "--no-deps", *FRAMEWORKS)


def _pip(*command: str) -> None:
    # The user's settings for pip (index, proxy, cache) apply, because the environment is passed on.
    _run(*command, timeout_s=INSTALL_TIMEOUT_S)


# --- stubs -----------------------------------------------------------------------------------------------------------


def _stub_missing_libraries(folder: Path) -> None:
    """Create stubs of the missing libraries that torch is linked to."""
    libraries = next(folder.glob("lib/python*/site-packages/torch/lib"))
    for stub in libraries.glob("*.stub"):
        stub.with_name(stub.name.removesuffix(".stub")).unlink(missing_ok=True)
        stub.unlink()
    real = sorted(libraries.glob("lib*.so*"))
    missing = _missing_libraries(real)
    if not missing:
        return
    undefined = _symbols(real, "--undefined-only")
    for defined in _symbols([*real, *_system_libraries(real)], "--defined-only"):
        undefined.pop(defined, None)
    needed = _needed_versions(real)
    for name in missing:
        # The linker looks for a versioned symbol only in the library that it was linked to, and for an unversioned
        # symbol in any library: libtorch_global_deps, which is loaded first, is linked to all of them.
        nodes = {version: [] for version, file in needed.items() if file == name} or {name: []}
        for symbol, version in undefined.items():
            if version in nodes:
                nodes[version].append(symbol)
            elif name == missing[0] and version not in needed:
                next(iter(nodes.values())).append(symbol)
        _compile_stub(libraries / name, nodes)
    print(f"Replaced {len(missing)} CUDA libraries by stubs with {len(undefined)} symbols.", flush=True)


def _missing_libraries(libraries: list[Path]) -> list[str]:
    """Return the names of libraries that the dynamic linker can't find for ``libraries``."""
    names = set()
    for library in libraries:
        for line in _run("ldd", str(library)).splitlines():
            if "not found" in line and "=>" in line:
                names.add(line.split("=>")[0].strip())
    return sorted(names)


def _system_libraries(libraries: list[Path]) -> list[Path]:
    found = set()
    for library in libraries:
        for line in _run("ldd", str(library)).splitlines():
            target = line.partition("=>")[2].strip().partition(" ")[0]
            if target.startswith("/"):
                found.add(Path(target))
    return sorted(found)


def _symbols(libraries: list[Path], which: str) -> dict[str, str]:
    """Return dynamic symbols and their versions; empty without a version."""
    versions = {}
    for library in libraries:
        for line in _run("nm", "--dynamic", which, "--format=posix", str(library)).splitlines():
            fields = line.split()
            if len(fields) > 1 and fields[1] not in "wv":  # a weak symbol may stay undefined
                name, _, version = fields[0].partition("@")
                versions[name] = version.lstrip("@")
    return versions


def _needed_versions(libraries: list[Path]) -> dict[str, str]:
    """Return the symbol versions that the libraries need, and the names of the libraries that must provide them."""
    files = {}
    for library in libraries:
        file = ""
        for line in _run("readelf", "--version-info", "--wide", str(library)).splitlines():
            if found := re.search(r"Version: 1  File: (\S+)", line):
                file = found[1]
            elif (found := re.search(r"  Name: (\S+)  Flags:", line)) and file:
                files[found[1]] = file
    return files


def _compile_stub(target: Path, symbols: dict[str, list[str]]) -> None:
    """Compile a shared library with this name whose functions do nothing. ``symbols``: version -> symbols."""
    target.with_name(target.name + ".stub").touch()
    with tempfile.TemporaryDirectory() as scratch:
        source, versions = Path(scratch, "stub.c"), Path(scratch, "versions")
        names = sorted(name for group in symbols.values() for name in group)
        source.write_text("".join(f"void *{name}(void) {{ return 0; }}\n" for name in names))
        versions.write_text(
            "".join(
                f"{version} {{ global: {''.join(f'{name}; ' for name in group) or '*;'} }};\n"
                for version, group in symbols.items()
            )
        )
        linking = (f"-Wl,-soname,{target.name}", f"-Wl,--version-script={versions}")
        _run("gcc", "-shared", "-fPIC", "-w", *linking, "-o", str(target), str(source))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else ".venv-xla")))
