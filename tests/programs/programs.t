#!/bin/bash
# programs.t: every single-device program reaches its verdict in every dtype, and writes the files that it is
# asked for. BUILD=build-asan runs it under the sanitizers. TAP.
. "$(dirname "$0")/tap.sh"
build=$build/00_single_gpu
small="--layers 1 --hidden 24 --heads 6 --kv-heads 2 --ffn 20 --seq 13"

for dtype in f64 f32 bf16 f16; do
    passes "grad_accumulation in $dtype, in 2, 3 and 6 parts" grad_accumulation $small --micro-batch 6 \
        --dtype $dtype \
        --steps 2 --lr 0.01
    passes "recompute in $dtype" recompute $small --dtype $dtype --steps 2
    passes "memory in $dtype" memory --measure $small --dtype $dtype
    passes "profile in $dtype" profile $small --dtype $dtype --steps 2 --svg "$work/m.svg" \
        --trace "$work/t.json"
    passes "train in $dtype" train $small --dtype $dtype --steps 12 --sample 3
done
passes "memory of a model whose rows have one element" memory --measure --hidden 1 --heads 1 --kv-heads 1 \
    --head-size 2 --ffn 1 --dtype bf16
passes "train with tied embeddings, SGD and recomputation" train $small --tied --optimizer sgd --lr 0.1 \
    --steps 12 --recompute full --sample 0 --grad-acc 2
passes "recompute without a comparison" recompute $small --no-check
[ "$(awk '$1 == 8192 || $1 == 32768' "$out" | xargs)" = \
    "8192 +2.1% 0.22 0.978 1.018 32768 +6.1% 0.07 0.905 1.040" ]
report $? "recomputed scores are faster than stored ones on an H100, and not on an A100"
passes "memory of ZeRO-3, which leaves out units in use" memory --model llama-3-8b --dtype bf16 --dp 8 \
    --zero 3
grep -q '(without the units in use, whose whole gradients and weights come on top)' "$out"
report $? "and says that it leaves them out"
run "$build/memory" --model llama-3-8b --seq 61 && grep -q '^ *61 ' "$out" && ! grep -q '^ *56 ' "$out"
report $? "memory: the lengths that it sweeps include the one that was asked for"
run "$build/memory" --model llama-3-8b --dtype bf16 --seq 1024 --dp 8 --zero 3 &&
    grep -q '80.0 GB: this fits, if the units in use fit in the rest.$' "$out"
report $? "memory of ZeRO-3: it does not promise that they fit"
grep -q "16-bit gradients of such units only, 2.01 GB less)" "$out"
report $? "memory of ZeRO-3: by how much the formula is more than what this book's ranks hold"
# Of each table a rank has ceil(257 / 2) rows.
run "$build/memory" --layers 1 --hidden 32 --heads 2 --kv-heads 2 --ffn 32 --vocab 257 --tp 2 --dtype f32 \
    --json "$work/padded.json" &&
    grep -A 1 '"parameters"' "$work/padded.json" | grep -q $((4 * (2 * 129 * 32 + 32 + 64 + 7 * 32 * 32 / 2)))
report $? "memory of a vocabulary that --tp pads"
if wanted "memory, a block's tensors"; then
    bad=''
    for recompute in none selective full; do
        run "$build/memory" --tensors --recompute $recompute && awk '
            BEGIN { unit["B"] = 1; unit["kB"] = 1e3; unit["MB"] = 1e6 }
            !$0 { listed = 0 }
            listed { sum += $(NF - 1) * unit[$NF]; rows++ }
            /^  one block keeps / { listed = 1; all = $4 * unit[$5] }
            END { exit !(all > 0 && rows >= 1 && sum > 0.99 * all && sum < 1.01 * all) }' "$out" || bad="$bad $recompute"
    done
    [ -z "$bad" ]
    report $? "memory, a block's tensors add up to what it keeps${bad:+, but not with recompute$bad}"
fi
if wanted "memory --claims"; then
    run "$build/memory" --claims && rows=$(sed '1,/^claim  /d' "$out" | grep -cE '^ {2,3}[0-9]+  ') &&
        grep -q "^PASS memory: $rows published figures reproduced" "$out" && [ "$rows" -gt 30 ]
    report $? "memory --claims: a row for each published figure"
fi
refused "--temperature is for the sample, and --sample 0 writes none" train --sample 0 $small --steps 1 \
    --temperature 1
refused "--sp shards rows over the ranks of --tp, and there is one" memory --sp
refused "--zero 1 shards over the ranks of --dp, and there is one" memory --measure --zero 1
refused "--no-f32-gradients is about gradients of 16 bits" memory --no-f32-gradients
refused "--measure runs this book's model on one device" memory --measure --k 4
[ ! -s "$out" ]
report $? "before it prints anything"
refused "--machine is not one of grad_accumulation's flags" grad_accumulation --machine dgx-a100
run "$build/train" $small --steps 1 --dry-run --temperature 1 &&
    grep -q '^PASS train: 1 step counted, none computed' "$out"
