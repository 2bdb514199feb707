#!/bin/sh
# usage: same-python.sh PYTHON FOLDER
#
# Exits with 0 if the virtual environment in FOLDER was made with the Python that the command
# PYTHON runs, else with 1.
scripts=$(dirname "$0")
asked=$(sh "$scripts/which-python.sh" "$1" 2>/dev/null) &&
    used=$(sh "$scripts/which-python.sh" "$2/bin/python" 2>/dev/null) &&
    [ "$asked" = "$used" ]
