#!/bin/sh
# usage: environment.sh PYTHON FOLDER EXTRAS CONSTRAINTS
#
# Makes a virtual environment in FOLDER with eqx-norm (editable) and the named extras, in the
# pinned versions, and marks it as ready.
set -eu
python=$1 folder=$2 extras=$3 constraints=$4

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "eqx-norm needs Python 3.11 or later; $python is $("$python" --version)." >&2
    echo "Name another: make PYTHON=python3.12 ..." >&2
    exit 1
}
# A Python without ensurepip (Debian splits it off) cannot put pip into the environment, but
# the pip outside can install into it.
rm -rf "$folder"
if "$python" -c 'import ensurepip' 2>/dev/null; then
    "$python" -m venv "$folder"
else
    "$python" -m venv --without-pip "$folder"
    "$python" -m pip --python "$folder/bin/python" install --quiet pip
fi
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check \
    --constraint "$constraints" --editable ".[$extras]"
touch "$folder/ready"
