#!/bin/bash
# backends.t: chapters do not depend on a back end; a build that lacks something it needs says so in one
# sentence, with the remedy. TAP.
# needs: build/corpus.txt build/main/tests/unit/test_in_flight.o build/00_single_gpu/train
# needs: build/08_mixed_precision/bf16
. "$(dirname "$0")/tap.sh"
unset OPS COMM BUILD CUDA_HOME CUBLAS_HOME NCCL_HOME NVCC CC CXX

# refused WORDS VARIABLES…: make stops before it builds anything, after one line on stderr with all the WORDS.
refused() {
    local words=$1 status word
    shift
    make -n "$@" programs >"$out" 2>"$err"
    status=$?
    [ $status = 2 ] && [ "$(wc -l <"$err")" = 1 ] && [ ! -s "$out" ]
    status=$?
    for word in $words; do grep -qF -e "$word" "$err" || status=1; done
    report $status "make $(sed "s|$work/||g" <<<"$*"): $(sed "s|$work/||g; s/.*\*\*\* //" "$err")"
}
refused "OPS=gpu cpu, cuda cuda-on-cpu" OPS=gpu
refused "COMM=tcp nccl" COMM=tcp
refused "COMM=nccl OPS=cpu" OPS=cpu COMM=nccl
refused "/nowhere/bin/nvcc CUDA_HOME=" OPS=cuda CUDA_HOME=/nowhere
refused "/nowhere/bin/nvcc CUDA_HOME=" OPS=cuda COMM=nccl CUDA_HOME=/nowhere

# A toolkit, as much of it as make looks at.
kit=$work/kit
mkdir -p "$kit/bin" "$kit/lib64" "$kit/include"
touch "$kit/bin/nvcc" "$kit/lib64/libcudart.so"
refused "$work libcublasLt CUBLAS_HOME=" OPS=cuda CUDA_HOME="$kit" CUBLAS_HOME="$work"
touch "$kit/lib64/libcublasLt.so"
refused "/nowhere/include/nccl.h NCCL_HOME=" OPS=cuda COMM=nccl CUDA_HOME="$kit" NCCL_HOME=/nowhere
refused "CUDA_ARCH=70 8.0 (A100)" OPS=cuda COMM=mpi CUDA_HOME="$kit" CUDA_ARCH=70
mkdir -p "$work/nccl/include" "$work/nccl/lib"
touch "$work/nccl/include/nccl.h"
make OPS=cuda COMM=nccl CUDA_HOME=/nowhere help >"$out" 2>"$err" && [ ! -s "$err" ] &&
    grep -q CUDA_HOME "$out"
report $? "make help needs no toolkit, and names the variables"

# Libraries of a Python package, which has them only under versioned names; and machine code only for the GPUs
# asked for.
touch "$work/nccl/lib/libnccl.so.2"
make -n OPS=cuda COMM=nccl CUDA_HOME="$kit" NCCL_HOME="$work/nccl" CUDA_ARCH=80 CUDA_PTX= \
    BUILD="$work/build" programs \
    >"$out" 2>"$err"
report $? "a toolkit here and NCCL there fit together"
link=$(grep -v -e ' -c ' "$out" | grep -m 1 -e '-o [^ ]*/train[^ ]*.part ')
grep -q " $work/nccl/lib/libnccl.so.2 " <<<"$link" && grep -q -e "-Wl,-rpath,$work/nccl/lib" <<<"$link" &&
    grep -q -e "-Wl,-rpath,$kit/lib64" <<<"$link"
report $? "the programs find both when they start"
! grep -e ' -o ' "$out" | grep -qv -F '.$$.part && mv '
report $? "no command writes a file that another make may be writing"
[ "$(grep -c -e '-gencode arch=compute_80,code=sm_80 ' "$out")" -gt 0 ] && ! grep -q 'compute_90' "$out"
report $? "CUDA_ARCH and CUDA_PTX choose the GPUs"
make -n OPS=cuda COMM=mpi CUDA_HOME="$kit" CUDA_ARCH="80 90" CUDA_PTX= BUILD="$work/build" programs \
    >"$out" 2>"$err"
! grep -q 'code=sm_90 ' "$out" && grep -q 'code=sm_80 -gencode arch=compute_90a,code=sm_90a ' "$out"
report $? "CUDA_ARCH=90 is 90a, without which there is neither TMA nor wgmma"

