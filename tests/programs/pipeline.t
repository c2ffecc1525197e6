#!/bin/bash
# pipeline.t: every schedule on ranks of a pipeline, alone and with data parallelism, ZeRO, tensor,
# sequence, vocabulary, asynchronous tensor and context parallelism, against one device; real training,
# checkpoints from one layout to another, schedules from a file, what does not fit, and a rank that dies.
# TAP. A pattern chooses among the layouts.
# needs: build/05_pipeline_parallel/schedule build/05_pipeline_parallel/afab
# needs: build/05_pipeline_parallel/one_f_one_b build/05_pipeline_parallel/interleaved
# needs: build/05_pipeline_parallel/zero_bubble build/05_pipeline_parallel/zero_bubble_v
# needs: build/05_pipeline_parallel/zero_bubble_auto build/05_pipeline_parallel/dualpipe
# needs: build/05_pipeline_parallel/dualpipe_v build/03_tensor_parallel/tensor_parallel
# needs: build/00_single_gpu/train
. "$(dirname "$0")/tap.sh"
export OMP_NUM_THREADS=1
top=$build
build=$build/05_pipeline_parallel

# of_class CLASS NAME PROGRAM FLAGS…: passes, and the verdict names the class.
of_class() {
    local class=$1 name=$2 program=$3
    shift 3
    wanted "$name" || return 0
    run "$build/$program" "$@" && grep -q "^PASS $program: .*($class" "$out"
    report $? "$name"
}
exactly() { of_class 'exact, 0 bits differ;' "$@"; }
nearly() {
    local class=reassociated,
    [[ " $* " != *' --dtype bf16 '* ]] || class=rounded,
    of_class $class "$@"
}

# One step is enough if bits are compared; 7 layers are a prime number, and few.
quick="--layers 7 --steps 1"
# Every schedule on 4 ranks with 8 micro-batches; the program prints its row in the page's table.
row() {
    awk -v name="$1" '/own clock  /{ own = $6 } /^  run /{ run = $2; bubble = $NF }
        /^  most passes held/{ held = $11 }
        END { print "| " name " | " own " | " run " | " bubble " | " held " |" }' "$out"
}
rows=''
while read -r name class program flags; do
    $class "$name, p 4, m 8" $program $flags --layers 8 --steps 1 </dev/null
    [ "$only" = "*" ] && rows=$rows$(row $name)$'\n'
done <<'SCHEDULES'
afab exactly afab
one_f_one_b exactly one_f_one_b
interleaved exactly interleaved
zb_h1 exactly zero_bubble
zb_h2 exactly zero_bubble --schedule zb_h2
zb_v exactly zero_bubble_v
zb_auto exactly zero_bubble_auto
dualpipe nearly dualpipe
dualpipe_v exactly dualpipe_v
SCHEDULES
if [ "$only" = "*" ]; then
    [ "$(grep -E '^[|] [a-z]' 05_pipeline_parallel/README.md)" = "${rows%$'\n'}" ]
    report $? "the page's table is what the programs print"
fi

# In the page's figures, a pipeline loses less of its throughput per GPU from one node to two than tensor
# parallelism does.
across='^From one node|GPUs, ms|^  (pp|tp), m'
small="--ranks 16 --layers 16 --steps 1 --hidden 8 --heads 2 --kv-heads 1 --ffn 8 --seq 4 --micro-batch 1"
if wanted "from one node to two"; then
    run "$build/one_f_one_b" $small && grep -q '^PASS' "$out" &&
        [ "$(grep -E "$across" "$out")" = \
            "$(sed -n 's/^    //p' 05_pipeline_parallel/README.md | grep -E "$across")" ] &&
        [ "$(grep -cE "$across" "$out")" = 5 ]
    report $? "from one node to two"
fi
if wanted "from one node to two, on a slow network"; then
    run "$build/one_f_one_b" $small --network-efficiency 0.05 && grep -q '^PASS' "$out" &&
        grep -q '^  tp, m = 4  *759.407' "$out" &&
        grep -q '^  (a message across nodes takes 13.431 ms, longer than F: the pipeline waits' "$out"
    report $? "from one node to two, on a slow network"
fi

