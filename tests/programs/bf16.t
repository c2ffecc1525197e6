#!/bin/bash
# bf16.t: bfloat16 with and without master weights: ranks against one device, stochastic rounding on any
# layout and across a checkpoint, updates that vanish, and gradients written in f32. TAP.
# needs: build/08_mixed_precision/bf16 build/08_mixed_precision/train_5d
. "$(dirname "$0")/tap.sh"
export OMP_NUM_THREADS=1
program=08_mixed_precision/bf16
random="--master none --rounding stochastic"

same_checkpoint() {
    for file in model.safetensors optimizer.safetensors; do
        cmp "$1/$file" "$2/$file" >"$out" 2>&1 || return 1
    done
}

verdict='the ranks reproduce the single-device step; updates below half a step vanish ('
passes "updates below half a step vanish, and sums round" $program --json "$work/bf16.json"
grep -A9 'gains that move without masters' "$work/bf16.json" | grep -q '"measured":[[:space:]]*0,'
report $? "--json says that no gain moves"
if wanted "updates below half a step vanish, and sums round: the tables"; then  # of the run above
    python3 - "$out" "$work/bf16.json" <<'END' 2>"$err"
import json, re, sys
out, n = open(sys.argv[1]).read(), json.load(open(sys.argv[2]))['numbers']
ways = ['f32', 'bf16, f32 masters', 'bf16, no masters', 'bf16, stochastic']
f32 = n['f32']['last losses']['value']
for way in ways:
    loss, off, moved, of = re.search(r'^  %s +([\d.]+) +([-+.\d]+)%% +(\d+) of (\d+)$' % way, out, re.M).groups()
    want = n[way]['last losses']['value']
    assert abs(float(loss) - want) < 6e-5 and abs(float(off) - 100 * (want / f32 - 1)) < 6e-3, way
    assert int(moved) <= int(of) and (way != ways[2] or moved == '0') and (way != 'f32' or moved == of), way
for way, error in n['sums of 64'].items():
    assert abs(float(re.search(r'^  sums %s +([\d.]+)$' % way, out, re.M)[1]) - error['value']) < 6e-5, way
assert len(n['sums of 64']) == 3
END
    report $? "updates below half a step vanish, and sums round: the tables say what --json says"
fi
cp "$build/$program" "$work/bf16"  # where it finds no text by itself
run env -u ULTRASCALE_DATA "$work/bf16" --ranks 1 --data "$ULTRASCALE_DATA" && grep -q '^PASS bf16: ' "$out"
report $? "the tables of small models read --data, too"
perl -e 'print pack("l<256", 20240520, 1, 9000, (0) x 253), pack("S<9000", map { $_ * 7 % 1000 } 1 .. 9000)' \
    >"$work/tokens.bin"
verdict='1 rank splits nothing' passes "but not tokens that they do not have" $program --ranks 1 --data "$work/tokens.bin" --vocab 1000
verdict='the ranks reproduce the single-device step (exact, 0 bits'  # and nothing that is left out
passes "3 ranks step their parts as one would, rounded at random" $program --ranks 3 $random --proof-only
passes "2 ranks, sums in bf16, recomputed" $program --sum bf16 --recompute full --proof-only
verdict=''
run "$build/$program" $random --no-check --steps 4 --save "$work/straight" --save-every 2 &&
    run "$build/$program" $random --no-check --steps 4 --ranks 1 --grad-acc 4 --save "$work/resumed" \
        --resume "$work/straight/step-000002" &&
    run "$build/$program" $random --no-check --steps 4 --ranks 2 --save "$work/again" \
        --resume "$work/straight/step-000002" &&
    same_checkpoint "$work/straight/step-000004" "$work/again/step-000004"
report $? "4 steps are 2, a resumption and 2, bit for bit; one rank goes on with it, too"
refused "add --master none" $program --rounding stochastic
refused "bf16 proves what it does with bf16, which is off: give --dtype bf16" $program --dtype f64
refused "--master is an option of bf16, which has nothing to do here: leave it out, or give --dtype bf16" \
    $program --dtype f32 --master none

# ---- gradients written in f32 ----

f32="--gradient f32"
passes "3 ranks, gradients in f32, tied, 3 micro-batches" $program $f32 --ranks 3 --tied --grad-acc 3 \
    --proof-only
grep -qE '^  gradients +125 kB +125 kB +125 kB$' "$out"
report $? "3 ranks, gradients in f32: 4 bytes for each parameter"
passes "gradients in f32, recomputed, updates rounded at random" $program $f32 $random --recompute full \
    --proof-only
refused "leave one of them out" $program $f32 --sum bf16

all=08_mixed_precision/train_5d
one="$f32 --dtype bf16 --layers 1 --steps 1 --shown 0"
passes "gradients in f32, columns, rows and vocabulary on 2 ranks" $all $one --ranks 2 --pp 1 --tp 2 --sp \
    --vocab-parallel
passes "gradients in f32, hybrid sharding" $all $one --ranks 4 --pp 1 --tp 1 --zero hybrid --shard-ranks 2
refused "deepseek stores gradients in bf16: leave out" $all $one --fp8 deepseek

# The weights of several steps have the same bits on any layout that keeps the order of sums.
small="--dtype bf16 --layers 2 --hidden 48 --heads 6 --kv-heads 2 --ffn 88 --seq 31 --micro-batch 2"
small+=" --steps 2 --tied --optimizer adamw --lr 0.001 --clip 0 --no-check $f32"
same_weights() {  # NAME FLAGS FLAGS…: each a layout
    local name=$1 first='' bad=0 flags weights
    wanted "$name" || return 0
    shift
    for flags in "$@"; do
        run "$build/$all" $small $flags --save "$work/${flags// /}" || bad=1
        weights=$work/${flags// /}/step-000002/model.safetensors
        cmp "${first:=$weights}" "$weights" >"$work/differs" 2>&1 || bad=1
    done
    report $bad "$name"
}
# With several micro-batches ZeRO-2 and -3 sum over ranks before they sum over micro-batches.
flat="--pp 1 --tp 1 --ranks 3 --grad-acc 1"
same_weights "gradients in f32: ZeRO-1, -2 and -3 make the weights of data parallelism" \
    "$flat --zero 0" "$flat --zero 1" "$flat --zero 2" "$flat --zero 3"
flat="--pp 1 --tp 1 --ranks 3 --grad-acc 3"
same_weights "gradients in f32, accumulated: ZeRO-1 makes the weights of data parallelism" \
    "$flat --zero 0" "$flat --zero 1"
same_weights "gradients in f32, accumulated: ZeRO-3 makes the weights of ZeRO-2" \
    "$flat --zero 2" "$flat --zero 3"
deep="--pp 2 --tp 1 --grad-acc 4"
same_weights "gradients in f32: stages make the weights of one device" \
    "--ranks 1 --pp 1 --tp 1 --grad-acc 4" "$deep --ranks 2" "$deep --ranks 2 --schedule zb_h1"
same_weights "gradients in f32: ZeRO-3 within stages makes those of data parallelism" \
    "$deep --ranks 4 --zero 0" "$deep --ranks 4 --zero 3"
run "$build/$program" --no-check --steps 4 --save "$work/narrow" --save-every 2 &&
    run "$build/$program" --no-check --steps 4 $f32 --save "$work/wide" --resume "$work/narrow/step-000002"
report $? "a run goes on with gradients in f32"
refused "has no master weights, and this run steps them: resume it with the recipe's flags" $program \
    --no-check --steps 4 --resume "$work/straight/step-000002"
finish
