#!/bin/sh
# usage: which-python.sh PYTHON
#
# Prints which Python that command runs: its version, and the folder that it is installed in,
# which for a virtual environment is that of the Python it was made with. Where it is none that
# eqx-norm works with, says why and exits with 1.
python=$1
fail() {
    echo "PYTHON=$python: $1" >&2
    echo "eqx-norm needs Python 3.11 or later. Name one, for example: make PYTHON=python3.12 ..." >&2
    exit 1
}

command -v "$python" >/dev/null || fail "there is no such command."
# In the words of every Python since 2.7.
found=$("$python" -c 'import os, sys; print("Python %d.%d.%d in %s" % (
    tuple(sys.version_info[:3])
    + (os.path.realpath(getattr(sys, "base_prefix", sys.prefix)),)))' </dev/null 2>&1)
case $found in
"Python "*" in /"*) ;;
*) fail "this is no Python, or one that does not start: $(echo "$found" | head -n 1)" ;;
esac
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || fail "this is $found."
echo "$found"