exactly "afab, p 1" afab --ranks 1 --grad-acc 3 $quick
exactly "afab, p 2, m 1: the naive pipeline" afab --ranks 2 --grad-acc 1 $quick
exactly "1f1b, p 1" one_f_one_b --ranks 1 --grad-acc 2 $quick
exactly "1f1b, p 2, m 2, documents without context parallelism" one_f_one_b --ranks 2 --grad-acc 2 \
    --documents 32 $quick
exactly "1f1b, p 2, m 8, as many layers as stages" one_f_one_b --ranks 2 --layers 2 --steps 3
exactly "1f1b, p 3, m 2" one_f_one_b --ranks 3 --grad-acc 2 $quick
if wanted "one micro-batch is called so"; then
    run "$build/one_f_one_b" --grad-acc 1 --steps 1 &&
        grep -q ' on 4 ranks, 1 micro-batch of 4,096 tokens' "$out"
    report $? "one micro-batch is called so"
fi
exactly "1f1b, p 4, m 16" one_f_one_b --grad-acc 16 $quick
exactly "1f1b, p 8, m 7, ends without a layer" one_f_one_b --ranks 8 --grad-acc 7 \
    --stage-layers 0,2,1,1,1,1,1,0 $quick
exactly "interleaved, p 2, ends without a layer" interleaved --ranks 2 --grad-acc 3 \
    --stage-layers 0,2,5,0 $quick
exactly "interleaved, p 1, v 3" interleaved --ranks 1 --chunks 3 --grad-acc 2 $quick
exactly "interleaved, p 2, v 1, m 3" interleaved --ranks 2 --chunks 1 --grad-acc 3 $quick
exactly "interleaved, p 2, v 3, m 4" interleaved --ranks 2 --chunks 3 --grad-acc 4 $quick
exactly "interleaved, p 3, v 2, m 4, which 3 does not divide" interleaved --ranks 3 --grad-acc 4 $quick
exactly "zb_h1, p 2, m 2" zero_bubble --ranks 2 --grad-acc 2 $quick
exactly "zb_h1, p 4, m 3" zero_bubble --grad-acc 3 $quick
exactly "zb_h2, p 3, m 1" zero_bubble --schedule zb_h2 --ranks 3 --grad-acc 1 $quick
exactly "zb_v, p 1" zero_bubble_v --ranks 1 --grad-acc 2 $quick
exactly "zb_v, p 3, m 6" zero_bubble_v --ranks 3 --grad-acc 6 $quick
nearly "dualpipe, p 2, m 4" dualpipe --ranks 2 --grad-acc 4 $quick
nearly "dualpipe, p 6, m 3" dualpipe --ranks 6 --grad-acc 3 $quick
exactly "dualpipe_v, p 4, m 1, 11 layers" dualpipe_v --grad-acc 1 --layers 11 --steps 1

exactly "1f1b, p 2, 5 and 2 layers" one_f_one_b --ranks 2 --stage-layers 5,2 --grad-acc 2 $quick
prints "1f1b, p 2, 5 and 2 layers: and so has afab beside it" "weights 348 kB 228 kB 228 kB 228 kB"
exactly "1f1b, AdamW" one_f_one_b --ranks 2 --grad-acc 2 --optimizer adamw --lr 0.001 $quick
exactly "zb_v, full" zero_bubble_v --ranks 2 --grad-acc 2 --recompute full $quick
prints "zb_v, full: the times of a stage" "F 2.383 ms, B 4.830 ms, W 2.588 ms a stage, a message 0.078 ms"
exactly "zb_h1, selective" zero_bubble --ranks 3 --grad-acc 3 --recompute selective $quick
nearly "1f1b, tied" one_f_one_b --ranks 3 --grad-acc 3 --tied $quick
nearly "zb_v, tied, both ends on one rank" zero_bubble_v --ranks 2 --grad-acc 2 --tied $quick
nearly "interleaved, tied, all stages on one rank" interleaved --ranks 1 --grad-acc 3 --tied $quick
exactly "1f1b, tied, one stage" one_f_one_b --ranks 1 --grad-acc 3 --tied $quick
nearly "dualpipe, tied, AdamW" dualpipe --grad-acc 4 --tied --optimizer adamw --lr 0.001 $quick