# Kinds of GPUs: those that nvcc knows, and those that nvidia-smi lists.
cat >"$kit/bin/nvcc" <<'END'
#!/bin/sh
case $1 in
    --version) echo "Cuda compilation tools, release ${RELEASE:-12.4}, V12.4.131" ;;
    --list-gpu-arch) printf 'compute_%s\n' 80 86 89 90 ;;
esac
END
mkdir "$work/here"
cat >"$work/here/nvidia-smi" <<'END'
#!/bin/sh
printf '%s\n' "$GPUS"
END
chmod +x "$kit/bin/nvcc" "$work/here/nvidia-smi"
RELEASE=11.8 refused "CUDA 12 11.8 CUDA_HOME=" OPS=cuda COMM=mpi CUDA_HOME="$kit"
refused "CUDA_ARCH=120 80 86 89 90" OPS=cuda COMM=mpi CUDA_HOME="$kit" CUDA_ARCH=120
# built_for WORDS…: the code that nvcc makes where nvidia-smi says $GPUS.
built_for() {
    PATH=$work/here:$PATH make -s OPS=cuda COMM=mpi CUDA_HOME="$kit" course-commands >"$out" 2>"$err"
    [ ! -s "$err" ] && [ "$(grep '^compile-cu ' "$out" | grep -o 'code=[a-z0-9_]*' | xargs)" = "$*" ]
    report $? "nvidia-smi says ${GPUS//$'\n'/, }: $*"
}
others="code=sm_80 code=sm_90a code=compute_90"
GPUS=8.9 built_for code=sm_89
GPUS=$'9.0\n8.0\n9.0\n7.5' built_for code=sm_80 code=sm_90a
GPUS=12.0 built_for $others
GPUS=$'8.9\n12.0' built_for $others
GPUS=7.0 built_for $others
GPUS="NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver." built_for $others

if nvidia-smi -L >/dev/null 2>&1; then report 0 "make gpu-check without a GPU # SKIP there is one"; else
    OUT=$work/gpu make gpu-check PART=suite >"$out" 2>"$err"
    [ $? = 2 ] && [ "$(grep -vc '^make' "$err")" = 1 ] && grep -q '^gpu-check: no GPU' "$err" &&
        [ ! -e "$work/gpu" ]
    report $? "make gpu-check without a GPU: $(head -n 1 "$err")"
fi

# A machine with a GPU that is too old, according to nvidia-smi.
mkdir "$work/old"
cat >"$work/old/nvidia-smi" <<'END'
#!/bin/sh
case $* in
    -L) echo 'GPU 0: Tesla V100-SXM2-16GB (UUID: GPU-0)' ;;
    *name*) echo 'Tesla V100-SXM2-16GB' ;;
    *compute_cap*) echo 7.0 ;;
esac
END
chmod +x "$work/old/nvidia-smi"
OUT=$work/gpu PATH=$work/old:$PATH tests/gpu-check suite >"$out" 2>"$err"
[ $? = 2 ] && [ "$(wc -l <"$err")" = 1 ] && grep -q 'V100.* 8.0 (A100)' "$err" && [ ! -e "$work/gpu" ]
report $? "gpu-check on a V100: $(head -n 1 "$err")"