report $? "a dry run takes each flag of the run, and counts one step"
run "$build/train" --layers 1 --hidden 2 --heads 1 --kv-heads 1 --ffn 4 --seq 1 --steps 1 --micro-batch 6 \
    --dtype f64 --seed 55 --lr 0.001 --sample 0
[ $status = 1 ] && grep -qE '^FAIL train: .* did not fall: 5\.[0-9]+ before, [0-9.e-]+ more after' "$out"
report $? "a loss that rises by less than is shown of it: by how much"
for program in train grad_accumulation recompute; do
    passes "$program writes --json and --trace" $program $small --steps 12 --json "$work/$program.json" \
        --trace "$work/$program.trace"
    [ -s "$work/$program.json" ] && [ -s "$work/$program.trace" ]
    report $? "and both are there"
done

# A run that has mapped the text keeps it when make renews it.
make -s BUILD="$work/b" "$work/b/corpus.txt" >"$out" 2>&1 && ln "$work/b/corpus.txt" "$work/mapped" &&
    echo mapped >>"$work/mapped" && make -s -B BUILD="$work/b" "$work/b/corpus.txt" >"$out" 2>&1 &&
    [ "$(tail -n 1 "$work/mapped")" = mapped ] && [ "$(tail -n 1 "$work/b/corpus.txt")" != mapped ] &&
    [ "$(ls "$work/b")" = corpus.txt ]
report $? "the default text is replaced, and not rewritten under a run"
# Who makes one program alone runs it next.
make -n BUILD="$work/one" "$work/one/02_zero/zero1" >"$out" 2>&1 && grep -q 'mv .*corpus.txt' "$out" &&
    mkdir -p "$work/one" && echo old >"$work/one/corpus.txt" &&
    make -n BUILD="$work/one" "$work/one/02_zero/zero1" >"$out" 2>&1 && ! grep -q 'mv .*corpus.txt' "$out"
report $? "one program alone is made with the default text, if there is none"
run "$build/train" $small --steps 1 --sample 0 --json /dev/full
one_line $? -F -- '--json /dev/full could not be written whole: No space left on device'
report $? "a report that does not fit is one sentence"
# A run that fails leaves an older report alone.
cp "$work/train.json" "$work/before.json"
"$build/train" --json "$work/train.json" --data /no/such/file >"$out" 2>&1
cmp -s "$work/train.json" "$work/before.json"
report $? "a run that fails leaves the report of an earlier one"

# ---- where output goes ----

for flag in json trace; do
    mkfifo "$work/fifo.$flag" && ln -s "$work/fifo.$flag" "$work/link.$flag"
    timeout 60 cat "$work/fifo.$flag" >"$work/came.$flag" &
    timeout 60 "$build/train" $small --steps 2 --$flag "$work/link.$flag" >"$out" 2>&1
    wait $!
    [ -s "$work/came.$flag" ] && [ -p "$work/fifo.$flag" ] && [ -h "$work/link.$flag" ]
    report $? "--$flag writes through a link into a FIFO"
done
ln -s /proc/self/fd/1 "$work/stdout"  # as /dev/stdout is
"$build/train" $small --steps 12 --json "$work/stdout" >"$work/log" 2>"$out" &&
    grep -q '^L=1' "$work/log" &&
    grep -q '^PASS' "$work/log" && grep -q '"verdict"' "$work/log"
report $? "--json on standard output stands in the log"
"$build/train" $small --steps 12 --json "$work/closed.json" >&- 2>"$out" &&
    [ "$(head -n 1 "$work/closed.json")" = '{' ] &&
    ! grep -q '^L=1' "$work/closed.json"
report $? "no line of the log stands in a report when standard output is closed"
for flag in json trace; do
    "$build/train" $small --steps 1000000000 --$flag "$work/no/file" >"$out" 2>&1
    [ $? = 2 ] && grep -q -- "^train: --$flag $work/no/file cannot be written" "$out"
    report $? "--$flag is found out before the run"
done
timeout 60 "$build/train" $small --steps 1000000000 2>"$out" | head -n 1 >/dev/null
[ ${PIPESTATUS[0]} = 141 ] && [ ! -s "$out" ]
report $? "a run whose output nobody reads any more ends at once"
# 10 TB of tokens and labels in a step, of which a dry run holds none.
large="${small% --seq*} --seq 2000 --dry-run --micro-batch 1000000 --grad-acc 600 --steps 2"
run "$build/train" $large && grep -q '^PASS' "$out"
report $? "a dry run holds no tokens"
absurd="a dry run of an absurd size ends with a sentence"
if [[ $build == *asan* ]]; then
    report 0 "$absurd # SKIP AddressSanitizer takes terabytes of addresses"
else
    (ulimit -v 4000000; run "$build/train" $large --documents 0)
    one_line $? -F 'out of host memory: 8.00 GB more were asked for'
    report $? "$absurd"
fi
finish