few="--layers 5 --steps 1 --grad-acc 2"
nearly "1f1b, pp 2, dp 1, zero 2" one_f_one_b --ranks 2 --zero 2 $few
nearly "1f1b, context on one rank" one_f_one_b --ranks 1 --context ring $few
passes "afab, 3 nodes of 1" afab --ranks 3 --layers 3 --steps 1 --gpus-per-node 1 --machine dgx-a100
passes "interleaved, 6 nodes of 1, a slow network" interleaved --ranks 6 --layers 12 --steps 1 \
    --grad-acc 12 --gpus-per-node 1 --network-efficiency 0.3
passes "zb_h2, 2 nodes of 3, a slow network" zero_bubble --schedule zb_h2 --ranks 6 --layers 6 --steps 1 \
    --grad-acc 7 --gpus-per-node 3 --network-efficiency 0.3
passes "interleaved, messages of half an F" interleaved --layers 8 --steps 1 --network-efficiency 0.06
passes "afab, messages that queue" afab --layers 4 --steps 1 --network-efficiency 0.002
passes "zb_v, 2 nodes of 2" zero_bubble_v --layers 8 --steps 1 --gpus-per-node 2
nearly "afab, pp 2, dp 2" afab --pp 2 $few
nearly "1f1b, pp 4, dp 2, zero 1" one_f_one_b --ranks 8 --pp 4 --zero 1 --layers 5 --steps 2
nearly "1f1b, pp 2, dp 3, zero 1, tied, AdamW" one_f_one_b --ranks 6 --pp 2 --zero 1 --tied \
    --optimizer adamw --lr 0.001 $few
nearly "1f1b, pp 2, tp 2, dp 2, sp, vocab, zero 1" one_f_one_b --ranks 8 --pp 2 --tp 2 --sp \
    --vocab-parallel --zero 1 $few
nearly "interleaved, pp 2, dp 2, zero 2, v 3" interleaved --pp 2 --zero 2 --chunks 3 --layers 7 --steps 2 \
    --grad-acc 3
nearly "interleaved, pp 2, tp 2, sp, full" interleaved --pp 2 --tp 2 --sp --recompute full $few
nearly "zb_h1, pp 2, dp 2" zero_bubble --pp 2 $few
nearly "zb_h1, pp 2, tp 2, sp, vocab, tied" zero_bubble --pp 2 --tp 2 --sp --vocab-parallel --tied $few
nearly "zb_h2, pp 4, tp 2, selective" zero_bubble --schedule zb_h2 --ranks 8 --pp 4 --tp 2 \
    --recompute selective $few
nearly "zb_v, pp 2, dp 2, zero 2, tied" zero_bubble_v --pp 2 --zero 2 --tied $few
nearly "zb_v, pp 2, tp 3, sp, uneven rows" zero_bubble_v --ranks 6 --pp 2 --tp 3 --kv-heads 3 --ffn 39 \
    --sp $few
nearly "zb_auto, pp 2, tp 2, sp, selective" zero_bubble_auto --pp 2 --tp 2 --sp --recompute selective $few
nearly "dualpipe, pp 2, dp 2, one direction has nothing to do" dualpipe --pp 2 --layers 5 --steps 2 \
    --grad-acc 1
nearly "dualpipe, pp 2, dp 2, zero 2, tied, one direction has nothing to do" dualpipe --pp 2 --zero 2 \
    --tied --layers 5 --steps 2 --grad-acc 1
nearly "dualpipe, pp 4, tp 2, sp, full" dualpipe --ranks 8 --pp 4 --tp 2 --sp --recompute full $few
nearly "dualpipe_v, pp 2, dp 2, zero 2, selective" dualpipe_v --pp 2 --zero 2 --recompute selective $few
nearly "dualpipe_v, pp 2, tp 2, dp 2, sp, zero 2" dualpipe_v --ranks 8 --pp 2 --tp 2 --sp --zero 2 $few
nearly "without a pipeline, zero 3, dp 2" one_f_one_b --ranks 2 --pp 1 --zero 3 $few
# weights are gathered once a step, and freed before the next one
kept="--zero 3 --layers 5 --steps 2 --grad-acc 3"
nearly "1f1b, pp 2, dp 2, zero 3" one_f_one_b --pp 2 $kept
nearly "1f1b, pp 2, dp 3, zero 3, tied, AdamW, bf16" one_f_one_b --ranks 6 --pp 2 --tied --optimizer adamw \
    --lr 0.001 --dtype bf16 $kept
