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
# Otherwise nvcc, or the driver, fuses them in one of two copies of the same code and not in the other.
echo '__global__ void sum(float *y, float a, float b, float c) { *y = a * b + c; }' >"$work/sum.cu"
compile=$(make -s OPS=cuda CUDA_ARCH= CUDA_PTX=80 course-commands | sed -n 's/^compile-cu //p')
$compile -ptx -o "$work/sum.ptx" "$work/sum.cu" >"$out" 2>&1 && grep -qF mul.rn.f32 "$work/sum.ptx" &&
    grep -qF add.rn.f32 "$work/sum.ptx"
report $? "a product and a sum are fused only where the source says fma"
for comm in nccl mpi; do  # each file is compiled once
    wanted "cuda + $comm: everything compiles without a warning, and links" || continue
    with_nvcc COMM=$comm BUILD=build-nvcc/$comm programs >"$out"
    status=$?
    [ $status = 0 ] && ! grep -qE 'warning[: ]' "$out"
    report $? "cuda + $comm: everything compiles without a warning, and links"
done
finish
