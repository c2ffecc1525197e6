#!/bin/bash
# kernels.t: the programs of chapter 07 in the emulator: each reaches its verdict, which compares every
# count with its formula(), and shows what the playbook says. If nvcc is installed: no kernel
# spills a register, waits for each wgmma separately or keeps registers that it should give up, and each
# needs as many as its program says. TAP.
# needs: build/07_kernels/vector_add build/07_kernels/coalescing build/07_kernels/divergence
# needs: build/07_kernels/tiling build/07_kernels/coarsening build/07_kernels/fused_elementwise
# needs: build/07_kernels/flash_attention_1 build/07_kernels/flash_attention_1_backward
# needs: build/07_kernels/flash_attention_2 build/07_kernels/flash_attention_2_backward
# needs: build/07_kernels/flash_attention_2_tensor build/07_kernels/flash_attention_2_tensor_backward
# needs: build/07_kernels/flash_attention_3 build/07_kernels/flash_attention_3_backward
# needs: build/07_kernels/flash_attention_3_fp8
# needs: build/07_kernels/fused_norm build/07_kernels/fused_cross_entropy build/00_single_gpu/train
# needs: build/07_kernels/fused_swiglu build/07_kernels/fused_adamw build/07_kernels/tensor_cores
# needs: build/07_kernels/hopper build/07_kernels/hopper_fp8
# slow: flash_*
# slow: heads of 64, third*
# slow: backward of heads of 64*
. "$(dirname "$0")/tap.sh"
needs_fibers
export ULTRASCALE_GUARD=1  # device memory is closed to them except in kernels and copies

for source in $(grep -l '^int main' 07_kernels/*.cu); do
    name=$(basename "$source" .cu)
    : >"$out"  # where a pattern leaves this one out, what the last one printed is not its own
    passes "$name" 07_kernels/"$name" --verbose --json "$work/$name.json"
    ! grep -q '^PASS' "$out" || cp "$out" "$work/$name.txt"
done
passes "on an A100" 07_kernels/vector_add --gpu a100 --json "$work/a100.json"
if wanted "on an A100: and modelled as one"; then  # in the run above
    grep -q '^modelled on an NVIDIA A100 ' "$out" && python3 - "$out" "$work/a100.json" <<'PYTHON'
import json, re, sys
numbers = json.load(open(sys.argv[2]))['numbers']['one a thread']
row = re.search(r'^one a thread +([0-9.]+) ', open(sys.argv[1]).read(), re.M)
assert '%.4g' % (1e3 * numbers['modelled']['value']) == row.group(1) and numbers['modelled']['unit'] == 's'
assert numbers['load_requests']['value'] == 2 * 67108864 / 32  # a warp's, of a and b
PYTHON
    report $? "on an A100: and modelled as one, in --json in seconds"
fi
of_64() { passes "$1" 07_kernels/"$2" --head-size 64 --json "$work/$2.64.json"; }
# The first version's heads of 64 are the runs of exercises, in which exercises.t demands that it passes.
of_64 "heads of 64, second version" flash_attention_2
of_64 "heads of 64, on tensor cores" flash_attention_2_tensor
of_64 "backward of heads of 64, tensor cores" flash_attention_2_tensor_backward
of_64 "heads of 64, third version" flash_attention_3
of_64 "heads of 64, 8 bits" flash_attention_3_fp8
of_64 "backward of heads of 64, third version" flash_attention_3_backward
of_64 "backward of heads of 64, second version" flash_attention_2_backward
refused "--gpu a100 has neither TMA nor wgmma" 07_kernels/hopper --gpu a100
refused "--gpu a100 has neither TMA nor wgmma, of which hopper_fp8" 07_kernels/hopper_fp8 --gpu a100
refused "--gpu" 07_kernels/vector_add --gpu abacus
for program in vector_add hopper; do
    CUDA_VISIBLE_DEVICES= run "$build/07_kernels/$program"
    [ $? = 2 ] && [ "$(wc -l <"$err")" = 1 ] && grep -q 'no GPU can be used here (no CUDA-capable dev' "$err"
    report $? "$program without a GPU: $(cat "$err")"
done
refused "--size 100 is out of bounds: it is from 128" 07_kernels/flash_attention_2_tensor --size 100
refused "--gpu a100 has neither TMA nor wgmma, of which flash_attention_3" 07_kernels/flash_attention_3 \
    --gpu a100
refused "this build computes on the CPU and has no CUDA kernels" 00_single_gpu/train --kernels book

# shows NAME PROGRAM PATTERN: a line of its table matches. Emulation is slow: a program runs once for all
# lines.
shows() {
    wanted "$1" || return 0
    [ -e "$work/$2.txt" ] || { run "$build/07_kernels/$2" --verbose && cp "$out" "$work/$2.txt"; }
    grep -qE -- "$3" "$work/$2.txt"
    report $? "$1"
}
shows "a row in shared memory leaves room for half of the warps" fused_norm '^fused .* 50% +[0-9]'
shows "by x takes 33 sectors a step, in 2 requests" coalescing '^matmul by x .* 16\.5 '
shows "by y takes 5" coalescing '^matmul by y .* 2\.5 '
shows "a strided copy takes 32 sectors a request" coalescing '^copy, strided .* 32 '
shows "--verbose: a count, by formula, and by formula at full size" vector_add \
    '^ +load requests +64 +64 +1048576$'
shows "--verbose: the time of each part, and what limits the warps that fit" hopper \
    '^ +memory 0\.03005, L2 0\.1791, .* ms; 8 of 64 warps fit, limited by registers$'
shows "persistent blocks at full size are as many as an H100 has multiprocessors" hopper \
    '^ +barriers +3 +3 +132$'
shows "tiles of 32 take 8 sectors in place of 160" tiling 'in 32 steps, tiles +predicted +8 +measured +8 '
shows "a column in one bank takes 32 passes" tiling '^A B., in one bank .* 1503% '
shows "a swizzle has no bank conflicts" tiling '^A B., swizzled .* 0% '
shows "half of the lanes wait at a branch" divergence '^branch by lane .* 50% '
shows "8 x 8 outputs reach nine tenths of the limit" coarsening '^8 x 8 .* 91\.4% '
shows "on an H100, shared memory limits mma" tensor_cores '^4 stages +0\.191 +shared +72\.7% '
shows "so they do for flash attention" flash_attention_2_tensor '^bf16 +0\.42 +shared +66\.1% '
shows "not so with wgmma, which leaves the tensor cores" flash_attention_3 \
    '^ping-pong +0\.2778 +tensor +100'
shows "turns keep tensor cores at work" flash_attention_3 '^timeline of ping-pong +by issue .* busy +85%'
shows "backward takes 0.41 of the time of mma" flash_attention_3_backward '^bf16 +0\.732 +shared +75\.9% '
shows "with 8 bits shared memory and exponentials do" flash_attention_3_fp8 \
    '^ping-pong +0\.159 +shared +87\.4%'
shows "on an H100, L2 limits wgmma" hopper '^persistent +0\.1791 +L2 +77\.6% '
shows "promotion to f32 takes no time beside L2" hopper_fp8 '^promoted +0\.1218 +L2 +57\.0% '
shows "scales of blocks are loaded, too" hopper_fp8 '^block scales +0\.137 +L2 +50\.7% '
shows "fused, AdamW moves 28 bytes a weight" fused_adamw '^fused .* 1\.95 GB '
shows "flash stores 32.7 times less than scores" flash_attention_1 '^flash +67\.6 MB +236 MB '

# The sectors that each version in a program loads.
loaded() {
    grep -A 1 '"load_sectors"' "$work/$1.json" |
        sed -n 's/.*"value":[[:space:]]*\([0-9]*\).*/\1/p' | sort -u
}
if wanted "flash_attention_3 loads what the second loads"; then
    second=$(loaded flash_attention_2_tensor)
    [ -n "$second" ] && [ "$(loaded flash_attention_3)" = "$second" ]
    report $? "flash_attention_3 loads what the second loads"
