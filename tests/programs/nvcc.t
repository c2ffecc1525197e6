#!/bin/bash
# nvcc.t: net 1: the CUDA sources compile with nvcc, without a warning, and every program links, over NCCL
# and over MPI; nothing runs. For sm_80; chapter 07, the only code that depends on the kind of GPU, also for
# sm_90a; and book_*.cu, which include most kernels, as PTX for the newest GPUs that this nvcc knows. TAP.
. "$(dirname "$0")/tap.sh"
. tests/programs/nvcc.sh
if [ -z "$nvcc" ]; then
    echo "1..0 # SKIP nvcc is not installed"
    exit 0
fi
! grep -lE '__CUDA_ARCH|/instructions' common/{comm,cuda}/* | grep -v '/instructions' >"$out"
report $? "the back end asks for no kind of GPU, and compiles for the oldest alone"
for comm in nccl mpi; do  # each file is compiled once
    wanted "cuda + $comm: everything compiles without a warning, and links" || continue
    with_nvcc COMM=$comm BUILD=build-nvcc/$comm programs >"$out"
    status=$?
    [ $status = 0 ] && ! grep -qE 'warning[: ]' "$out"
    report $? "cuda + $comm: everything compiles without a warning, and links"
done
finish
