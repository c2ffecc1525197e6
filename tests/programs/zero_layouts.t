#!/bin/bash
# zero_layouts.t: ZeRO on 1 to 8 ranks, the model clock's orders, repetition, wrong use. TAP.
. "$(dirname "$0")/tap.sh"
export OMP_NUM_THREADS=1
build=$build/02_zero

falls() {  # falls ROW…: seconds per step, in the first table that has these rows, fall from row to row
    local row ms last=1e9
    for row in "$@"; do
        ms=$(sed -n "s/^  $row  *\([0-9.]*\) .*/\1/p" "$out" | head -n 1)
        [ -n "$ms" ] && awk "BEGIN { exit !($ms < $last) }" || return 1
        last=$ms
    done
}

for ranks in 1 2 8; do
    for program in zero1 zero2 zero3; do
        [ $ranks$program = 8zero2 ] || passes "$program, $ranks ranks" $program --ranks $ranks --layers 1 \
            --steps 2 --verbose
    done
done
cp "$out" "$work/first"
falls 'DDP, naive' 'DDP, bucketed' 'ZeRO-1, after step' 'ZeRO-1, in step' ZeRO-1 ZeRO-2
report $? "from naive DDP to ZeRO-2 each step of Llama 3 8B is shorter, on 8 ranks"
grep -qE '^  ZeRO-3 +.* [0-9]\.[0-9]% +[0-9.]+ GB$' "$out"
report $? "ZeRO-3 with prefetch exposes less than a tenth of its communication"
grep -qE 'is hidden up to DP = [0-9]+, [3-9][0-9][0-9], [0-9]+ with 4096, 8192, 16384 tokens' "$out"
report $? "ZeRO-3 is hidden up to a DP of about 512"
run "$build/zero3" --ranks 8 --layers 1 --steps 2 --verbose
cmp -s "$work/first" "$out"
report $? "two runs print the same digits"
passes "f32, within four times the error of one device" zero2 --ranks 3 --dtype f32 --layers 2 \
    --recompute selective
passes "a dry run of Llama 3 8B" zero3 --ranks 4 --model llama-3-8b --dtype bf16 --micro-batch 1 --dry-run

refused "zero is not one of zero3's flags" zero3 --zero 2
refused "gather is not one of zero2's flags" zero2 --gather step
refused "tp is not one of zero2's flags" zero2 --ranks 4 --tp 2
refused 'ranks 3 would fit' zero1 --ranks 4 --dp 3
refused 'gather later is not one of forward|step|after-step' zero1 --gather later
# When a loss is NaN, there is no whole weight to look at. An earlier report is no longer true.
echo '{}' >"$work/j.json"
refuses "a loss that is not finite names the first bad tensor" \
    'loss of micro-batch 0 is .*; the first bad tensor is' zero3 --ranks 3 --dtype f16 --lr 1000 --clip 0 \
    --steps 9 --json "$work/j.json" --trace "$work/t.json"
grep -qE '"status":[[:space:]]*"ENDED"' "$work/j.json" &&
    grep -q '"text":.*the first bad tensor is' "$work/j.json" &&
    [ "$(tail -n 1 "$work/t.json")" = ']}' ] && grep -q '"step 1"' "$work/t.json"
report $? "a run that breaks leaves its JSON and its trace"
finish
