#!/bin/bash
# nvcc.t: net 1: the CUDA sources compile with nvcc, without a warning, and every program links, over NCCL
# and over MPI; nothing runs. For sm_80, sm_90a, and as PTX of the newest GPUs that this nvcc knows. TAP.
. "$(dirname "$0")/tap.sh"
nvcc=$(PATH=$PATH:/usr/local/cuda/bin command -v nvcc)
if [ -z "$nvcc" ]; then
    echo "1..0 # SKIP nvcc is not installed"
    exit 0
fi
limit=1500
newest=$("$nvcc" --list-gpu-arch | sed 's/.*_//' | sort -n | tail -n 1)
for comm in nccl mpi; do  # each file is compiled once
    run make -s -j"$(nproc)" OPS=cuda COMM=$comm "CUDA_ARCH=80 90a" CUDA_PTX="$newest" OPT=-O0 \
        BUILD=build-nvcc/$comm OBJECTS=build-nvcc/objects KERNELS=build-nvcc/kernels programs
    [ $status = 0 ] && ! grep -qE 'warning[: ]' "$out" "$err"
    report $? "cuda + $comm: everything compiles without a warning, and links"
done
finish
