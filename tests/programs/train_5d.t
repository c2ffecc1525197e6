#!/bin/bash
# train_5d.t [PATTERN]: all techniques at once: the step of one device and the plan, for dense models and for
# experts; no flag is ignored; each method alone on a slow network; runs killed at a random step on a random
# layout, and resumed on another. SEED=7 draws others. TAP. A pattern chooses among the names.
# needs: build/08_mixed_precision/train_5d build/08_mixed_precision/five_d_methods
[ ! -w /dev/shm ] || export TMPDIR=/dev/shm
. "$(dirname "$0")/tap.sh"
export OMP_NUM_THREADS=1
build=$build/08_mixed_precision
quick="--shown 0 --steps 2"

passes "the plan of dp 2, pp 2, tp 2, ZeRO-1, AdamW, then 20 steps beside one device" train_5d --shown 20 \
    --steps 2 \
    --trace "$work/trace.json" --verbose
grep -q '^  rank 7: transfers, a step .*equal$' "$out" && grep -q '"communication, pp back"' \
    "$work/trace.json"
report $? "the plan is held against the run rank by rank, and the trace has all lines"
grep -q '^  rank 7: peak of activations .*equal$' "$out" && grep -q '^  rank 7: peak of optimizer .*equal$' "$out"
report $? "the plan of what each rank holds is held against the run, too"
prints "the plan: each rank has a row" '0 0 0 0 0 0 E 0-1 140 kB 140 kB 140 kB 376 kB 263 kB 70.1 kB 70.1 kB 32.8 kB' \
    '3 0 1 0 1 0 E 0-1 140 kB 140 kB 140 kB 376 kB 263 kB 70.1 kB 70.1 kB 32.8 kB' \
    '4 1 0 0 0 0 2-3 H 141 kB 141 kB 141 kB 281 kB 263 kB 70.3 kB 70.3 kB 32.8 kB' \
    '7 1 1 0 1 0 2-3 H 141 kB 141 kB 141 kB 281 kB 263 kB 70.3 kB 70.3 kB 32.8 kB'
[ "$(grep -o '  loss of step [0-9]*' "$out" | awk '{ printf "%s ", $4 }')" = "1 5 10 15 20 " ]
report $? "the plan, and 20 steps: five of them are shown, with the first and the last"
passes "the plan of cp 2 without sharding: a stage has one layer" train_5d --dry-run --ranks 4 --dp 1 --pp 2 --cp 2 \
    --tp 1 --layers 2 --zero 0
prints "the plan of cp 2 without sharding: weights, gradients, AdamW's two moments" \
    'rank pp dp cp tp ep layers weights gradients optimizer activations …' \
    '0 0 0 0 0 0 E 0 140 kB 140 kB 280 kB …' \
    '1 0 0 1 0 0 E 0 140 kB 140 kB 280 kB …' '3 1 0 1 0 0 1 H 140 kB 140 kB 280 kB …'
# Of stages that wait for different times, the plan names the longest; a step takes what it takes on any rank.
passes "the plan of unequal stages" train_5d --dry-run --model llama-3-8b --dtype bf16 --seq 2048 --ranks 4 --dp 1 --pp 4 \
    --tp 1 --zero 0
awk '/^  a step on / { step = $5; most = $13 } /^  step on / { own = $6 } /^    of it exposed/ { waits = $6 }
    END { exit !(own > 0 && own <= step && step < 1.5 * own && waits > 0 && waits < most && most < step) }' "$out"
report $? "the plan of unequal stages: the step is that of the slowest, and so is what is exposed"
passes "calls that are trusted: the plan and the run have one clock" train_5d --shown 0 --steps 1 --layers 1 \
    --ranks 2 --dp 1 --pp 1 --tp 2 --trust-calls
passes "bf16: 20 steps beside one device, within its error over as many" train_5d --shown 20 --steps 1 \
    --ranks 2 --layers 2 --pp 1 --tp 2 --dtype bf16
awk '/^  loss of step/ { rows++; if ($5 != $6) differ++ } END { exit !(rows == 5 && differ) }' "$out"
report $? "bf16: 20 steps beside one device: the losses of both are shown"
if wanted "too many steps for their --lr"; then
    run "$build/train_5d" --ranks 2 --layers 1 --pp 1 --tp 1 --steps 1 --lr 300 --shown 60
    [ $status = 3 ] && grep -q '^UNPROVEN train_5d: at this --lr .* or fewer steps (--shown) can be judged$' "$out"
    report $? "too many steps for their --lr: no failure, and the flag that helps is named"
