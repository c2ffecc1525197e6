#!/bin/bash
# bf16.t: bfloat16 with and without masters: ranks against one device, random rounding on any layout and
# through a checkpoint, and what vanishes. TAP.
# needs: build/08_mixed_precision/bf16
. "$(dirname "$0")/tap.sh"
export OMP_NUM_THREADS=1
program=08_mixed_precision/bf16
random="--master none --rounding stochastic"

same_checkpoint() {
    for file in model.safetensors optimizer.safetensors; do
        cmp "$1/$file" "$2/$file" >"$out" 2>&1 || return 1
    done
}

passes "updates below half a step vanish, and sums round" $program --json "$work/bf16.json"
grep -A9 'gains that move without masters' "$work/bf16.json" | grep -q '"measured":[[:space:]]*0,'
report $? "--json says that no gain moves"
verdict='.*exact, 0 bits'
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
finish
