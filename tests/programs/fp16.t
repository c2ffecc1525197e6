#!/bin/bash
# fp16.t: float16 with its three techniques and without each of them: ranks against one device, what breaks
# and how, an overflow on one rank, and the scale across a checkpoint. TAP.
# needs: build/08_mixed_precision/fp16
. "$(dirname "$0")/tap.sh"
export OMP_NUM_THREADS=1
program=08_mixed_precision/fp16

verdict='the ranks reproduce the single-device step; each trick fixes its own failure ('
passes "each trick fixes its own failure" $program --json "$work/fp16.json"
if wanted "each trick fixes its own failure, in the tables as in --json"; then
    python3 - "$out" "$work/fp16.json" <<'END' 2>"$err"
import json, re, sys
out, n = open(sys.argv[1]).read(), json.load(open(sys.argv[2]))['numbers']
n = {table: {name: x['value'] for name, x in n[table].items()} for table in ('loss scaling', 'sums')}
for row, name in ('none', 'unscaled'), ('scale 65536', 'scaled'):
    error, lost = map(float, re.search(r'^  %s +([\d.]+) +([\d.]+)%%$' % row, out, re.M).groups())
    assert abs(error - n['loss scaling']['error, ' + name]) < 6e-5, row
    assert abs(lost - 100 * n['loss scaling']['lost, ' + name]) < 0.06, row
assert n['loss scaling']['lost, scaled'] < 0.1 * n['loss scaling']['lost, unscaled'] < 0.1
for row in 'f32', 'f16':
    assert float(re.search(r'^  %s +(\d+) +[\d.]+$' % row, out, re.M)[1]) == n['sums']['scale, ' + row], row
assert n['sums']['scale, f32'] >= 4 * n['sums']['scale, f16']
END
    report $? "each trick fixes its own failure, in the tables as in --json"
fi
verdict='the ranks reproduce the single-device step ('  # nothing is said of what is left out
for zero in 0 1 3; do
    passes "ZeRO-$zero, and an overflow on one rank" $program --zero $zero --proof-only
done
passes "a scale of 1, and an overflow on one rank" $program --scale 1 --proof-only
verdict=''
refused "fp16 proves what it does with fp16, which is off: give --dtype f16" $program --dtype f32
refused "a smaller --scale would fit, or --dtype bf16" $program --scale 1e9 --proof-only
refuses "a later step overflows" \
    'gradients of step [2-8], which a proof compares, overflow f16: a smaller --scale' \
    $program --scale-interval 1 --steps 8 --proof-only
refused "--scale is where --loss-scale static or dynamic begins" $program --loss-scale none --scale 8
refused "--scale-interval has an effect only with --loss-scale dynamic" $program --loss-scale static \
    --scale-interval 8
refused "--moments f16 is of AdamW" $program --moments f16 --optimizer sgd
passes "3 ranks, tied, recomputed" $program --ranks 3 --tied --recompute full --proof-only

real="--no-check --ranks 1 --hidden 32 --heads 4 --kv-heads 2 --ffn 80 --seq 32 --micro-batch 8 --grad-acc 1
    --clip 1 --sample 0 --eval-every 0 --lr 0.05 --steps 40"
refuses "every step is skipped" 'gradients of each step overflow f16, and all are skipped: a smaller scale' \
    $program --no-check --loss-scale static --scale 1e30 --steps 2 --layers 1 --sample 0
passes "with its tricks float16 trains" $program $real
refuses "float16 alone diverges" 'step [0-9]+: the loss of micro-batch 0 is' $program $real \
    --loss-scale none \
    --master none --sum f16 --moments f16

run_of() {
    run "$build/$program" --no-check --steps 8 --scale 4e6 --scale-interval 3 --ranks 2 --lr 0.01 "$@"
}
run_of --save "$work/straight" --save-every 6 &&
    grep -qE 'norm (inf|nan) .* skipped: the gradients overflow$' "$out" &&
    ! grep -q 'norm [0-9].* skipped' "$out" &&
    run_of --save "$work/again" --resume "$work/straight/step-000006" &&
    cmp "$work/straight/step-000008/optimizer.safetensors" "$work/again/step-000008/optimizer.safetensors" \
        >"$out" 2>&1 &&
    cmp "$work/straight/step-000008/model.safetensors" "$work/again/step-000008/model.safetensors" \
        >"$out" 2>&1
report $? "8 steps, of which some overflow, are 6, a resumption and 2, bit for bit"
# A static scale, too, is that of the checkpoint.
run "$build/$program" --no-check --steps 4 --loss-scale static --scale 1024 --save "$work/static" --save-every 2 &&
    run "$build/$program" --no-check --steps 4 --loss-scale static --scale 8 --resume "$work/static/step-000002" \
        --save "$work/static2" && run cmp "$work"/static{,2}/step-000004/model.safetensors
report $? "a static scale is resumed"
share() { tr -d '\n\t ' <"$work/$1.json" | sed -n 's/.*becamezero":{"value":\([^,]*\),.*/\1/p'; }
lost="--no-check --loss-scale none --layers 1 --hidden 8 --heads 2 --kv-heads 1 --ffn 8 --seq 16 --vocab 8192 --micro-batch 64"
lost+=" --sample 0 --eval-every 0 --steps 1"
if wanted "without loss scaling ranks count"; then
    run "$build/$program" $lost --ranks 1 --grad-acc 3 --json "$work/one.json" &&
        grep -qE '^PASS .*without loss scaling [1-9][0-9.e-]*% of the logits. gradients became zero' "$out" &&
        run "$build/$program" $lost --ranks 3 --grad-acc 1 --json "$work/three.json" &&
        [ -n "$(share one)" ] && [ "$(share one)" = "$(share three)" ]
    report $? "without loss scaling ranks count together what becomes zero"
fi
refuses "another recipe does not go on with it" 'whose recipe keeps 2 numbers .*, and this one keeps 0' \
    $program \
    --no-check --steps 8 --loss-scale none --resume "$work/straight/step-000006"
finish
