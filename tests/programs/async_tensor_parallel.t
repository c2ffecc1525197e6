#!/bin/bash
# async_tensor_parallel.t: rows that travel while others are multiplied make the step of one device, and a shorter one on
# the model clock. TAP.
# needs: build/03_tensor_parallel/async_tensor_parallel
cd "$(dirname "$0")/../.." || exit 2
unset OPENBLAS_CORETYPE
export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive
build=${BUILD:-build}/03_tensor_parallel
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
count=0 failed=0

report() {  # report STATUS NAME
    count=$((count + 1))
    if [ "$1" = 0 ]; then echo "ok $count - $2"; else
        echo "not ok $count - $2"
        failed=1
        tail -n 12 "$work/out" | sed 's/^/#   /'
        [ -z "$MUTANT" ] || exit 1  # one red is all that a mutant needs
    fi
}
run() { timeout -k 5 60 "$build/async_tensor_parallel" "$@" >"$work/out" 2>&1; }
passes() {  # passes NAME FLAGS…: exit status 0 and a PASS verdict within a minute
    local name=$1
    shift
    run "$@" && grep -q "^PASS async_tensor_parallel: " "$work/out"
    report $? "$name"
}

passes "3 ranks, whose rows are 21, 21 and 20" --ranks 3 --heads 6 --kv-heads 3 --ffn 90
passes "4 ranks, the vocabulary sharded, tied" --ranks 4 --vocab-parallel --tied
passes "2 ranks, the vocabulary sharded, 3 micro-batches, AdamW" --ranks 2 --vocab-parallel --grad-acc 3 --optimizer adamw \
    --lr 0.001 --layers 2
passes "2 x 2 ranks, recomputing" --ranks 4 --dp 2 --tp 2 --recompute full --layers 2
passes "one rank: nothing is sent" --ranks 1 --steps 1
passes "2 ranks in bf16" --ranks 2 --dtype bf16 --layers 1 --steps 1
passes "3 ranks in f32" --ranks 3 --heads 6 --kv-heads 3 --ffn 90 --dtype f32 --layers 1

# At 8 ranks the program itself demands 30 % less exposed communication, and a shorter step, of Llama 3 8B.
few="--ranks 8 --seq 3 --micro-batch 1 --vocab-parallel --layers 1 --steps 2"
table() { grep -E '^  (tp|tp \+ sp|async tp|dp) +[0-9]+\.' "$work/out"; }
passes "8 ranks and 3 tokens, so that most have no row" $few
table >"$work/table"
[ "$(wc -l <"$work/table")" = 4 ]
report $? "show four layouts of Llama 3 8B"
run $few
table | cmp -s - "$work/table"
report $? "and the same digits again"
passes "two nodes of two: no faster, and no failure" --ranks 4 --gpus-per-node 2 --layers 1 --steps 1
run --ranks 4 --timeline --layers 1 --steps 1 && grep -A 1 '^async tp *compute' "$work/out" | grep -q ' network .*[Tt][Tt]'
report $? "the time line shows rows that travel"
echo "1..$count"
exit $failed
