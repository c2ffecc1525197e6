#!/bin/bash
# profile.t: the profiler's proofs hold in every way of training, and its files have the format they should.
# TAP.
. "$(dirname "$0")/tap.sh"
profile=$build/00_single_gpu/profile
small="--layers 2 --hidden 32 --heads 4 --kv-heads 2 --ffn 48 --seq 24 --micro-batch 3"

profiles() { run "$profile" --svg "$work/m.svg" --trace "$work/t.json" "$@"; }

# proves NAME FLAGS…: exit status 0, PASS in the last line, and as many figures as always.
proves() {
    local name=$1
    shift
    profiles "$@" && tail -n 1 "$out" | grep -q '^PASS profile: .*11 counts as predicted'
    report $? "$name"
}

proves "memory goes as the formulas say in f32" $small
for dtype in f64 bf16; do proves "and in $dtype, with accumulation" $small --dtype $dtype --grad-acc 3; done
proves "and with tied weights and selective recomputation" $small --tied --recompute selective
proves "and with full recomputation" $small --recompute full --steps 6
proves "and for Llama 3 8B, with no memory behind it" --model llama-3-8b --dtype bf16 --micro-batch 1 \
    --dry-run \
    --machine h200
grep -q 'the device has 141 GB' "$work/m.svg"
report $? "the picture shows the capacity that Llama 3 8B exceeds"

profiles $small --json "$work/p.json"
rows=$(sed -n '/^  per step/,/^  all /p' "$out" | grep -c '%.*%')
[ "$rows" = 11 ] && grep -q 'step/backward' "$out"
report $? "prints the ten costliest operations, their sum and the anatomy (rows: $rows)"
missing=''
for key in '"model clock"' '"wall clock"' '"FLOPs"' '"wall seconds of each step"' '"counts"' '"verdict"'; do
    grep -q "$key" "$work/p.json" || missing="$missing $key"
done
[ -z "$missing" ]
report $? "--json holds what the tables show$missing"
run "$profile" $small --dry-run --json "$work/p.json" && grep -q '"model clock"' "$work/p.json" &&
    ! grep -q '"wall clock"' "$work/p.json"
report $? "but no wall clock of a dry run, which is not timed"
[ "$(head -c 4 "$work/m.svg")" = '<svg' ] && [ "$(tail -n 1 "$work/m.svg")" = '</svg>' ] &&
    ! grep -qE 'nan|inf' "$work/m.svg" && [ "$(grep -c "<path fill='#" "$work/m.svg")" = 5 ]
report $? "the picture has an area for each kind of memory"

tests/programs/legible.py "$work/m.svg" >"$out" && [ ! -s "$out" ]
report $? "no text leaves the picture"

# The model clock does not depend on this machine: two runs draw the same picture.
cp "$work/m.svg" "$work/first.svg"
OMP_NUM_THREADS=1 profiles $small && cmp -s "$work/m.svg" "$work/first.svg"
report $? "the picture is the same to the last byte with another number of threads"

on_terminal "$profile $small --steps 9 --svg ${work@Q}/m.svg --trace ${work@Q}/t.json" &&
    grep -qE '\[#+-*\] +[0-9]+%.*: steps watched' "$out"
report $? "a bar while it watches"

rm -f "$work/t.json" "$work/p.json"
profiles $small --data "$work/none" --json "$work/p.json"
one_line $? -F "$work/none" && grep -qE '"status":[[:space:]]*"ENDED"' "$work/p.json"
report $? "a run that breaks says so in --json"

refused 'has no later step' 00_single_gpu/profile --steps 1
run "$profile" $small --svg "$work/no/folder.svg" --trace "$work/t.json"
one_line $? -F --svg
report $? "a picture that cannot be written is named"
run "$profile" $small --svg "$work/same" --trace "$work/same"
one_line $? -F -- "--svg and --trace would write the same file"
report $? "two flags that name one file are refused"

finish