fi

# On a GPU a program has arrays of the table's size, which may be smaller than those with which the emulator
# counts. Here one believes that it is there.
name="on a GPU, no launch is larger than the table"
if wanted "$name"; then
    cp 07_kernels/coalescing.cu 07_kernels/kernels.h "$work" &&
        sed 's/ON_GPU = false/ON_GPU = true/' 07_kernels/launch.h >"$work/launch.h" &&
        ! cmp -s 07_kernels/launch.h "$work/launch.h" &&
        eval "$(cat "$build"/lib/flags-cuda)" -c "$work/coalescing.cu" -o "$work/coalescing.o" &&
        made='"$work/coalescing.o" "$build"/lib/common/cuda_on_cpu/*.o "$build"/libultrascale.a' &&
        eval "$(sed "s| | $made |" "$build"/flags-link)" -lboost_context -lstdc++ -o "$work/coalescing" &&
        run "$work/coalescing" --words 128 --size 128 && grep -q '^PASS' "$out"
    report $? "$name"
fi

# In 16 bits. The emulator counts one instruction for exp2f, which takes four on a GPU.
grep -nE '\bexp2f?\(' 07_kernels/flash_*tensor* 07_kernels/flash_attention_3* 07_kernels/flash_w*.h >"$out"
[ $? = 1 ]  # no match; 2 would mean that a file is missing
report $? "an exponential is one instruction"

. tests/programs/nvcc.sh
if [ -z "$nvcc" ]; then
    report 0 "registers # SKIP nvcc is not installed"
    finish
