"""Makes one of the virtual environments below: `python3 scripts/environment.py NAME`.

An environment has eqx-norm (editable) and pinned versions of its dependencies. It is kept until
pyproject.toml, the pinned versions or this file change, or PYTHON= names another version of
Python. Any python3 can start this file; if it is too old, the file looks for a newer one.
"""

import glob
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONSTRAINTS = ROOT / "scripts" / "constraints"

# Each line has the name, the file of pinned versions, the oldest Python that these support, the
# packages and, after a semicolon, packages without their dependencies: cuDNN, cuBLAS and NCCL
# are gigabytes, and only needed to run. For CUDA drivers older than 580 write cuda12.
ENVIRONMENTS = """
.venv              oldest-jax  3.11  --editable .[dev]
.venv-docs         docs        3.11  --editable .[docs]
.venv-peers        oldest-jax  3.11  --editable .[dev,peers] ; jaxonmodels
.venv-newest       newest-jax  3.12  --editable .[dev]
.venv-compile      compile     3.12  --editable .[experiments] libtpu ; \
                                     jax-cuda12-plugin jax-cuda12-pjrt nvidia-cuda-nvcc-cu12
.venv-gpu          gpu         3.12  --editable .[experiments] jax[cuda13] flax torch
"""


def main(name):
    rows = (line.split(maxsplit=3) for line in ENVIRONMENTS.strip().splitlines())
    constraints, oldest, packages = {row[0]: row[1:] for row in rows}[name]
    ready = ROOT / name / "ready"
    if is_up_to_date(ready):
        return
    minor = int(oldest.partition(".")[2])
    if name == ".venv" and sys.version_info >= (3, 12):
        constraints = "newest-jax"  # as pip would choose for a user
    if sys.version_info >= (3, minor):
        pinned = CONSTRAINTS / f"{constraints}.txt"
        create(ROOT / name, pinned, packages)
        (ROOT / name / "constraints").write_text(str(pinned))  # for make lint
        ready.write_text(sys.version)
        return
    newer = newer_python(minor)
    if newer:
        run(newer, __file__, name)
    else:
        print(f"{name}: no Python {oldest} or later was found here; nothing is done.")
        print("To name one: make PYTHON=/the/path/of/python ...")
        sys.exit(1 if oldest == "3.11" else 0)  # the newest jax may be left out


def is_up_to_date(ready):
    sources = [Path(__file__), ROOT / "pyproject.toml", *CONSTRAINTS.iterdir()]
    newest = max(source.stat().st_mtime for source in sources)
    if not ready.exists() or ready.stat().st_mtime < newest:
        return False
    return "PYTHON" not in os.environ or ready.read_text() == sys.version


def newer_python(minor):
    """Returns the oldest Python from 3.`minor` on that is on PATH or in pyenv, or None."""
    for version in range(minor, 20):
        pyenv = Path.home() / ".pyenv" / "versions" / f"3.{version}.*" / "bin" / "python"
        for python in [f"python3.{version}", *glob.glob(str(pyenv))]:
            # Commands of pyenv on PATH do not start unless their version is selected.
            if shutil.which(python) and not subprocess.call(
                [python, "-c", ""], stderr=subprocess.DEVNULL
            ):
                return python
    return None


def create(folder, constraints, packages):
    print(f"{folder.name}: a new environment, of Python {sys.version.split()[0]}", flush=True)
    # `outside` is the Python with which an activated environment, perhaps this one, was made.
    outside = getattr(sys, "_base_executable", sys.executable)
    python = str(folder / "bin" / "python")
    if importlib.util.find_spec("ensurepip"):
        run(outside, "-m", "venv", "--clear", str(folder))
    else:  # Debian splits ensurepip off, but the pip outside can install pip
        run(outside, "-m", "venv", "--clear", "--without-pip", str(folder))
        run(outside, "-m", "pip", "--python", python, "install", "pip")
    # Modules are compiled when they are imported: compiling all of them here takes 12 s more.
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "--no-compile"]
    pip += ["--constraint", str(constraints)]
    alone = packages.partition(";")[2].split()
    run(*pip, *packages.partition(";")[0].split())
    if alone:
        run(*pip, "--no-deps", *alone)


def run(*command):
    """Runs a command in the checkout, and ends with its status if it fails."""
    status = subprocess.call(command, cwd=str(ROOT))
    if status:
        sys.exit(status)


if __name__ == "__main__":
    main(sys.argv[1])
