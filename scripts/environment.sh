#!/bin/sh
# usage: environment.sh PYTHON FOLDER EXTRAS CONSTRAINTS
#
# Makes a virtual environment in FOLDER with eqx-norm (editable) and the named extras, in the
# pinned versions, and marks it as ready. What was in FOLDER is lost.
set -eu
python=$1 folder=$2 extras=$3 constraints=$4

found=$(sh "$(dirname "$0")/which-python.sh" "$python")
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
"$folder/bin/python" -m pip install --disable-pip-version-check \
    --constraint "$constraints" --editable ".[$extras]"
touch "$folder/ready"
