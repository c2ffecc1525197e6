#!/bin/bash
# reshard.t: checkpoints go from program to program and from layout to layout. TAP.
# needs: programs build/tests/test_reshard
# Checkpoints are flushed to disk, or to memory if there is a file system in memory.
[ ! -w /dev/shm ] || export TMPDIR=/dev/shm
. "$(dirname "$0")/tap.sh"
export OMP_NUM_THREADS=1

same_checkpoint() {
    for file in config.json model.safetensors optimizer.safetensors; do
        cmp "$1/$file" "$2/$file" >"$out" 2>&1 || return 1
    done
}

for ranks in 3 6; do
    run "$build/tests/test_reshard" --ranks $ranks
    report $? "every layout goes on from others on $ranks ranks"
done

# Eight samples a step, and AdamW, as ZeRO uses; tensor parallelism alone takes SGD.
adamw="--optimizer adamw --lr 0.001"
to4="--layers 2 --steps 4"
passes "ZeRO-3 on 4 ranks saves, two times" 02_zero/zero3 --ranks 4 $to4 --save "$work/zero3" \
    --save-every 2 --no-check
[ "$(ls -A "$work/zero3" | tr '\n' ' ')" = "step-000002 step-000004 " ]
report $? "and leaves nothing else behind"
half=$work/zero3/step-000002
passes "it goes on from the first, bit for bit" 02_zero/zero3 --ranks 4 --steps 4 --resume "$half" \
    --save "$work/again" --no-check
same_checkpoint "$work/again/step-000004" "$work/zero3/step-000004"
report $? "and ends in the same checkpoint"
passes "one device goes on with it" 00_single_gpu/train --resume "$half" --steps 4 --seq 31 \
    --dtype f64 $adamw \
    --clip 0.5 --micro-batch 2 --grad-acc 4 --sample 0 --eval-every 0 --save "$work/one"
! grep -q 'continues differently' "$out"
report $? "and nothing differs"
passes "tp 2 x dp 2 goes on with it" 03_tensor_parallel/tensor_parallel --ranks 4 --tp 2 $adamw \
    --grad-acc 2 --steps 4 --resume "$half"
passes "ZeRO-3 on 2 ranks goes on with what one device has saved" 02_zero/zero3 --ranks 2 --grad-acc 2 \
    --steps 6 \
    --resume "$work/one" --no-check
cp -r "$work/zero3/step-000002" "$work/one/"
rm -rf "$work/one/step-000004"
passes "it goes on in the folder that it came from, and is still compared with what it came from" \
    02_zero/zero3 --ranks 2 \
    --grad-acc 2 --steps 4 --resume "$work/one" --save "$work/one"
passes "in bf16, too, where a run in f64 that resumes sets the bound" 02_zero/zero2 --ranks 2 $to4 \
    --dtype bf16 \
    --save "$work/bf16" --save-every 2 --no-check
passes "from a checkpoint in bf16" 02_zero/zero2 --ranks 2 --steps 4 --dtype bf16 \
    --resume "$work/bf16/step-000002"
refused 'with 8 samples in a step, and this one has 16: --grad-acc 2 would fit' \
    03_tensor_parallel/tensor_parallel --ranks 4 \
    --tp 2 $adamw --grad-acc 4 --steps 4 --resume "$half"
refused 'step-000004 already has 4 steps' 02_zero/zero3 --ranks 4 --steps 4 --resume "$work/zero3"
refused '--save /proc/x: cannot create' 02_zero/zero3 --ranks 2 --save /proc/x
refused '--dry-run computes no weights' 02_zero/zero3 --ranks 2 --save "$work/dry" --dry-run
finish
