#!/bin/bash
# schedule.t: pipeline schedules from the command line: the table, each schedule, its picture, and text that
# is written and read back. TAP.
# needs: build/05_pipeline_parallel/schedule
. "$(dirname "$0")/tap.sh"
program=05_pipeline_parallel/schedule
names="afab one_f_one_b interleaved zb_h1 zb_h2 zb_v zb_auto dualpipe dualpipe_v"

if wanted "a disk that is full"; then
    "$build/$program" --schedule afab --dump >/dev/full 2>"$err"
    one_line $? -F "stdout could not be written whole"
    report $? "a disk that is full is told, and no success"
fi

# schedule FLAGS…: its stderr follows its stdout.
schedule() {
    run "$build/$program" "$@"
    cat "$err" >>"$out"
    return $status
}

schedule --json "$work/table.json" && [ "$(tail -n 1 "$out" | cut -c 1-15)" = "PASS schedule: " ] &&
    ! grep -q FAIL "$out" && [ "$(grep -c ' equal$' "$out")" = 22 ]
report $? "the table of all schedules agrees with their formulas"
[ "$(grep -c '^p = ' "$out")" = 6 ] && [ "$(grep -c ' exact ' "$out")" -ge 40 ]
report $? "for p = 4 and 8, m = p, 2 p and 4 p"
[ "$(grep -cE '^dualpipe(_v)? .* exact ' "$out")" = 8 ]
report $? "DualPipe's and DualPipeV's formulas hold where F is shorter than B"
grep -qE '^zb_h1 +3 +3 +3 +28 +28 +the best$' "$out" && grep -qE '^zb_v +3 +3 +3 +15 +12' "$out"
report $? "and says how far each is from the best"
python3 -c 'import json,sys; t=json.load(open(sys.argv[1])); assert t["verdict"]["status"] == "PASS"' \
    "$work/table.json" 2>"$out"
report $? "and writes it as JSON"

cp "$out" "$work/before"
schedule --forward 9 --backward 9 --weight 9 && ! grep -q FAIL "$out" &&
    grep -q '^dualpipe_v .* exact ' "$out"
report $? "for other durations, too"
schedule --hop 3 && ! grep -q FAIL "$out" && ! grep -q ' exact ' "$out"
report $? "with a hop no formula is claimed"

for name in $names; do
    schedule --schedule "$name" --stages 4 --micro-batches 8 --svg "$work/$name.svg" &&
        [ "$(grep -c '^rank [0-3]  |' "$out")" = 4 ] &&
        grep -q "^PASS schedule: $name.* is sound" "$out" &&
            grep -q '^with two, for activations.*: messages arrive in order$' "$out"
    report $? "$name is drawn"
    python3 - "$work/$name.svg" >"$out" 2>&1 <<'PYTHON'
import sys, xml.etree.ElementTree as tree
root = tree.parse(sys.argv[1]).getroot()
width, height = float(root.get('width')), float(root.get('height'))
svg = '{http://www.w3.org/2000/svg}'
boxes = root.findall(svg + 'rect')
texts = root.findall(svg + 'text')
assert len(boxes) > 64, 'few passes'
for box in boxes:
    x, y, w, h = (float(box.get(k)) for k in ('x', 'y', 'width', 'height'))
    assert x >= 0 and y >= 0 and w > 0 and x + w <= width and y + h <= height, (x, y, w, h)
for text in texts:
    if text.get('text-anchor') == 'end' or text.get('class') in ('n', 'n w'): continue
    assert float(text.get('x')) + 7.2 * len(text.text) <= width, text.text
assert sum(t.text.startswith('rank ') for t in texts) == 4
assert sum(t.get('class') in ('n', 'n w') for t in texts) >= 64, 'few numbers'
PYTHON
    report $? "$name as an SVG stays inside its frame, with its numbers"
    schedule --schedule "$name" --stages 4 --micro-batches 8 --dump && cp "$out" "$work/$name.txt" &&
        schedule --load "$work/$name.txt" --dump && cmp -s "$out" "$work/$name.txt" &&
            schedule --load "$work/$name.txt" &&
        grep -q "^PASS schedule: $name" "$out"
    report $? "$name is loaded as it was dumped"