# An H100 where OpenBLAS is not installed: told before ten minutes of errors.
mkdir "$work/bare"
sed 's/7\.0/9.0/; s/V100-SXM2-16GB/H100/' "$work/old/nvidia-smi" >"$work/bare/nvidia-smi"
cat >"$work/bare/gcc" <<END
#!/bin/sh
[ "\$*" != -print-multiarch ] || exec $(command -v gcc) "\$@"
text=\$(cat)
! echo "\$text" | grep -q cblas && echo "\$text" | $(command -v gcc) "\$@"
END
chmod +x "$work/bare"/*
OUT=$work/gpu PATH=$work/bare:$PATH tests/gpu-check suite >"$out" 2>"$err"
[ $? = 2 ] && [ "$(wc -l <"$err")" = 1 ] && grep -q 'lacks cblas.h: install' "$err" && [ ! -e "$work/gpu" ]
report $? "gpu-check without OpenBLAS: $(head -n 1 "$err")"

# gpu-check in a tree of programs that only print figures. A step of 0.2 s takes twice as long as at its mark;
# with --attention flash, one of 0.07 s is faster than at its own.
mkdir -p "$work"/tree/{tests,build/{tests,00_single_gpu,08_mixed_precision}}
cp tests/gpu-check "$work/tree/tests"
cat >"$work/tree/build/tests/bench_ops" <<'END'
#!/bin/sh
echo 'bench copy-bf16 4000 GB/s'
echo 'bench add-bf16 0.912 of-copy target 0.8 ok   (3648 GB/s)'
echo 'bench scale-bf16 0.700 of-copy target 0.8 short   (2800 GB/s)'
echo 'bench rope-bf16 0.650 of-copy target 0.8 short   (2600 GB/s)'
END
cat >"$work/tree/build/00_single_gpu/train" <<'END'
#!/bin/bash
seconds=0.2
for word; do
    case $last in --json) json=$word ;; --trace) trace=$word ;; esac
    [ "$word" != flash ] || seconds=0.07
    last=$word
done
[ -z "$json" ] || printf '%s\n' '"FLOPs per step": {' '"predicted": 34615000000000' '}' \
    "\"step seconds\": [9, 9, 9, $seconds, $seconds, $seconds]" >"$json"
[ -n "$trace" ] || exit 0
event() { printf '{"ph":"%s","pid":%d,"tid":0,"ts":1%s},\n' $1 $pid "$2"; }
begin() { event B ",\"name\":\"$1\""; }
operation() { event X ",\"name\":\"$1\",\"dur\":$2000.5,\"args\":{\"flops\":$3,\"bytes\":1}"; }
for pid in 1 0; do
    begin "step 2"; operation matmul 900 2e9; event E
    begin "step 3"
    begin forward; operation matmul 45 1500000000; operation attention_forward 65 1e9; event E
    event C ',"name":"memory","args":{"parameters":1}'
    operation matmul 50 1.5e9; operation adamw 30 0; event E
    operation rmsnorm_forward 900 0
done >"$trace"
END
cp "$work/tree/build/00_single_gpu/train" "$work/tree/build/08_mixed_precision/bf16"
# PyTorch, which is twice as fast as the fastest: 8 x 32 tokens in 0.035 s.
cat >"$work/tree/python" <<'END'
#!/bin/sh
[ "$1" = -c ] || echo 'bench torch-train 7314 tokens/s'
END
chmod +x "$work/tree/python" "$work/tree/build"/*/*
# rehearsed PYTHON: what the part `bench` says to be missing, in $work/missing.
rehearsed() {
    REHEARSE=1 OUT=$work/gpu PYTHON=$1 run "$work/tree/tests/gpu-check" bench
    sed -n '1,/^rehearsed/d; s/  */ /g; s/^bench figure 0 s missing, //p' "$out" >"$work/missing"
}
name="gpu-check names the operations that miss a mark, and how much of a step they take"
if wanted "$name"; then
    rehearsed "$work/tree/python"
    [ $status = 0 ] && diff "$work/missing" - >>"$out" <<'END'
kernels rope-bf16 0.650, scale-bf16 0.700 of a copy
train --attention stored attention_forward 20%, adamw 15%, matmul 10%, host 5% of a step
train beside PyTorch matmul 98%, attention_forward 80%, adamw 43% of a step
END
    report $? "$name"
fi
name="gpu-check reads the traces that train writes"
if wanted "$name"; then
    for program in 00_single_gpu/train 08_mixed_precision/bf16; do
        ln -sf "$PWD/build/$program" "$work/tree/build/$program"
    done
    rehearsed false
    [ $status = 0 ] && [ 5 = "$(grep -cE '^train .* [a-z_]+ [0-9]+%(, [a-z_]+ [0-9]+%)+ of a step$' \
        "$work/missing")" ]
    report $? "$name"
fi