nearly "interleaved, pp 2, dp 2, zero 3, full" interleaved --pp 2 --recompute full $kept
nearly "zb_h1, pp 2, tp 2, dp 2, sp, vocab, zero 3, tied" zero_bubble --ranks 8 --pp 2 --tp 2 --sp \
    --vocab-parallel --tied $kept
nearly "zb_v, pp 2, cp 2, ring, zero 3" zero_bubble_v --pp 2 --cp 2 --context ring $kept
nearly "dualpipe, pp 2, dp 2, zero 3, tied, one direction has nothing to do" dualpipe --pp 2 --tied \
    --zero 3 --layers 5 --steps 2 --grad-acc 1

nearly "1f1b, pp 2, cp 2, ring" one_f_one_b --pp 2 --cp 2 --context ring $few
nearly "1f1b, pp 2, cp 2, ring, a stage without a layer" one_f_one_b --pp 2 --cp 2 --context ring \
    --stage-layers 0,5 $few
nearly "zb_v, pp 2, cp 2, zigzag, full" zero_bubble_v --pp 2 --cp 2 --context zigzag --recompute full $few
nearly "zb_h1, pp 2, cp 2, dp 2, ring, selective, zero 2, tied" zero_bubble --ranks 8 --pp 2 --cp 2 \
    --context ring --recompute selective --zero 2 --tied $few
nearly "dualpipe, pp 2, cp 2, tp 2, all-gather, sp, zero 2" dualpipe --ranks 8 --pp 2 --cp 2 --tp 2 \
    --context all-gather --sp --zero 2 $few
nearly "1f1b, pp 2, cp 2, ulysses, zero 1" one_f_one_b --pp 2 --cp 2 --context ulysses --zero 1 $few
nearly "zb_v, pp 2, cp 2, tp 2, ulysses" zero_bubble_v --ranks 8 --pp 2 --cp 2 --tp 2 --context ulysses \
    --heads 8 --hidden 32 $few
refused "--context ulysses splits the heads" one_f_one_b --ranks 8 --pp 2 --cp 4 --context ulysses

nearly "zb_v, pp 2, tp 2, async" zero_bubble_v --pp 2 --tp 2 --sp --async-tp $few
nearly "dualpipe, pp 2, tp 2, dp 2, async, vocab, zero 3" dualpipe --ranks 8 --pp 2 --tp 2 --sp --async-tp \
    --vocab-parallel --zero 3 $few
nearly "interleaved, pp 2, tp 3, async, uneven rows" interleaved --ranks 6 --pp 2 --tp 3 --kv-heads 3 \
    --ffn 39 --sp --async-tp $few
# With a single rank of tp, --sp would be refused in turn.
refused "--async-tp is an option of async_tensor_parallel, which has nothing to do here: leave it out, or give" \
    one_f_one_b --pp 4 --async-tp
refused "rows are in flight only where each rank has its own: add --sp" one_f_one_b --pp 2 --tp 2 --async-tp

nearly "zb_h1, pp 2, tp 2, zero-r" zero_bubble --pp 2 --tp 2 --zero-r --recompute full $few
nearly "dualpipe, pp 2, tp 3, zero-r, parts that differ, one direction has nothing to do" dualpipe \
    --ranks 6 --pp 2 --tp 3 --kv-heads 3 --ffn 39 --zero-r --recompute full --layers 5 --steps 1 \
    --grad-acc 1
nearly "1f1b, pp 2, tp 2, cp 2, zigzag, zero-r, bf16" one_f_one_b --ranks 8 --pp 2 --tp 2 --cp 2 \
    --context zigzag --zero-r --recompute full --dtype bf16 $few
refused "--zero-r shards the inputs of blocks that full recomputation keeps: add --recompute full" \
    one_f_one_b --pp 2 --tp 2 --zero-r