done

schedule --schedule one_f_one_b --stages 4 --micro-batches 8 --dump
[ "$(head -n 4 "$out" | tail -n 1)" = \
    "rank 0: F0.0.0 F0.1.0 F0.2.0 F0.3.0 BW0.0.0 F0.4.0 BW0.1.0 F0.5.0 BW0.2.0 F0.6.0 BW0.3.0 F0.7.0 \
BW0.4.0 BW0.5.0 BW0.6.0 BW0.7.0" ]
report $? "1F1B is what it is called"
schedule --schedule afab --stages 4 --micro-batches 1
grep -q 'bubble 90 (300% of the work)' "$out"
report $? "AFAB of one micro-batch is the naive pipeline"
schedule --schedule one_f_one_b --stages 8 --micro-batches 7
grep -q '^makespan 420 = work 210 + bubble 210 (100% of the work)' "$out"
report $? "1F1B of p - 1 micro-batches waits as long as it works"
schedule --schedule one_f_one_b --stages 4 --micro-batches 8 --split &&
    grep -q 'bubble of a step 66, of a period 66' "$out"
report $? "--split takes B and W apart"
schedule --schedule interleaved --stages 4 --micro-batches 8 --group 8 &&
    grep -qE '^rank 0 +7.5 +7.5' "$out" &&
    schedule --schedule interleaved --stages 4 --micro-batches 8 && grep -qE '^rank 0 +5.5 +5.5' "$out"
report $? "breadth-first holds more than depth-first"
schedule --schedule zb_auto --stages 4 --micro-batches 16 --memory-limit 5 &&
    grep -q 'bubble of a step 34, .* 5 micro-batches held' "$out"
report $? "--memory-limit is kept"
schedule --schedule dualpipe --stages 8 --micro-batches 16
grep -q 'one queue for each pair of ranks: rank .* breaks the rule "messages are received in the order' \
    "$out"
report $? "one queue for a pair of ranks misorders DualPipe, and is told so"

# A valid schedule with its first B before its F; with its last W removed; and with a rank that waits for
# ever.
sed 's/^rank 3: F3.0.0 BW3.0.0/rank 3: BW3.0.0 F3.0.0/' "$work/one_f_one_b.txt" >"$work/order.txt"
rule='rank 3, position 0 (BW3.0.0) breaks the rule "B after its F": F3.0.0 stands at position 1'
schedule --load "$work/order.txt"
[ $? = 1 ] && grep -q "^FAIL schedule: .*$rule" "$out"
report $? "a broken order is refused with rank, position, action and rule"
sed 's/ W3.7.0$//' "$work/zb_h1.txt" >"$work/w.txt"
schedule --load "$work/w.txt"
[ $? = 1 ] && grep -q 'breaks the rule "no W is left at the end": W3.7.0 never runs' "$out"
report $? "a W that is left out is refused"
printf '%s\n' '# pp-schedule name=stuck p=2 m=2 stages=2 dirs=1' 'place 0: 0 1' 'mbs 0: 0 1' \
    'rank 0: F0.0.0 BW0.0.0 F0.1.0 BW0.1.0' 'rank 1: F1.0.0 F1.1.0 BW1.0.0 BW1.1.0' >"$work/stuck.txt"
waits='waits for B1.0.0 at position 2 of rank 1, which waits itself at position 1 (F1.1.0)'
schedule --load "$work/stuck.txt"
[ $? = 1 ] && grep -q "rank 0, position 1 (BW0.0.0) .*$waits" "$out"
report $? "a deadlock is told, and not run into"

# The chapter's page shows what the program prints.
page=05_pipeline_parallel/README.md
schedule && missing=$(grep -E '^    (afab|one_f|interleaved|zb_|dualpipe|p = )' $page | sed 's/^    //' |
    while IFS= read -r line; do
    sed 's/ *$//' "$out" | grep -qxF -- "$line" || echo "$line"; done) && [ -z "$missing" ] &&
    [ "$(grep -cE '^    (afab|one_f|interleaved|zb_|dualpipe|p = )' $page)" -ge 18 ]