fi
# Rounding takes the logits of a few tokens farther than losses and weights.
if wanted "codes that other bits of f32 have flipped decide for other experts: no failure"; then
    run "$build/train_5d" --heads 2 --kv-heads 1 --hidden 12 --ffn 5 --vocab 258 --seq 4 --layers 3 \
        --micro-batch 3 --grad-acc 6 --steps 1 --ranks 2 --dp 2 --pp 1 --tp 1 --experts 4 --top-k 2 \
        --expert-ffn 24 --moe deepseek --expert-groups 2 --dtype f32 --fp8 te-delayed --documents 0
    [ $status = 3 ] && grep -q '^UNPROVEN train_5d: at this --lr .* or fewer steps (--shown)' "$out"
    report $? "codes that other bits of f32 have flipped decide for other experts: no failure"
fi
for shown in 1 3; do
    passes "few steps: $shown of real text" train_5d --ranks 1 --layers 1 --steps 1 --shown $shown --pp 1 --tp 1
    [ "$(grep -o '  loss of step [0-9]*' "$out" | awk '{ printf $4 }')" = "$(seq -s '' $shown)" ]
    report $? "few steps: each of $shown is shown once"
done
passes "experts: dp 2, pp 2, tp 2, ep 4, ZeRO-3, sequence parallelism, interleaved" train_5d $quick --sp \
    --experts 4 --top-k 2 --ep 4 --zero 3 --schedule interleaved --recompute selective
passes "experts: whole on each rank, hybrid sharding" train_5d --ranks 4 --layers 1 --steps 1 --shown 0 --pp 1 \
    --tp 1 --experts 4 --zero hybrid --shard-ranks 2
passes "experts: a stage with the head alone" train_5d $quick --layers 3 --dp 2 --pp 4 --tp 1 --experts 4 \
    --top-k 2 \
    --ep 2 --optimizer sgd --lr 0.1
passes "experts: DualPipe's two copies of a layer have the same biases" train_5d $quick --layers 2 --pp 2 \
    --ranks 2 --dp 1 --tp 1 --experts 2 --top-k 1 --schedule dualpipe --balance-bias 0.01
passes "dp 2, pp 2, cp 2, zb_v, full recomputation, hybrid sharding" train_5d $quick --cp 2 --tp 1 \
    --context zigzag \
    --schedule zb_v --recompute full --zero hybrid --shard-ranks 2 --optimizer sgd --lr 0.1
passes "dp 2, cp 2, hybrid sharding over both" train_5d --ranks 4 --dp 2 --cp 2 --pp 1 --tp 1 --zero hybrid \
    --shard-ranks 4 --layers 1 --steps 1 --shown 0
passes "dp 4, tp 2, hybrid sharding, asynchronous rows, flash attention" train_5d $quick --pp 1 --sp \
    --async-tp \
    --vocab-parallel --zero hybrid --shard-ranks 2 --attention flash
passes "dp 2, tp 2, ZeRO-R without stages" train_5d --ranks 4 --layers 1 --steps 1 --shown 0 --pp 1 --tp 2 \
    --zero-r --recompute full
passes "f16 with the scale that is usual, in as many steps as are shown" train_5d --ranks 2 --tp 1 --layers 2 \
    --dtype f16 --shown 80 --steps 1
passes "f16, whose loss is scaled, by a sharded vocabulary" train_5d --ranks 2 --dp 1 --pp 1 --tp 2 \
    --vocab-parallel --layers 1 --dtype f16 --shown 20 --steps 1
passes "experts: balance in f16, where the loss is scaled" train_5d --ranks 2 --layers 1 --steps 1 \
    --shown 0 --pp 1 --tp 1 --hidden 64 --seq 64 --dtype f16 --experts 4 --aux-loss 0.1
passes "16-bit moments with scales: the time of a step does not depend on them" train_5d --ranks 2 --layers 1 \
    --steps 1 --shown 0 --pp 1 --tp 1 --dtype bf16 --fp8 fp8-lm
# Between a micro-batch's passes a stage attends to others, with other documents.
for context in ring all-gather ulysses; do
    passes "documents: pp 2, cp 2, $context" train_5d --ranks 4 --layers 2 --steps 1 --shown 0 --dp 1 --pp 2 \
        --cp 2 --tp 1 --context $context --documents 32 --schedule afab --grad-acc 2 --seq 64
done
passes "documents, which the plan does not know" train_5d --ranks 2 --layers 1 --steps 1 --shown 0 \
    --pp 1 --tp 1 --cp 2 --seq 256 --grad-acc 1 --documents 10
