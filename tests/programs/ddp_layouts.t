#!/bin/bash
# ddp_layouts.t: data parallelism with 1 to 8 ranks and buckets of every size, dry runs, repetition, wrong
# use. TAP.
. "$(dirname "$0")/tap.sh"
export OMP_NUM_THREADS=1
build=$build/01_data_parallel

for ranks in 1 4 8; do
    for program in ddp_naive ddp_overlap ddp_bucketed ddp_no_sync; do
        passes "$program, $ranks ranks" $program --ranks $ranks --layers 2 --steps 2
    done
done
for megabytes in 0.000001 0.03 1000; do
    passes "buckets of $megabytes MB" ddp_bucketed --ranks 3 --bucket-mb $megabytes --layers 2 --steps 2
done
passes "f32, within four times the error of one device" ddp_no_sync --ranks 3 --dtype f32 --layers 2
passes "a dry run of Llama 3 8B" ddp_bucketed --ranks 4 --model llama-3-8b --dtype bf16 --micro-batch 1 \
    --dry-run

run "$build/ddp_no_sync" --ranks 4
awk '$1 ~ /^(naive|overlap|bucketed|no_sync)$/ {
         same = $1 == "bucketed" && $2 == last && $4 * 8 < calls
         if (n++ && $2 + 0 >= last && !same) bad = 1
         last = $2 + 0; calls = $4 }
     END { exit bad || n != 4 }' "$out"
report $? "each optimization makes the step of Llama 3 8B shorter, or its messages fewer by far"
cp "$out" "$work/first"
run "$build/ddp_no_sync" --ranks 4
cmp -s "$work/first" "$out"
report $? "two runs print the same digits"

refused 'ranks' ddp_naive --ranks 0x3
refused 'bucket-mb' ddp_bucketed --bucket-mb 0
for flag in eval-every sample temperature; do
    refused "--$flag has an effect only with --no-check" ddp_naive --$flag 5
done
refused "--verbose shows each row of the proof, and --no-check skips the proof" ddp_naive --no-check --verbose
passes "a dry run shows its rows" ddp_naive --dry-run --no-check --verbose
refused "is not one of ddp_naive's flags" ddp_naive --ranks 2 --tp 2
finish