report $? "the page's tables are those of the program"
bad='' asked=0
while read -r _ flags; do
    asked=$((asked + 1))
    schedule $flags && grep -q '^PASS schedule: ' "$out" || bad="$bad $flags;"
done < <(grep -E '^ +build/05_pipeline_parallel/schedule --' $page)
[ -z "$bad" ] && [ $asked = 10 ]
report $? "every command of the page's questions runs${bad:+, but not$bad}"
bad=''
for picture in 05_pipeline_parallel/*.svg; do
    schedule --schedule "$(basename "$picture" .svg)" --stages 4 --micro-batches 8 --svg "$work/again.svg"
    cmp -s "$picture" "$work/again.svg" && grep -qF "($(basename "$picture"))" $page || bad="$bad $picture"
done
[ -z "$bad" ]
report $? "the page's pictures are those of the program${bad:+, but not$bad}"
bad='' asked=0 lines=0
while read -r file flags; do
    asked=$((asked + 1))
    schedule --schedule $flags --forward 10 --backward 10 --weight 10 </dev/null || bad="$bad $file"
    while IFS= read -r line; do
        lines=$((lines + 1))
        grep -qxF -- "//     $line" "05_pipeline_parallel/$file.c" || bad="$bad $file:${line%|*}"
    done < <(grep '^rank [0-9] *|' "$out")
done <<'PICTURES'
afab afab --micro-batches 4
one_f_one_b one_f_one_b --micro-batches 4
interleaved interleaved --micro-batches 4
zero_bubble zb_h1 --micro-batches 7
zero_bubble_v zb_v --micro-batches 7
zero_bubble_auto zb_auto --micro-batches 7 --memory-limit 5
dualpipe dualpipe --micro-batches 8
PICTURES
[ -z "$bad" ] && [ $asked = 7 ] && [ $lines = 28 ]
report $? "the pictures in the sources are those of the program, with F = B = W${bad:+, but not$bad}"

passes "a pair that takes less time than any order of its passes" $program --weight 12.5 --pair 24
passes "times whose sums round differ from their formulas by that alone" $program --backward 0.1
refused '--load' $program --load /no/such/file
mkfifo "$work/fifo" && refused 'fifo is a pipe or a device' $program --load "$work/fifo"
printf '# pp-schedule name=x p=2 m=1 stages=2 dirs=1\nplace 0: 0 2\n' >"$work/bad.txt"
refused 'line 2: the rank of a stage is not a number from 0 to 1' $program --load "$work/bad.txt"
refused '--schedule and --load are two schedules' $program --schedule afab --load "$work/w.txt"
refused '--svg needs a schedule' $program --svg "$work/x.svg"
refused 'and nothing else: leave out --svg' $program --schedule afab --dump --svg "$work/x.svg"
refused 'and nothing else: leave out --hop' $program --schedule afab --dump --hop 2
run "$build/$program" --schedule zb_auto --dump && cp "$out" "$work/order" &&
    run "$build/$program" --schedule zb_auto --dump --hop 3 && ! cmp -s "$out" "$work/order"
report $? "zb_auto's order, which --dump prints, follows from the times"
run "$build/$program" --schedule afab --stages 1 --micro-batches 1 && grep -q '; 1 micro-batch held$' "$out"
report $? "one micro-batch is called so"
refused '--stages has an effect only with --schedule' $program --stages 3
refused '--chunks has an effect only with --schedule interleaved' $program --schedule afab --chunks 3
refused '--split has an effect only with --schedule one_f_one_b' $program --schedule zb_v --split
refused '--memory-limit has an effect only with --schedule zb_auto' $program --schedule zb_v --memory-limit 3
refused '--stages 2, 4' $program --schedule dualpipe --stages 3
refused '--group must be at least --stages' $program --schedule interleaved --group 3
refused '--svg /no/such/folder/x.svg cannot be written' $program --schedule afab \
    --svg /no/such/folder/x.svg
finish