refused "--zero-r: with --sp each rank of --tp keeps its own rows already" one_f_one_b --pp 2 --tp 2 --sp \
    --zero-r --recompute full
refused "--cp 2: no technique that is on shares work over it; --cp 1 would fit, or --context" one_f_one_b \
    --pp 2 --cp 2

shape="--layers 5 --hidden 24 --heads 6 --kv-heads 2 --ffn 40 --vocab 256"
rest="--seq 15 --micro-batch 2 --dtype f64 --optimizer adamw --lr 0.001 --clip 0.5"
if wanted "resumed"; then
    run "$build/one_f_one_b" $shape $rest --grad-acc 2 --ranks 4 --pp 2 --zero 1 --steps 2 \
        --save "$work/two" &&
        run "$build/zero_bubble_v" --resume "$work/two" $rest --grad-acc 4 --ranks 2 --steps 3 \
            --save "$work/folded" &&
        run "$build/dualpipe" --resume "$work/folded" $rest --grad-acc 4 --steps 4 --save "$work/four" &&
        run "$top/03_tensor_parallel/tensor_parallel" --resume "$work/four" $rest --grad-acc 4 --ranks 2 \
            --steps 5 --save "$work/tp" &&
        run "$top/00_single_gpu/train" --resume "$work/tp" $rest --grad-acc 4 --steps 6 --sample 0 \
            --save "$work/one" &&
        run "$build/interleaved" --resume "$work/one" $rest --grad-acc 4 --ranks 2 --steps 7
    report $? "resumed from pp 2 x dp 2 folded on 2, on DualPipe's 4, by tp, on one device and interleaved"
fi

# Real training: losses, held-out losses and the sampled text are those of one device.
shown() { grep -aE '^step [0-9]+ +held-out' "$out"; grep -a -A 1 '^sample' "$out"; }
real="--steps 4 --eval-every 2 --sample 20"
if wanted "trains"; then
    run "$top/00_single_gpu/train" $shape $rest $real --grad-acc 4 && shown >"$work/alone" &&
        [ "$(wc -l <"$work/alone")" -ge 4 ]
    report $? "trains on one device"
fi
while read -r program flags; do
    wanted "trains" || continue
    run "$build/$program" --no-check $shape $rest $real $flags </dev/null && shown >"$work/ranks" &&
        cmp -s "$work/alone" "$work/ranks"
    report $? "trains, evaluates and generates as one device: $program $flags"
done <<'PROGRAMS'
one_f_one_b --ranks 2 --grad-acc 4
one_f_one_b --ranks 4 --grad-acc 2 --pp 2 --zero 3
one_f_one_b --ranks 4 --grad-acc 4 --pp 2 --tp 2 --sp
interleaved --ranks 2 --grad-acc 4
zero_bubble_v --ranks 2 --grad-acc 4
dualpipe --ranks 2 --grad-acc 4
PROGRAMS

# A schedule that another program has written; files that are no schedule, or not one for this run.
dump() { "$build/schedule" --dump "${@:2}" >"$work/$1.txt" 2>/dev/null; }
dump wide --schedule interleaved --stages 2 --micro-batches 4 --group 4
dump dual --schedule dualpipe --stages 2 --micro-batches 4
dump three --schedule one_f_one_b --stages 3 --micro-batches 4
dump split --schedule one_f_one_b --split --stages 2 --micro-batches 4
loads="--ranks 2 --grad-acc 4 $quick --load"
exactly "loaded: interleaved, breadth-first" one_f_one_b $loads "$work/wide.txt"
if wanted "loaded: interleaved, breadth-first, on the clock"; then
    grep -q '^interleaved on 2 ranks, 4 micro-batches' "$out" &&
        grep -q '^  most passes held .* 7 .* 7 ' "$out"
    report $? "loaded: interleaved, breadth-first, on the clock"
fi
if wanted "loaded: interleaved, breadth-first, beside a schedule that is not"; then
    grep -q '^ *one device  *afab  *interleaved  *formula$' "$out" &&
        grep -q '^  transfers  *-  *8 calls, .* 24 calls, .* 24 calls, ' "$out"
    report $? "loaded: interleaved, breadth-first, beside a schedule that is not"
