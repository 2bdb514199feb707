#!/bin/sh
# usage: gpu-compile-environment.sh PYTHON FOLDER CONSTRAINTS
#
# Makes a virtual environment in FOLDER with eqx-norm (editable) and as much of jax's CUDA
# plugin as compiles a program for a GPU that is not there: about 1 GB.
set -eu
python=$1 folder=$2 constraints=$3

sh "$(dirname "$0")/environment.sh" "$python" "$folder" experiments "$constraints"
rm "$folder/ready" # not yet
# What the plugin depends on besides (cuDNN, cuBLAS, NCCL, ...) is only needed to run.
"$folder/bin/python" -m pip install --disable-pip-version-check --no-deps \
    --constraint "$constraints" jax-cuda12-plugin jax-cuda12-pjrt nvidia-cuda-nvcc-cu12
touch "$folder/ready"