# gcc on a processor with AVX10, as much as make asks of it: gcc 15, which warns about its own flag, or gcc
# 14.
cat >"$work/gcc" <<'END'
#!/bin/sh
echo 'COLLECT_GCC_OPTIONS=-v -march=native'
echo ' /libexec/cc1 -quiet -march=sapphirerapids -mavx512f -mavx10.1 -mno-avx10.2 --param l1=48 -O3' >&2
[ "$VERSION" = 14 ] || echo "cc1: warning: '-mavx10.1' is aliased to 512 bit" >&2
END
chmod +x "$work/gcc"
machine() { VERSION=$1 make -s CC="$work/gcc" course-commands 2>"$err" | grep -o -e ' -m.* -fno-math'; }
[ "$(machine 15 | uniq)" = ' -march=sapphirerapids -mavx512f -fno-math' ] && [ ! -s "$err" ]
report $? "gcc 15 is not given a flag that it warns of"
[ "$(machine 14 | uniq)" = ' -march=native -fno-math' ] && [ ! -s "$err" ]
report $? "any other compiler is given -march=native"

# Files that ask the compiler which instructions the processor has, and the sources that include them, are
# compiled for processors that answer differently; this machine is only one of them. No object is written.
asks='__(SSE|AVX|AMX|FMA|F16C|FLT16)[A-Z0-9_]*__|FP_FAST_FMA'
mapfile -t sources < <(find common 0*_* tests/unit -name '*.[ch]' -o -name '*.inc')
mapfile -t asking < <(grep -lE "$asks" "${sources[@]}")
for ((i = 0; i < ${#asking[@]}; i++)); do
    [[ ${asking[i]} == *.c ]] || mapfile -t -O ${#asking[@]} asking < <(
        grep -lE "^ *# *include \"(.*/)?${asking[i]##*/}\"" "${sources[@]}")
done
mapfile -t asking < <(printf "$work/objects/main/%s\n" "${asking[@]}" | sed -n 's/\.c$/.o/p' | sort -u)
for compiler in gcc clang; do
    for processor in x86-64-v2 x86-64-v3 x86-64-v4 sapphirerapids; do
        name="$compiler, for $processor: no warning in what asks which instructions there are"
        wanted "$name" || continue
        if ! $compiler -march=$processor -fsyntax-only -x c /dev/null 2>"$err"; then
            report 0 "$name # SKIP $compiler: $(grep -m 1 . "$err" | sed 's/.*error: //')"
            continue
        fi
        make -s -k -j"$(nproc)" CC=$compiler NATIVE=-march=$processor BUILD="$work/objects" "${asking[@]}" \
            CFLAGS_EXTRA='-fsyntax-only -Werror -Wno-unused-command-line-argument' >"$out" 2>"$err"
        status=$?
        report $status "$name"
    done
done

# Several builds check at once whether their command lines have changed, as in tests: none may remove the file
# that another compares. Slow comparisons make them overlap.
mkdir "$work/bin"
cat >"$work/bin/cmp" <<END
#!/bin/sh
$(command -v cmp) "\$@"
status=\$?
sleep 0.5
exit \$status
END
chmod +x "$work/bin/cmp"
held=("$work"/held/{flags,flags-link,lib/flags-cuda})
three_at_once() {
    local builds=() pid status=0
    make -s OPS=cuda-on-cpu BUILD="$work/held" "${held[@]}" && touch -d '1 minute ago' "${held[@]}" || return
    for _ in 1 2 3; do
        PATH=$work/bin:$PATH make -s OPS=cuda-on-cpu BUILD="$work/held" "${held[@]}" &
        builds+=($!)
    done
    for pid in "${builds[@]}"; do wait "$pid" || status=1; done
    [ -z "$(find "${held[@]}" -newermt '30 seconds ago')" ] && return $status
}
three_at_once >"$out" 2>"$err"
report $? "builds with the same command lines run at once, and make nothing again"

# A chapter names neither CUDA nor a library below the core, and has no conditional but the one for its main.
sed 's|//.*||; s/"[^"]*"//g' 0[0-9]_*/*.c | grep -niE 'cuda|nccl|mpi_|cublas|cblas|<<<' >"$out"
[ ! -s "$out" ]
report $? "chapters name no back end"
grep -nE '^ *# *(if|elif)' 0[0-9]_*/*.c | grep -v ':#ifndef NO_MAIN$' >"$out"
[ ! -s "$out" ]
report $? "chapters have no #if but that around main"

# Bugs that only a GPU shows are planted on one (tests/gpu-check), but must fit the sources here too.
tests/mutants/run --gpu --check >"$out" 2>"$err"
report $? "the bugs of tests/mutants/gpu.txt fit the sources"

finish