passes "the plan of 9 layers on 4 stages" train_5d --dry-run --layers 9 --ranks 4 --dp 1 --pp 4 --tp 1
grep -q ' E 0-2 ' "$out" && grep -q ' 7-8 H ' "$out"
report $? "the plan of 9 layers on 4 stages: the first has one more"
passes "the plan of 80 layers" train_5d --dry-run --layers 80 --ranks 2 --dp 1 --pp 2 --tp 1
grep -q ' E 0-39 ' "$out" && grep -q ' 40-79 H ' "$out"
report $? "the plan of 80 layers: each of them is on a rank"
passes "the plan of 160 layers" train_5d --dry-run --layers 160 --ranks 2 --dp 1 --pp 2 --tp 1
grep -q ' 80-155 … H ' "$out"
report $? "the plan of 160 layers: it says where it leaves some out"
passes "trains for real" train_5d --no-check --dtype f32 --steps 30 --lr 0.003 --sample 20 --eval-every 15
grep -q '^step 15  held-out loss' "$out" && grep -q '^sample' "$out" && grep -q '^The plan' "$out"
report $? "with a plan, held-out losses and a sample"

refused "--fp8-wire: neither ZeRO-3's weights nor" train_5d --ranks 2 --dp 2 --pp 1 --tp 1 --dtype bf16 \
    --zero hybrid --shard-ranks 1 --fp8 nanotron --fp8-wire
refused "async_tensor_parallel sends rows as they are, and the recipe wants" train_5d --ranks 2 --dp 1 --pp 1 \
    --tp 2 --sp --async-tp --dtype bf16 --fp8 te-delayed --fp8-wire
refused "there is one: leave it out, or give --tp 2" train_5d --ranks 4 --tp 1 --sp
refused "--vocab-parallel shards the vocabulary over the ranks of --tp, and there is one: leave it out" train_5d \
    --ranks 2 --pp 1 --tp 1 --vocab-parallel
passes "experts: a loss of the router's logits alone" train_5d --ranks 2 --layers 1 --steps 1 --shown 0 --pp 1 --tp 1 \
    --experts 4 --z-loss 0.1
refused "there is one: leave it out, or give --ranks 6 --tp 2" train_5d --ranks 3 --pp 3 --tp 1 --sp
odd="--ranks 2 --dp 2 --pp 1 --tp 1 --sp --hidden 24"
refused "or give --ranks 6 --tp 3" train_5d $odd --heads 3 --kv-heads 3 --ffn 9
refused "or give --ranks 10 --tp 5" train_5d $odd --head-size 8 --heads 30 --kv-heads 5 --ffn 30
refused "or give --tp and sizes that it divides" train_5d $odd --heads 1 --kv-heads 1
idle='which has nothing to do here: leave it out, or give'
refused "--chunks is an option of pipeline, $idle --pp 2" train_5d --pp 1 --chunks 2
refused "--chunks is an option of pipeline, $idle --pp 2 --layers 2" train_5d --pp 1 --chunks 2 --layers 1
refused "--context is an option of ring_attention, $idle --cp 2 --seq 2" train_5d --context ulysses --seq 1
refused "--gather is an option of zero1, $idle --zero 1" train_5d --zero 2 --gather step
refused "--context is an option of ring_attention, $idle --cp 2" train_5d --context ulysses
refused "--master is an option of bf16, $idle --dtype bf16" train_5d --master none
passes "flags that leave a technique off" train_5d --dry-run --sp --experts 4 --aux-loss 0 \
    --attention stored --kernels library
refused "--ep 2 shards experts: give --experts" train_5d --ep 2
refused "--top-k has an effect only with --experts" train_5d --dry-run --top-k 2
refused "--fp8-tile 32: --fp8 none scales no tiles" train_5d --dry-run --fp8-tile 32
refused "--documents 256 is no token of --vocab 256: the last one is 255" train_5d --dry-run --documents 256
refused "--tp 3 does not divide --heads 4" train_5d --tp 3 --ranks 6 --pp 1
refused "--zero hybrid with --ep 2: the ranks that hold copies of an expert are not those" train_5d --tp 1 \
    --zero hybrid --experts 4 --ep 2

passes "each method" five_d_methods --json "$work/methods.json"
prints "each method: its row" 'DP 1 1 1 1 56.2 GB - - - 359 10' 'ZeRO-2 1 1/6.7 1/8.0 1 - 28.1 GB 14.1 GB - …' \
    'ZeRO-3 1/4.6 1/6.7 1/8.0 1 - 28.1 GB 26.3 GB - …' \
    '8 experts, DP and EP 8 1/5.9 1/5.9 1/5.9 1 16.8 GB - - 7.52 GB …' \
    'weights and gradients sent in a step 54.4 GB 0 B'
