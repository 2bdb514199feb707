#!/bin/sh
# usage: [CUDA=12] [TORCH=] gpu-environment.sh PYTHON FOLDER CONSTRAINTS
#
# Makes a virtual environment in FOLDER with eqx-norm (editable), jax for CUDA 13 (or 12, for a
# driver older than 580), Flax and torch: about 7 GB. With TORCH= and nothing after it there is
# no torch, 3 GB less, and its rows are left out of what is measured.
set -eu
python=$1 folder=$2 constraints=$3

command -v nvidia-smi >/dev/null || {
    echo "make gpu measures a GPU, and there is none here (no nvidia-smi); nothing measured" >&2
    exit 2
}
sh "$(dirname "$0")/environment.sh" "$python" "$folder" experiments "$constraints"
rm "$folder/ready" # not yet
"$folder/bin/python" -m pip install --disable-pip-version-check \
    --constraint "$constraints" "jax[cuda${CUDA:-13}]" flax ${TORCH-torch}
touch "$folder/ready"
