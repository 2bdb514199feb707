#!/bin/sh
# usage: newer-python.sh MAJOR.MINOR
#
# Prints a Python of at least that version and exits with 0, or exits with 1. Looks at the
# commands on PATH, and at pyenv's versions, whose commands refuse to run unless selected.
wanted=$1
versions=$(pyenv root 2>/dev/null)/versions
for candidate in python3.12 python3.13 python3.14 python3 \
    "$versions"/3.12*/bin/python "$versions"/3.13*/bin/python "$versions"/3.14*/bin/python; do
    if "$candidate" -c "import sys; sys.exit(sys.version_info[:2] < tuple(map(int, '$wanted'.split('.'))))" \
        >/dev/null 2>&1; then
        echo "$candidate"
        exit 0
    fi
done
exit 1
