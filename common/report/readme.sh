#!/bin/bash
# readme.sh: writes the README's generated parts, each between its two markers: what the commands in it print, run now
# on this machine. `make readme` calls it; `readme.sh map` renews the map and the counts alone, which need no run.
build=${BUILD:-build}
cd "$(dirname "$0")/../.." || exit 2
readme=${README:-README.md}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# fill NAME: replaces what stands between <!-- NAME --> and <!-- /NAME --> by standard input.
fill() {
    cat >"$work/part"
    awk -v name="$1" -v part="$work/part" '
        $0 ~ "<!-- " name " -->" && $0 ~ "<!-- /" name " -->" {  # both on one line: a word in a sentence
            getline word <part
            sub("<!-- " name " -->.*<!-- /" name " -->", "<!-- " name " -->" word "<!-- /" name " -->")
        }
        $0 == "<!-- /" name " -->" { skipping = 0 }
        !skipping
        $0 == "<!-- " name " -->" { skipping = 1; while ((getline line <part) > 0) print line }
    ' "$readme" >"$work/README.md" && cat "$work/README.md" >"$readme"
}

block() { sed "s|$PWD/||g; s/^/    /; s/ *\$//"; }  # as preformatted text, without this machine's folders

common/report/map.sh | fill map
tests/mutants/run --list | wc -l | fill mutants
[ "$1" != map ] || exit 0

run() { echo "\$ $*"; "$@" 2>&1; }
p=$build/00_single_gpu

{ echo '$ make run'; common/report/tour.sh "$build"; } >"$work/tour" || exit 1
block <"$work/tour" | fill tour
run $p/train --model llama-3-8b --dtype bf16 --micro-batch 1 --recompute full --dry-run --steps 1 | block | fill dry

run "$build/02_zero/zero3" --ranks 8 | sed -n '1p;/^Llama 3 8B/,$p' | block | fill zero
run "$build/03_tensor_parallel/async_tensor_parallel" --ranks 8 | sed -n '1p;/^Llama 3 8B/,$p' | block | fill tensor

