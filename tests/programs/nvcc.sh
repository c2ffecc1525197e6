# nvcc.sh: what nvcc.t and kernels.t share: a build with nvcc, in build-nvcc/. $nvcc is empty where there is
# none.
nvcc=$(PATH=$PATH:/usr/local/cuda/bin command -v nvcc)

# with_nvcc ARGUMENTS OF MAKE…: one build at a time, which finds what others have made. What computes is
# nothing to C: its objects are those of the usual build. Host code is not optimized, no code names its
# lines, and the back end's kernels are as they compile fastest (mid: beyond it no call is inlined, and code
# grows); those of the programs are as for use, since their registers are counted: what ptxas says of each
# file stays in build-nvcc/ptxas.txt, behind its name. The back end asks for no kind of GPU, so that what
# compiles for the oldest does for all: chapter 07 alone is compiled for sm_90a as well. PTX of the newest
# GPUs is made of book_*.cu, since they take in the programs' kernels and what does ask, instructions*.h.
# What is linked runs nowhere: it has no symbols, and the fastest linker there is.
with_nvcc() {
    local newest back_end='' book='' link=-s log=build-nvcc/ptxas.txt source
    newest=$("$nvcc" --list-gpu-arch | sed 's/.*_//' | sort -n | tail -n 1)
    "$nvcc" --help | grep -q -e '-Ofast-compile' && back_end='-Ofc mid' book='-Ofc max'
    ! gcc -fuse-ld=gold -Wl,--version >/dev/null 2>&1 || link+=' -fuse-ld=gold'
    mkdir -p build-nvcc
    (
        flock 9
        touch $log
        for source in common/*/*.cu 07_kernels/*.cu; do  # of a build that was broken off
            grep -q " $source\$" $log || rm -f "build-nvcc/kernels/$source.o"
        done
        timeout -k 5 1500 make -O -j"$(nproc)" --no-print-directory OPS=cuda CUDA_ARCH=80 CUDA_PTX= \
            NVCC_SAYS='-Xptxas -v' NVCC_OPT=-O0 OBJECTS=build KERNELS=build-nvcc/kernels \
            NVCC_BACK_END="$back_end" LDFLAGS_EXTRA="$link" \
            NVCC_KERNELS="-gencode arch=compute_90a,code=sm_90a" \
            NVCC_BOOK="$book -gencode arch=compute_$newest,code=compute_$newest" "$@" 2>&1 | tee -a $log
        exit "${PIPESTATUS[0]}"
    ) 9>build-nvcc/lock
}

# of_ptxas SOURCE: what ptxas said of it last.
of_ptxas() {
    awk -v source="$1" '/^  [^ ]+  [^ ]+$/ { mine = $2 == source; if (mine) said = "" }
        mine { said = said $0 "\n" } END { printf "%s", said }' build-nvcc/ptxas.txt
}