fi
# Head and embedding are never next to one another, as they are on one device: ZeRO-2 holds less.
dump lone --schedule interleaved --stages 1 --micro-batches 2 --group 2
nearly "loaded: breadth-first on one rank, dp 2, zero 2" one_f_one_b --ranks 2 --pp 1 --zero 2 --grad-acc 2 \
    $quick --load "$work/lone.txt"
exactly "loaded: 1F1B with B and W apart" afab $loads "$work/split.txt"
nearly "loaded: dualpipe" one_f_one_b $loads "$work/dual.txt"
# Rank 1 has the middle stage in both directions, and rank 2 only a stage of the second.
printf '%s\n' '# pp-schedule name=crossing p=3 m=2 stages=3 dirs=2' 'place 0: 0 1 1' 'place 1: 2 1 0' \
    'mbs 0: 0' 'mbs 1: 1' 'rank 0: F0.0.0 F2.1.1 BW2.1.1 BW0.0.0' \
    'rank 1: F1.0.0 F2.0.0 BW2.0.0 BW1.0.0 F1.1.1 BW1.1.1' 'rank 2: F0.1.1 BW0.1.1' >"$work/crossing.txt"
nearly "loaded: a rank has a stage in both directions" afab --ranks 3 --grad-acc 2 $quick --load \
    "$work/crossing.txt"
printf '%s\n' '# pp-schedule name=one_way p=2 m=2 stages=2 dirs=2' 'place 0: 0 1' 'place 1: 1 0' 'mbs 0: 0 1' \
    'mbs 1:' 'rank 0: F0.0.0 F0.1.0 BW0.0.0 BW0.1.0' 'rank 1: F1.0.0 BW1.0.0 F1.1.0 BW1.1.0' >"$work/way.txt"
printf '%s\n' '# pp-schedule name=turned p=1 m=3 stages=1 dirs=1' 'place 0: 0' 'mbs 0: 0 1 2' \
    'rank 0: F0.2.0 F0.0.0 F0.1.0 BW0.0.0 BW0.1.0 BW0.2.0' >"$work/turned.txt"
nearly "loaded: losses are added out of order" afab --ranks 1 --grad-acc 3 $quick --load "$work/turned.txt"
nearly "loaded: a direction without micro-batches" afab --ranks 2 --grad-acc 2 $quick --load "$work/way.txt"
sed -e 's/p=3/p=4/' -e '$a rank 3:' "$work/crossing.txt" >"$work/idle.txt"
refused "--load $work/idle.txt: rank 3 has no stage: each rank needs one" afab --grad-acc 2 --load \
    "$work/idle.txt"
sed 's/BW0.0.0/BX0.0.0/' "$work/wide.txt" >"$work/bad.txt"
sed 's/W0.3.0//' "$work/split.txt" >"$work/unsound.txt"
printf '%s\n' '# pp-schedule name=crossed p=2 m=2 stages=2 dirs=1' 'place 0: 0 1' 'mbs 0: 0 1' \
    'rank 0: F0.0.0 F0.1.0 BW0.1.0 BW0.0.0' 'rank 1: F1.1.0 BW1.1.0 F1.0.0 BW1.0.0' >"$work/crossed.txt"
refused 'rank 1, position 0 (F1.1.0) breaks the rule "messages are received in the order in which they were' \
    afab --ranks 2 --grad-acc 2 --load "$work/crossed.txt"
refused "--load: cannot open $work/none.txt: No such file or directory" one_f_one_b $loads \
    "$work/none.txt"
refused "--load $work/bad.txt: line " one_f_one_b $loads "$work/bad.txt"
refused "no W is left at the end" one_f_one_b $loads "$work/unsound.txt"
refused "is for --pp 2 and --grad-acc 4, and this run has 2 and 3" one_f_one_b --ranks 2 --grad-acc 3 \
    --load "$work/wide.txt"
refused "is for --pp 2 and --grad-acc 4, and this run has 2 and 8" one_f_one_b --ranks 2 --grad-acc 8 \
    --load "$work/wide.txt"
