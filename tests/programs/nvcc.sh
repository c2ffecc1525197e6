# nvcc.sh: what nvcc.t and kernels.t share: a build with nvcc, in build-nvcc/. $nvcc is empty if there is no
# nvcc.
nvcc=$(PATH=$PATH:/usr/local/cuda/bin command -v nvcc)

# with_nvcc ARGUMENTS OF MAKE…: one build at a time, which reuses what others have built. C code does not
# depend on the back end: its objects are those of the usual build. Host code is not optimized, there is no
# line information, and the back end's kernels are built the fastest way (mid: above it no call is inlined,
# and code grows). Kernels of the programs are built as for use, since their registers are counted: what
# ptxas says about each file is kept in build-nvcc/ptxas.txt, after its name. The back end does not depend
# on the kind of GPU, so what compiles for the oldest compiles for all: only chapter 07 is also compiled for
# sm_90a. PTX for the newest GPUs is made from book_*.cu, since they include the programs' kernels and the
# code that does depend on it, instructions*.h. Nothing that is linked here runs: it has no symbols, and the
# fastest linker available is used. Warnings are errors here, and not for users, whose compilers have others.
with_nvcc() {
    local newest back_end='' book='' link=-s log=build-nvcc/ptxas.txt source
    newest=$("$nvcc" --list-gpu-arch | sed 's/.*_//' | sort -n | tail -n 1)
    "$nvcc" --help | grep -q -e '-Ofast-compile' && back_end='-Ofc mid' book='-Ofc max'
    ! gcc -fuse-ld=gold -Wl,--version >/dev/null 2>&1 || link+=' -fuse-ld=gold'
    mkdir -p build-nvcc
    (
        flock 9
        touch $log
        for source in common/*/*.cu 07_kernels/*.cu; do  # left by an interrupted build
            grep -q " $source\$" $log || rm -f "build-nvcc/kernels/$source.o"
        done
        timeout -k 5 1500 make -O -j"$(nproc)" --no-print-directory OPS=cuda CUDA_ARCH=80 CUDA_PTX= \
            NVCC_SAYS='-Xptxas -v --Werror all-warnings' NVCC_OPT=-O0 OBJECTS=build KERNELS=build-nvcc/kernels \
            NVCC_BACK_END="$back_end" LDFLAGS_EXTRA="$link" \
            NVCC_KERNELS="-gencode arch=compute_90a,code=sm_90a" \
            NVCC_BOOK="$book -gencode arch=compute_$newest,code=compute_$newest" "$@" 2>&1 | tee -a $log
        exit "${PIPESTATUS[0]}"
    ) 9>build-nvcc/lock
}

# of_ptxas SOURCE: what ptxas said about it last.
of_ptxas() {
    awk -v source="$1" '/^  [^ ]+  [^ ]+$/ { mine = $2 == source; if (mine) said = "" }
        mine { said = said $0 "\n" } END { printf "%s", said }' build-nvcc/ptxas.txt
}
