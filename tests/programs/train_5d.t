#!/bin/bash
# train_5d.t [PATTERN]: all techniques at once: the step of one device and the plan, on dense models and on
# experts; nothing that was typed is ignored; killed at a random step on a random layout, and resumed on
# another. SEED=7 draws others. TAP. A pattern chooses among the tests' names.
# needs: build/08_mixed_precision/train_5d
[ ! -w /dev/shm ] || export TMPDIR=/dev/shm
. "$(dirname "$0")/tap.sh"
export OMP_NUM_THREADS=1
build=$build/08_mixed_precision
quick="--shown 0 --steps 2"

passes "the plan of dp 2, pp 2, tp 2, ZeRO-1, AdamW, then 20 steps beside one device" train_5d --shown 20 --steps 2 \
    --trace "$work/trace.json" --verbose
grep -q '^  rank 7: transfers, a step .*equal$' "$out" && grep -q '"communication, pp back"' "$work/trace.json"
report $? "the plan is held against the run rank by rank, and the trace has all lines"
passes "experts: dp 2, pp 2, tp 2, ep 4, ZeRO-3, sequence parallelism, interleaved" train_5d $quick --sp \
    --experts 4 --top-k 2 --ep 4 --zero 3 --schedule interleaved --recompute selective
passes "experts: a stage with the head alone" train_5d $quick --layers 3 --dp 2 --pp 4 --tp 1 --experts 4 --top-k 2 \
    --ep 2 --optimizer sgd --lr 0.1
passes "dp 2, pp 2, cp 2, zb_v, full recomputation, ZeRO-2" train_5d $quick --cp 2 --tp 1 --context zigzag \
    --schedule zb_v --recompute full --zero 2 --optimizer sgd --lr 0.1
passes "dp 4, tp 2, hybrid sharding, asynchronous rows, flash attention" train_5d $quick --pp 1 --sp --async-tp \
    --vocab-parallel --zero hybrid --shard-ranks 2 --attention flash
passes "trains for real" train_5d --no-check --dtype f32 --steps 30 --lr 0.003 --sample 20 --eval-every 15
grep -q '^step 15  held-out loss' "$out" && grep -q '^sample' "$out" && grep -q '^The plan' "$out"
report $? "with a plan, held-out losses and a sample"

refused "--sp shards rows over the ranks of --tp, and there is one" train_5d --ranks 4 --tp 1 --sp
refused "--chunks is an option of pipeline, which these flags do not ask for" train_5d --pp 1 --chunks 2
refused "--gather is an option of zero1, which these flags do not ask for" train_5d --zero 2 --gather step
refused "--context says how ranks of --cp bring keys together" train_5d --context ulysses
refused "--tp 3 does not divide --heads 4" train_5d --tp 3 --ranks 6 --pp 1
refused "--shard-ranks gathers weights for each pass of a dense model" train_5d --zero hybrid

# ---- killed and resumed ----

RANDOM=${SEED:-1}
layouts=("--ranks 8 --dp 2 --pp 2 --tp 2 --grad-acc 2 --zero 1" "--ranks 4 --dp 2 --pp 1 --tp 2 --sp --grad-acc 2 --zero 3"
    "--ranks 4 --dp 1 --pp 4 --tp 1 --grad-acc 4 --schedule zb_h1 --zero 0" "--ranks 6 --dp 1 --pp 2 --tp 1 --cp 3 --grad-acc 4"
    "--ranks 4 --dp 4 --pp 1 --tp 1 --grad-acc 1 --zero hybrid --shard-ranks 2" "--ranks 1 --dp 1 --pp 1 --tp 1 --grad-acc 4")
shape="--layers 4 --hidden 24 --heads 6 --kv-heads 2 --ffn 40"
rest="--no-check --seq 12 --sample 0 --eval-every 0 --steps 12"

loss() { tr -d '\n\t ' <"$1" | sed 's/.*"loss":\[\([^]]*\)\].*/\1/' | tr ',' '\n' | tail -n 1; }

killed_and_resumed() {  # killed_and_resumed NUMBER
    local first=${layouts[RANDOM % ${#layouts[@]}]} then=${layouts[RANDOM % ${#layouts[@]}]} step=$((1 + RANDOM % 8))
    local name="$1: killed in step $step or later on ($first), resumed on ($then)"
    wanted "$name" || return 0
    "$build/train_5d" $first $shape $rest --save "$work/$1" --save-every 1 >"$out" 2>"$err" &
    local pid=$!
    for i in $(seq 600); do
        [ ! -e "$work/$1/step-00000$step" ] || break
        kill -0 $pid 2>/dev/null || break
        sleep 0.02
    done
    kill -9 $(ranks_of $pid 1) $pid 2>/dev/null
    wait $pid 2>/dev/null
    rm -rf "$work/$1/step-000012"  # if it was faster
    run "$build/train_5d" $then $rest --resume "$work/$1" --json "$work/$1.json" &&
        awk -v a="$(loss "$work/$1.json")" -v b="$straight" 'BEGIN { exit !(a > 0 && (a - b) ^ 2 < (1e-9 * b) ^ 2) }'
    report $? "$name"
}

if wanted "killed"; then
    run "$build/train_5d" ${layouts[0]} $shape $rest --json "$work/straight.json"
    straight=$(loss "$work/straight.json")
    for number in 1 2 3; do killed_and_resumed $number; done
fi
finish