if wanted "each method: what it holds in --json"; then
    python3 -c 'import json, sys
n = json.load(open(sys.argv[1]))["numbers"]
held = [n[m]["held at the peak"]["value"] for m in ("one device", "ZeRO-1", "ZeRO-3")]
sys.exit(not held[0] > held[1] > held[2])' "$work/methods.json"
    report $? "each method: what it holds in --json"
fi
passes "each method where messages take longer than what a stage computes" five_d_methods \
    --network-efficiency 0.005 --svg "$work/five_d.svg"
grep -q "A stage's messages take 2 times as long as what it computes" "$out"
report $? "each method: what a pipeline cannot hide there is said"
cmp "$work/five_d.svg" 08_mixed_precision/five_d.svg >"$out" 2>&1
report $? "each method: the page's picture of memory, which no message changes"

# ---- killed and resumed ----

RANDOM=${SEED:-1}
dense=("--ranks 8 --dp 2 --pp 2 --tp 2 --grad-acc 2 --zero 1"
    "--ranks 4 --dp 2 --pp 1 --tp 2 --sp --grad-acc 2 --zero 3"
    "--ranks 4 --dp 1 --pp 4 --tp 1 --grad-acc 4 --schedule zb_h1 --zero 0" \
        "--ranks 6 --dp 1 --pp 2 --tp 1 --cp 3 --grad-acc 4"
    "--ranks 8 --dp 4 --pp 2 --tp 1 --grad-acc 1 --zero hybrid --shard-ranks 2" \
        "--ranks 1 --dp 1 --pp 1 --tp 1 --grad-acc 4")
experts=("--ranks 8 --dp 2 --pp 2 --tp 2 --sp --ep 4 --grad-acc 2 --zero 3"
    "--ranks 4 --dp 4 --pp 1 --tp 1 --ep 2 --grad-acc 1 --zero 2"
    "--ranks 2 --dp 1 --pp 2 --tp 1 --grad-acc 4 --schedule zb_v" \
        "--ranks 1 --dp 1 --pp 1 --tp 1 --grad-acc 4")
shape="--layers 4 --hidden 24 --heads 6 --kv-heads 2 --ffn 40"
rest="--no-check --seq 12 --sample 0 --eval-every 0 --steps 12"

loss() { tr -d '\n\t ' <"$1" | sed 's/.*"loss":\[\([^]]*\)\].*/\1/' | tr ',' '\n' | tail -n 1; }

# killed_and_resumed NUMBER SHAPE STRAIGHT LAYOUT…: draws two layouts, one to be killed on that is not the
# last, and a step; the last loss must be STRAIGHT. `make faults` has more of these.
killed_and_resumed() {
    local number=$1 shape=$2 straight=$3 from=$((RANDOM % ($# - 4))) step=$((1 + RANDOM % 8)) first then \
        name pid
    shift 3
    first=${@:from + 1:1} then=${@:(from + 1 + RANDOM % ($# - 1)) % $# + 1:1}
    name="killed $number: in step $step or later on ($first), resumed on ($then)"
    "$build/train_5d" $first $shape $rest --save "$work/$number" --save-every 1 >"$out" 2>"$err" &
    pid=$!
    until [ -e "$work/$number/step-00000$step" ] || ! kill -0 $pid 2>/dev/null; do sleep 0.02; done
    kill -9 $(ranks_of $pid "$(awk '{ print $2 }' <<<"$first")") $pid 2>/dev/null
    wait $pid 2>/dev/null
    rm -rf "$work/$number/step-000012"  # if the run was faster than the kill
    run "$build/train_5d" $then $rest --resume "$work/$number" --json "$work/$number.json" &&
        awk -v a="$(loss "$work/$number.json")" -v b="$straight" \
            'BEGIN { exit !(a > 0 && (a - b) ^ 2 < (1e-9 * b) ^ 2) }'
    report $? "$name"
}

if wanted "killed"; then
    run "$build/train_5d" ${dense[-1]} $shape $rest --json "$work/dense.json"
    killed_and_resumed dense "$shape" "$(loss "$work/dense.json")" "${dense[@]}"
    shape+=" --experts 4 --top-k 2"
    run "$build/train_5d" ${experts[-1]} $shape $rest --json "$work/experts.json"
    killed_and_resumed experts "$shape" "$(loss "$work/experts.json")" "${experts[@]}"
fi
finish
