#!/bin/bash
# timeline.t: the timeline of several ranks is one trace, and pictures that are the same in every run. TAP.
# needs: build/01_data_parallel/ddp_naive build/01_data_parallel/ddp_overlap
# needs: build/01_data_parallel/ddp_bucketed build/01_data_parallel/ddp_no_sync build/02_zero/zero2
# needs: build/03_tensor_parallel/tensor_parallel
. "$(dirname "$0")/tap.sh"
export OMP_NUM_THREADS=1
build=$build/01_data_parallel
llama="--dry-run --model llama-3-8b --dtype bf16 --micro-batch 1 --seq 2048 --grad-acc 2"

# The share of a kind of time in the picture's last line, in percent.
share() { grep "^$1 .*exposed.* ms\$" "$out" | grep -oE "$2 [0-9.]+%" | grep -oE '[0-9.]+'; }

run "$build"/ddp_overlap --ranks 3 $llama --trace "$work/t.json"
report $? "three ranks write a trace"
[ "$(head -n 1 "$work/t.json")" = '{"displayTimeUnit":"ms","traceEvents":[' ] &&
    [ "$(tail -n 1 "$work/t.json")" = ']}' ] &&
    ! sed '1d;$d' "$work/t.json" | sed '$s/$/,/' | grep -qv '^{"ph":.*},$'
report $? "it is one list of events"
lacks=''
for rank in 0 1 2; do
    for words in "\"pid\":$((2 * rank)),.*\"rank $rank, wall clock\"" \
        "\"pid\":$((2 * rank + 1)),.*\"rank $rank, model clock: NVIDIA H100" \
        "\"X\",\"pid\":"{$((2 * rank)),$((2 * rank + 1))}',"tid":0,.*"matmul"' \
        "\"pid\":"{$((2 * rank)),$((2 * rank + 1))}',"tid":6,.*"all_reduce"'; do
        grep -q "$words" "$work/t.json" || lacks+="; no $words"
    done
done
[ "$(grep -c '"name":"process_name"' "$work/t.json")" = 6 ] && [ -z "$lacks" ]
report $? "with both clocks of each rank, each with its compute and its communication$lacks"

# Pairs of begin and end on the model clock, in order: for each rank, and for the ranks together.
all_reduces() {
    grep "\"X\",\"pid\":$1,\"tid\":6" "$work/t.json" | sed \
        's/.*"ts":\([0-9.]*\),"dur":\([0-9.]*\),.*/\1 \2/' | sort -n
}
all_reduces 3 | awk '{ if ($1 < end - 1e-3) exit 1; end = $1 + $2 } END { exit NR < 1000 }'
report $? "a rank's communications follow each other on the model clock"
[ "$(all_reduces 1)" = "$(all_reduces 5)" ]
report $? "and run at the same time on all ranks"

run "$build"/ddp_overlap --ranks 3 $llama --timeline
report $? "three ranks show the picture in letters"
[ "$(grep -c '^rank [012]     compute [+FBSfbs.-]*$' "$out")" = 3 ] &&
    [ "$(grep -c '^           dp      [Aa.]*$' "$out")" = 3 ] &&
    [ "$(awk 'length > 100 && /compute|dp  /' "$out" | wc -l)" = 0 ]
report $? "two lines for each rank, no wider than a log"
waits=$(grep -oE 'other ranks [0-9.]+ ms' "$out" | grep -oE '[0-9.]+')
step=$(grep -oE 'a step takes [0-9.]+ ms' "$out" | grep -oE '[0-9.]+')
awk "BEGIN { off = $waits / $step * 100 - $(share all exposed); exit !(off < 0.1 && -off < 0.1) }"
report $? "its exposed share is what the step waited ($waits of $step ms)"

run "$build"/ddp_naive --ranks 2 $llama --timeline && [ "$(share all exposed)" = \
    "$(share all communication)" ] &&
    awk "BEGIN { exit !($(share all exposed) > 10) }"
report $? "naive data parallelism hides nothing"

# A proof also trains on one device, which only rank 0 does, and with the technique's twin.
run "$build"/ddp_naive --ranks 2 --steps 1 --timeline &&
    [ "$(grep -A 1 '^rank [01] ' "$out" | grep -c '^           dp      [Aa]')" = 2 ]
report $? "the picture shows the ranks' run, not the one on one device"
# Nor is the record of a run's first step.
tensor=$build/../03_tensor_parallel/tensor_parallel
run "$tensor" --ranks 2 --steps 1 --timeline && first=$(grep '^all ranks' "$out") &&
    ! grep -q '^ *world .*[CcDd]' "$out" && run "$tensor" --ranks 2 --steps 2 --timeline &&
    grep -qF "$first" "$out"
report $? "a first step is drawn as the second, without its recording"
run "$build"/../02_zero/zero2 --ranks 2 --steps 2 --timeline &&
    [ "$(grep -c '^           dp      G.*R' "$out")" = 2 ]
report $? "nor the twin's"
# Nor what a proof trains after itself.
picture() {
    run "$build"/../02_zero/zero2 --ranks 2 --layers 1 --timeline "$@" &&
        sed -n '/one step on the/,/^all ranks/p' "$out"
}
real=$(picture) && [ -n "$real" ] && [ "$real" = "$(picture --dry-run)" ]
report $? "a proof and a dry run have the same picture"

run "$build"/ddp_naive --ranks 2 --layers 1 --steps 1 --no-check --save "$work/saved" &&
    run "$build"/ddp_naive --ranks 2 --steps 1 --no-check --init "$work/saved" --timeline &&
    grep -q "model $work/saved/.*, 2 ranks" "$out"
report $? "a model from a checkpoint has the checkpoint's name"
variants="--steps 1 --timeline --timeline-svg"
run "$build"/ddp_no_sync $variants "$work/1.svg"
report $? "ddp_no_sync draws the variants"
awk '/^(naive|overlap|bucketed|no_sync) .* ms$/ {
         ms = $(NF - 1); n++
         bad += before && (ms > before || (ms == before && !/^bucketed/)); before = ms }
    END { exit bad || n != 4 }' "$out"
report $? "each faster than the row before it, or as fast with fewer messages"
[ "$(grep -c "<path fill='url(#wait)'" "$work/1.svg")" = 4 ] &&
    [ "$(tail -n 1 "$work/1.svg")" = '</svg>' ] &&
    ! grep -qE 'nan|inf' "$work/1.svg"
report $? "with what is exposed in each"

# Again, while something else keeps the processors busy.
timeout 30 bash -c 'while :; do :; done' &
run "$build"/ddp_no_sync $variants "$work/2.svg"
kill $!
wait
cmp -s "$work/1.svg" "$work/2.svg"
report $? "the picture is the same to the last byte under load"

run "$build"/ddp_bucketed --ranks 2 --steps 1 && grep -q \
    '^  all in one node, NVLink  *2198  *22[0-9][0-9]  *1[0-9][0-9][0-9]$' "$out"
report $? "the clock hides all-reduces from as many tokens on as appendix A3 says"

run "$build/ddp_naive" --ranks 2 --dry-run --timeline-svg "$work/no/folder.svg"
one_line $? -F --timeline-svg
report $? "a picture that cannot be written is named"

finish