refused "is for --pp 2 and --grad-acc 4, and this run has 4 and 4" one_f_one_b --grad-acc 4 \
    --load "$work/wide.txt"

refuses "zb_v offers no fewer chunks: only interleaved has any" \
    'stage 2 of 4 would have no layer; --layers 4 or more would fit, or fewer --pp$' zero_bubble_v --layers 2 \
    --ranks 2 --pp 2
passes 'two layers are saved, with which a stage would have no layer' one_f_one_b --ranks 2 --layers 2 --steps 1 --no-check \
    --save "$work/two_layers" --save-every 1
refused "stage 2 of 4 would have no layer, as the checkpoint has 2; fewer --pp would fit" zero_bubble_v \
    --ranks 2 --pp 2 --steps 2 --resume "$work/two_layers/step-000001"
refused "would have no layer; --layers 8 or more would fit, or fewer --pp or --chunks" interleaved --layers 2
refused "--stage-layers 5,0,2,2: stage 1 of 4 would have no layer" one_f_one_b --stage-layers 5,0,2,2
refused "--stage-layers 3,3,3,1 add up to 10, and --layers is 9" one_f_one_b --stage-layers 3,3,3,1
huge=9223372036854775807  # twice this is -2 in 64 bits
refused "stage 1 of 4 would have $huge layers, and the model has 9" one_f_one_b \
    --stage-layers 5,$huge,$huge,6
refused "--stage-layers needs a value: 5,4,4,3" one_f_one_b \
    --stage-layers ''
refused "--stage-layers -1,5,5: each of 3 stages needs its number of layers" one_f_one_b --ranks 3 \
    --stage-layers -1,5,5
refused "--stage-layers ,4,5: each of 3 stages needs its number of layers" one_f_one_b --ranks 3 \
    --stage-layers ,4,5
refused "--grad-acc 4097: a schedule has at most 4096 micro-batches" one_f_one_b --grad-acc 4097
refused "--chunks has an effect only with --schedule interleaved: add that, or leave out --chunks" interleaved \
    --ranks 2 --grad-acc 4 --chunks 2 --load "$work/wide.txt"
exactly "loaded: on three ranks, by dualpipe's program" dualpipe --ranks 3 --grad-acc 4 $quick \
    --load "$work/three.txt"
refused "--stage-layers 3,3,3: each of 4 stages needs its number of layers" one_f_one_b --stage-layers 3,3,3
refused "--stage-layers 3,3,x,3: each of 4 stages needs its number of layers" one_f_one_b \
    --stage-layers 3,3,x,3
refused "--schedule dualpipe needs an even --pp" dualpipe --ranks 3
refused "--pp 9 x --chunks 64 is more than 512 stages: --chunks 56 would fit" interleaved --ranks 9 \
    --chunks 64
refused "--chunks has an effect only with --schedule interleaved: add that, or leave out --chunks" one_f_one_b \
    --chunks 2
refused "--schedule and --load are two schedules: give one of them" one_f_one_b --schedule afab \
    --load "$work/wide.txt"
refused "--pp 3 does not divide the 4 ranks" one_f_one_b --pp 3
refused "--tp 3 does not divide" one_f_one_b --ranks 6 --pp 2 --tp 3

run "$build/zero_bubble_v" --ranks 1 --pp 1 --no-check --steps 2 --sample 8 --seq 8 && grep -q '^PASS' "$out"
report $? "one rank that trains for real holds what its schedule says"

# A rank that dies in a step ends all.
if wanted "a rank is killed"; then
    "$build/zero_bubble" --no-check --steps 1000000 --eval-every 0 --sample 0 >"$out" 2>"$err" &
    launcher=$!
    for i in $(seq 100); do grep -q 'step 3/' "$out" && break; sleep 0.1; done
    kill -9 $(ranks_of $launcher 4 | awk "{ print \$NF }")
    wait $launcher 2>/dev/null
    status=$?
    [ $status != 0 ] && [ "$(grep -c . "$err")" = 1 ] && grep -q 'rank [0-3] has died' "$err" &&
        ! grep -q '^PASS' "$out"
    report $? "a rank is killed: $(head -n 1 "$err")"
fi
finish
