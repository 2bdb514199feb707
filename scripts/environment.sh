#!/bin/sh
# usage: [PYTHON=python3.12] sh scripts/environment.sh FOLDER [EXTRA]
#
# Makes the virtual environment FOLDER, one of those below, with eqx-norm (editable) and pinned
# versions of what it needs. It is kept if it is newer than what it is made from and, where
# PYTHON is given, was made with that Python; otherwise FOLDER is deleted and made anew. Then
# EXTRA, an extra of pyproject.toml, is installed into it, once.
set -eu
folder=$1 extra=${2-}
constraints=constraints.txt oldest=3.11
set -- # what is installed besides
case $folder in
.venv) extras=dev ;;
.venv-docs) extras=docs constraints=constraints-docs.txt ;;
.venv-peers)
    extras=dev,peers
    set -- --no-deps jaxonmodels # its ResNet needs none of its many dependencies
    ;;
.venv-newest) # the newest jax needs a newer Python than eqx-norm does
    extras=dev constraints=constraints-newest.txt oldest=3.12
    ;;
.venv-gpu-compile) # 1 GB, without cuDNN, cuBLAS, NCCL and others, which only running needs
    extras=experiments constraints=constraints-compile.txt oldest=3.12
    set -- --no-deps jax-cuda12-plugin jax-cuda12-pjrt nvidia-cuda-nvcc-cu12
    ;;
.venv-tpu-compile) # 1.4 GB, half of it libtpu
    extras=experiments constraints=constraints-compile.txt oldest=3.12
    set -- libtpu
    ;;
.venv-gpu) # 7 GB; TORCH= leaves torch out, 3 GB; CUDA=12 is for drivers older than 580
    extras=experiments constraints=constraints-gpu.txt oldest=3.12
    set -- "jax[cuda${CUDA:-13}]" flax ${TORCH-torch}
    ;;
*) echo "$0: there is no environment $folder" >&2 && exit 2 ;;
esac

fail() {
    echo "PYTHON=$python: $1" >&2
    echo "eqx-norm needs Python 3.11 or later. Name one, for example: make PYTHON=python3.12 ..." >&2
    exit 1
}

# Prints the version of the Python that the command $1 runs, and the folder it is installed in: of a
# virtual environment, that of the Python it was made with. In words of every Python since 2.7.
identity() {
    "$1" -c 'import os, sys; print("Python %d.%d.%d in %s" % (
    tuple(sys.version_info[:3])
    + (os.path.realpath(getattr(sys, "base_prefix", sys.prefix)),)))' </dev/null 2>&1
}

is_new_enough() {
    "$1" -c "import sys; sys.exit(sys.version_info[:2] < (${oldest%.*}, ${oldest#*.}))" >/dev/null 2>&1
}

# Python compiles modules when they are imported. Compiling all of them here takes .venv 12 s more.
install() {
    "$folder/bin/python" -m pip install --disable-pip-version-check --no-compile \
        --constraint "$constraints" "$@"
}

# Sets `python` and what it is, `found`; ends where there is none that serves.
choose() {
    python=${PYTHON-python3}
    if [ $oldest != 3.11 ]; then
        # The commands of pyenv's shims do not run unless selected, those of its versions do.
        versions=$(pyenv root 2>/dev/null || true)/versions
        for python in "$python" python3.12 python3.13 python3.14 "$versions"/3.12*/bin/python \
            "$versions"/3.13*/bin/python "$versions"/3.14*/bin/python ''; do
            ! is_new_enough "$python" || break
        done
        if [ -z "$python" ]; then
            rm -f "$folder/ready"
            echo "$folder: no Python $oldest or later was found here; nothing is done"
            exit 0
        fi
    fi
    command -v "$python" >/dev/null || fail "there is no such command."
    found=$(identity "$python") || true
    case $found in
    "Python "*" in /"*) ;;
    *) fail "this is no Python, or one that does not start: $(echo "$found" | head -n 1)" ;;
    esac
    is_new_enough "$python" || fail "this is $found."
}

create() {
    # The Python of an activated environment may be the one that is made anew here.
    python=$("$python" -c 'import sys
print(sys.executable if sys.prefix == sys.base_prefix else sys._base_executable)')
    echo "$folder: a new environment, of $found"
    rm -rf "$folder"
    # A Python without ensurepip (Debian splits it off) cannot put pip into the environment, but
    # the pip outside can install into it. Interrupted, venv ends without a traceback.
    venv='import signal, venv; signal.signal(signal.SIGINT, signal.SIG_DFL); venv.main()'
    if "$python" -c 'import ensurepip' 2>/dev/null; then
        "$python" -c "$venv" "$folder"
    elif "$python" -c 'import pip' 2>/dev/null; then
        "$python" -c "$venv" --without-pip "$folder"
        "$python" -m pip --python "$folder/bin/python" install --disable-pip-version-check pip
    else
        echo "$python has neither ensurepip nor pip. Install either: on Debian and Ubuntu," >&2
        echo "apt-get install python3-venv" >&2
        exit 1
    fi
    install --editable ".[$extras]"
    [ $# -eq 0 ] || install "$@"
    touch "$folder/ready"
}

is_ready() {
    [ -e "$folder/ready" ] &&
        [ -z "$(find "$0" pyproject.toml constraints.txt "$constraints" -newer "$folder/ready")" ]
}

if ! is_ready; then
    choose
    create "$@"
elif [ -n "${PYTHON+given}" ]; then
    choose
    [ "$found" = "$(identity "$folder/bin/python")" ] || create "$@"
fi
if [ -n "$extra" ] && [ ! -e "$folder/ready-$extra" ]; then
    install --editable ".[$extra]"
    touch "$folder/ready-$extra"
fi