# row NUMBER CLAIM PROGRAM FLAGS PATTERN: the line of `PROGRAM FLAGS` that has PATTERN.
row() {
    local line
    line=$("$build"/0*/"$3" $4 2>&1 | grep -E -m 1 -- "$5" | sed 's/  */ /g; s/^ //; s/|/\\|/g')
    [ -n "$line" ] || { echo "readme.sh: '$3 $4' prints nothing like '$5'" >&2; exit 1; }
    echo "| $1 | $2 | \`$3${4:+ $4}\` | $line |"
}
{
    echo '| # | the playbook says | command | it prints |'
    echo '|---|---|---|---|'
    row 1 'gbs = mbs x grad_acc; training does not depend on how it is split' grad_accumulation '' '^PASS'
    row 2 'N = h v + L (12 h² + 13 h) + 2 h' memory --claims 'parameters of GPT-3'
    row 2 '16 h² per block with GLU' memory --claims 'block with GLU'
    row 3 '4 N + 4 N + 8 N bytes in f32' memory '--measure' 'gradient bytes'
    row 3 '2 N + 2 N + 4 N + 8 N mixed, + 4 N for f32 gradients' memory '--measure --dtype bf16' 'optimizer bytes'
    row 4 '405B parameters: 6480 GB, 8100 GB with f32 gradients' memory --claims '405B parameters in bf16 and'
    row 5 'L s b h (34 + 5 a s / h)' memory --claims '34 \+ 5 a s / h$|block, 34'
    row 5 'the same for our block, to the byte' memory --measure 'activations kept'
    row 5 'with TP and SP (34 + 5 a s / h) / t; and our block' sequence_parallel '' '^ *TP with SP  +[0-9]'
    row 6 'selective: 70% less activation memory for 2.7% more compute' recompute '' '^GPT-3'
    row 7 'MFU leaves recomputed FLOPs out, HFU counts them' recompute '--model llama-3-8b --dtype bf16 --dry-run' '^full'
    row 8 'forward 2 N, backward 4 N FLOPs a token' train '--dry-run --steps 1' 'estimate'
    row 9 'the first step differs; optimizer state appears after it' profile '' '^PASS'
    row 10 'overlap hides the all-reduce behind backward' ddp_no_sync '--ranks 4' '^overlap|^  overlap'
    row 10 'buckets cost fewer messages' ddp_no_sync '--ranks 4' '^ *bucketed'
    row 10 'no_sync leaves out all but the last' ddp_no_sync '--ranks 4' '^ *no_sync'
    row 11 'ring all-reduce moves 2 (n - 1) / n K per rank' ring_all_reduce '' '^PASS'
    row 12 'the outputs of the collectives of appendix A0' collectives '' '^PASS'
    row 14 '7.5B on 64 ranks: 120, 31.4, 16.6, 1.9 GB' memory --claims 'k = 12, ZeRO-3'
    row 14 '2 P + 6 P + 12 P bytes; their parts by stage' zero3 '--ranks 8' '^ *ZeRO-3 .*3 P'
    row 15 'ZeRO-1 and -2 send 2 P elements, as DDP does' zero2 '' 'elements sent'
    row 15 'ZeRO-3 sends 3 P (here the ends, used once, are much of it)' zero3 '' 'elements sent'
    row 16 '8 x 80 GB fit 6.66B, 16B, 24.6B, 53.3B' memory --claims 'k = 8, ZeRO-3'
    row 17 "ZeRO-1's all-gather hides in the step …" zero1 '--ranks 8' '^ *in step +[0-9]'
    row 17 '… or in the next forward' zero1 '--ranks 8' '^ *in forward +[0-9]'
    row 17 'ZeRO-3 hides until DP is about 512' zero3 '--ranks 8' '8192 tokens a rank'
    row 18 'ZeRO-R: checkpoints cut over tp, and no holes' zero_r '' '^ *cut, all in one tensor +[0-9]'
    row 19 'TP: 2 all-reduces a block in forward, and 2 in backward' tensor_parallel '' 'all-reduces, backward'
    row 20 'TP beyond the K/V heads: copies that stay in sync' tensor_parallel '--ranks 8' 'equal in all copies'
    row 21 'SP: the bytes of the all-reduces, as all-gathers and reduce-scatters' sequence_parallel '' 'forward, bytes'
    row 21 'SP: the largest activation is b s h / tp' sequence_parallel '' 'largest kept with SP'
    row 22 'the embedding: all-reduce, or reduce-scatter to rows' vocab_parallel '' '^  x '
    row 22 'shapes of TP and of TP with SP' sequence_parallel '' '^ *exit TP: out'
    row 23 'TP: throughput a GPU falls where the node ends' tensor_parallel '--ranks 8 --gpus-per-node 4' 'beyond the node'
    row 24 'async TP hides part of what TP exposes' async_tensor_parallel '--ranks 8' 'exposes .* of what tp does'
    row 33 'A3: ZeRO-3 hides from tokens >= (n - 1) / n peak_flops / peak_bw' zero3 '--ranks 8' 'forward, all in one node'
    row 33 'a column linear hides its all-gather if (TP - 1) / (2 h) peak_flops / peak_bw <= 1' async_tensor_parallel '--ranks 8' '^Rows that enter'
} >"$work/claims" || exit 1
fill claims <"$work/claims"
unset OPENBLAS_CORETYPE
{
    echo '$ make bench'
    "$build/tests/bench"
    "$build/tests/bench_ddp"
    "$build/tests/bench_zero"
    "$build/tests/bench_tp"
    for ranks in 2 4 8; do "$build/tests/bench_comm" --ranks $ranks; done
} | grep -E '^(OpenBLAS|bench|.*tokens/s)' | block | fill bench