fi
# ptxas counts the registers of each kernel on either GPU. Each number that a program says must be the most
# that one of its kernels needs, and the largest of them the most that any needs.
# nvcc.t may run at the same time and compiles the same files: the second of the two waits for them.
built=''
for source in $(grep -l '^int main' 07_kernels/*.cu); do
    name=$(basename "$source" .cu)
    wanted "$name: registers are as it says, and none spills" || continue
    if [ -z "$built" ]; then
        with_nvcc COMM=mpi BUILD=build-nvcc/mpi \
            $(grep -l '^int main' 07_kernels/*.cu | sed 's|.*|build-nvcc/kernels/&.o|') >"$out"
        built=$?
    fi
    of_ptxas "$source" >"$out"
    used=$(awk -F "'" '/Compiling entry function/ { kernel = $2 }
        match($0, /Used [0-9]+/) {
            n = substr($0, RSTART + 5, RLENGTH - 5) + 0
            if (n > most[kernel]) most[kernel] = n
        }
        END { for (kernel in most) print most[kernel] }' "$out" | sort -u)
    said=$(cat "$work/$name.json" "$work/$name.64.json" 2>/dev/null | grep -A 1 '"registers"' |
        sed -n 's/.*"value":[[:space:]]*\([0-9]*\).*/\1/p' | sort -u)
    [ $built = 0 ] && grep -q ' 0 bytes spill stores' "$out" && [ -n "$said" ] &&
        [ -z "$(comm -13 <(echo "$used") <(echo "$said"))" ] &&
        [ "$(sort -n <<<"$used" | tail -n 1)" = "$(sort -n <<<"$said" | tail -n 1)" ] &&
        ! grep -qE '[1-9][0-9]* bytes (spill|stack)|wgmma.*serialized|Performance Loss|warning[: ]' "$out"
    report $? "$name: registers are as it says, and none spills"
done
# orders NAME PROGRAM KERNEL COUNT PATTERN: ptxas has left the instructions of these kernels, as letters of
# machine_code.py, in an order that the pattern matches. All the numbers are right in any order.
orders() {
    local object=build-nvcc/kernels/07_kernels/$2.cu.o
    wanted "$1" || return 0
    with_nvcc COMM=mpi BUILD=build-nvcc/mpi "$object" >"$out" &&
        python3 tests/programs/machine_code.py "$object" "$3" >"$out" &&
        [ "$(grep -cE " .*$5" "$out")" = "$4" ]
    report $? "$1"
}
exponentials() { echo "1[^01]*(e[^01]*){$1}0"; }  # after the wait for scores, before the next one
orders "exponentials do not wait for P V" flash_attention_3 Lb1E5Heads 4 "$(exponentials 64)"
orders "exponentials do not wait for P V, 8 bits" flash_attention_3_fp8 attentionI13__nv_bfloat16Li128E5Heads 1 \
    "$(exponentials 64)"
orders "of the exponentials a quarter or more does not wait for dP" flash_attention_3_backward \
    E5Heads 4 "$(exponentials 8)"
orders "dQ is added without a branch between" flash_attention_3_backward attention_backward 8 'r{32}'
orders "what is in C is loaded at once" hopper_fp8 matmul 8 'l{30}'
orders "what is in dx' is loaded at once" fused_norm norm_backward 6 '\|[^s|]*l{8}'
orders "what is in dQ is loaded at once" flash_attention_2_tensor_backward Li128E5Heads 4 'l{12}'
# What the table says of a branch is true of a GPU only if nvcc has left both sides: 256 steps each.
if wanted "divergence: nvcc keeps both sides of the branch"; then
    run "$nvcc" -std=c++17 -O3 -fmad=false -Icommon -I. -I07_kernels -arch=sm_90a -ptx \
        -o "$work/divergence.ptx" 07_kernels/divergence.cu &&
        [ "$(awk '/entry/ { f = /branch_by_lane/ } f && /fma/' "$work/divergence.ptx" | wc -l)" = 512 ]
    report $? "divergence: nvcc keeps both sides of the branch"
fi
# The table of the book's kernels has products that no program runs: transposed, and adding.
if wanted "coarsening: no product of the book's table spills"; then
    {
        printf '#include "%s"\n' tensor/kernels.h cuda/instructions.h 07_kernels/launch.h
        printf '#define NO_MAIN\nnamespace coarsening {\n#include "07_kernels/coarsening.cu"\n}\n'
        for size in 4 8; do
            for flags in {false,true},{false,true},{false,true}; do
                echo "template __global__ void coarsening::matmul<$size, $size, $flags>(float *, const float *," \
                    "const float *, int64_t, int64_t, int64_t);"
            done
        done
    } >"$work/products.cu"
    run "$nvcc" -std=c++17 -O3 -Icommon -I. -I07_kernels -arch=sm_90a -Xptxas -v -cubin \
        -o "$work/products" "$work/products.cu" &&
        [ "$(grep -c "Compiling entry function '.*matmul" "$err")" = 16 ] &&
        ! grep -qE '[1-9][0-9]* bytes (spill|stack)' "$err"
    report $? "coarsening: no product of the book's table spills"
fi
finish
