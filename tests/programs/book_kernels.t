#!/bin/bash
# book_kernels.t: training with chapter 07's kernels, on emulated GPUs, compared with one device that uses the
# library's. TAP.
# needs: OPS=cuda-on-cpu BUILD=build-cuda-on-cpu OBJECTS=build
# needs: build-cuda-on-cpu/03_tensor_parallel/tensor_parallel
# needs: build-cuda-on-cpu/corpus.txt build-cuda-on-cpu/00_single_gpu/train
# needs: build-cuda-on-cpu/04_context_parallel/ring_attention build-cuda-on-cpu/tests/test_ops_layers
# needs: build-cuda-on-cpu/04_context_parallel/zigzag_ring_attention build-cuda-on-cpu/tests/test_ops
# needs: build-cuda-on-cpu/tests/test_flash
# needs: build-cuda-on-cpu/04_context_parallel/all_gather_attention build-cuda-on-cpu/08_mixed_precision/bf16
. "$(dirname "$0")/tap.sh"
export OMP_NUM_THREADS=1
needs_fibers
build=build-cuda-on-cpu
builds OPS=cuda-on-cpu BUILD=$build OBJECTS=build $build/{00_single_gpu/train,corpus.txt} \
    $build/{03_tensor_parallel/tensor_parallel,tests/test_ops,tests/test_ops_layers,tests/test_flash} \
    $build/04_context_parallel/{ring_attention,zigzag_ring_attention,all_gather_attention} \
    $build/08_mixed_precision/bf16

tiny="--layers 1 --hidden 32 --heads 2 --kv-heads 2 --head-size 64 --ffn 24 --micro-batch 1"

# all_taken: everything that the table replaces has run on its kernels.
all_taken() {
    grep -q '^the kernels of chapter 07 served [1-9]' "$out" &&
        ! grep '^the kernels of chapter 07' "$out" | grep -vqE 'served ([0-9]+) of the \1 calls'
}

passes "tensor_parallel on the book's kernels" 03_tensor_parallel/tensor_parallel --ranks 2 $tiny \
    --dtype f32 --steps 2 --seq 37 --grad-acc 1 --attention flash --kernels book
all_taken
report $? "tensor_parallel on the book's kernels: all calls"
# Earlier keys in whole chunks, own keys in order: both occur here.
passes "ring_attention on the book's kernels" 04_context_parallel/ring_attention --ranks 2 $tiny \
    --dtype f32 --steps 1 --seq 66 --kernels book --optimizer adamw --lr 0.01
all_taken
report $? "ring_attention on the book's kernels: all calls"

# Positions and documents: two chunks a rank, with queries that see none of another rank's keys; and queries
# with all keys. A space ends a document.
for program in zigzag_ring_attention all_gather_attention; do
    passes "$program on the book's kernels" 04_context_parallel/$program --ranks 2 $tiny --dtype f32 \
        --steps 1 --seq 68 --documents 32 --kernels book
    all_taken
    report $? "$program on the book's kernels: all calls"
done

# Only attention: its forward and backward pass, of one layer, on each rank and in each step.
passes "only attention on the book's kernels" 03_tensor_parallel/tensor_parallel --ranks 2 $tiny \
    --dtype bf16 --steps 2 --seq 37 --grad-acc 1 --attention flash --kernels attention
grep -q '^the kernels of chapter 07 served 4 of the 4 calls' "$out"
report $? "only attention on the book's kernels: no other calls"

# 64 evaluated samples of 13 calls each, and one step of 41; the yardstick's multiplies are the library's.
passes "train on the book's kernels" 00_single_gpu/train $tiny --dtype f32 --seq 16 --grad-acc 1 --steps 1 \
    --kernels book --sample 0 --eval-every 0
grep -q '^the kernels of chapter 07 served 873 of the 873 calls' "$out"
report $? "train on the book's kernels: not the yardstick"

passes "in bf16" 03_tensor_parallel/tensor_parallel --ranks 2 $tiny --dtype bf16 --steps 2 --seq 37 \
    --grad-acc 1 --attention flash --kernels book
all_taken
report $? "in bf16: all calls"
passes "in fp16, heads of 128" 04_context_parallel/ring_attention --ranks 2 \
    ${tiny/size 64/size 128} --dtype f16 --steps 2 --seq 66 --kernels book --optimizer adamw --lr 0.01
all_taken
report $? "in fp16: all calls"
passes "in bf16, zig-zag and documents" 04_context_parallel/zigzag_ring_attention --ranks 2 $tiny \
    --dtype bf16 --steps 1 --seq 68 --documents 32 --kernels book
all_taken
report $? "in bf16, zig-zag and documents: all calls"

# Only the library has bf16 products with f32 results; the book's kernels have f32 gradients of norms.
passes "in bf16, gradients in f32" 08_mixed_precision/bf16 --ranks 2 $tiny --seq 33 --steps 1 --gradient f32 \
    --kernels book --proof-only
grep -q '^the kernels of chapter 07 served [1-9]' "$out" && ! all_taken
report $? "in bf16, gradients in f32: not all calls"

# The library's own tests, in all dtypes: sizes that fill no pack, ignored labels, what f16 loses.
if wanted "operations on the book's kernels"; then
    all_tests $build/tests/test_ops_layers '*' book
    report $? "operations on the book's kernels"
fi
if wanted "products on the book's kernels"; then
    all_tests $build/tests/test_ops '*matmul*' book
    report $? "products on the book's kernels"
fi

# Several samples, several heads of queries on one of keys, fewer keys than queries.
if wanted "attention on the book's kernels"; then
    all_tests $build/tests/test_flash 'as_exact*' book
    report $? "attention on the book's kernels"
fi

refused "chapter 07's kernels compute in f32, bf16 and f16" 00_single_gpu/train --kernels book --dtype f64
refused "--attention flash would fit" 00_single_gpu/train --kernels attention --attention stored
refused "--head-size 64 would fit" 00_single_gpu/train --kernels book --attention flash --head-size 16
finish
