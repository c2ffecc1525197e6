#!/bin/bash
# readme.sh [map | chapters | pages]: writes what the pages show of programs, sources and tests, so that
# nothing of it is typed by hand. `make readme` calls it. A block stands between two markers:
#
#     <!-- run COMMAND | from PATTERN -->  what COMMAND prints from PATTERN on, its verdict left out:
#     <!-- /run -->                        counts and the model clock, which are the same on every machine
#     <!-- dated COMMAND -->               the same for what the wall clock, the text to train on or
#     <!-- /dated -->                      the order of sums decides: with the date and the machine
#     <!-- map --> … <!-- /map -->         and other names: made below
#
# `map` renews what needs no run: the map, the files of the core, the number of mutants; `chapters` these,
# the blocks above and the claims; `pages` all but the benchmarks. PAGES is a folder with copies of the
# pages to write to instead (tests/programs/readme.t).
export LC_ALL=C
build=${BUILD:-build}
cd "$(dirname "$0")/../.." || exit 2
pages=${PAGES:-.}
work=$(mktemp -d) || exit 2
trap 'rm -rf "$work"' EXIT

# fill PAGE NAME: replaces what stands between <!-- NAME --> and <!-- /NAME --> in PAGE by standard input.
fill() {
    cat >"$work/part"
    awk -v name="$2" -v part="$work/part" '
        $0 ~ "<!-- " name " -->" && $0 ~ "<!-- /" name " -->" {  # both on one line: a word in a sentence
            getline word <part
            sub("<!-- " name " -->.*<!-- /" name " -->", "<!-- " name " -->" word "<!-- /" name " -->")
        }
        $0 == "<!-- /" name " -->" { skipping = 0 }
        !skipping
        $0 == "<!-- " name " -->" { skipping = 1; while ((getline line <part) > 0) print line }
    ' "$pages/$1" >"$work/page" && cat "$work/page" >"$pages/$1"
}

block() { sed "s|$PWD/||g; s/^/    /; s/ *\$//"; }  # as preformatted text, without this machine's folders
machine() {
    echo "$(date +%F), $(sed -n 's/^model name.*: //p' /proc/cpuinfo | head -n 1), $(nproc) cores"
}

# Filters of a block's command.
from() { sed -n "/$1/,\$p"; }
until_line() { sed "/$1/,\$d"; }
lines() { grep -E -- "$1"; }

# printed COMMAND: what it prints; run once, however many blocks and rows show a part of it.
printed() {
    local kept
    kept=$work/$(echo "$1" | tr -c 'a-z0-9\n' _)
    [ -e "$kept" ] || eval "${1/#build\//$build/}" </dev/null >"$kept" 2>&1 || {
        echo "readme.sh: '$1' has failed" >&2
        rm -f "$kept"
        return 1
    }
    cat "$kept"
}

# fill_runs PAGE: runs the command of each of its blocks.
fill_runs() {
    local line kind command filter comment here end=''
    while IFS= read -r line; do
        [ -z "$end" ] || [ "$line" = "$end" ] || continue
        end=''
        printf '%s\n' "$line"
        [[ $line =~ ^'<!-- '(run|dated)' '(.*)' -->'$ ]] || continue
        kind=${BASH_REMATCH[1]} command=${BASH_REMATCH[2]} end="<!-- /${BASH_REMATCH[1]} -->"
        filter=${command#"${command%% | *}"} command=${command%% | *}
        [ $kind = run ] && comment='' here='/^OpenBLAS /d; /^[0-9]* ranks* on /d' ||
            comment="   # $(machine)" here=''
        printed "$command" >"$work/all" || return 1
        eval "cat${filter:-}" <"$work/all" | sed "/^PASS /d; $here" | cat -s | sed '${/^$/d}' >"$work/some"
        [ -s "$work/some" ] || { echo "readme.sh: $1: '$command$filter' leaves nothing" >&2; return 1; }
        { echo "\$ $command$comment"; cat "$work/some"; } | block
    done <"$pages/$1" >"$work/filled"
    [ -z "$end" ] && cat "$work/filled" >"$pages/$1"
}

common/report/map.sh | fill README.md map
common/report/map.sh core | fill common/README.md core
tests/mutants/run --list | wc -l | fill README.md mutants
[ "$1" != map ] || exit 0

for page in README.md 0[0-9]_*/README.md; do
    fill_runs "$page" || exit 1
done

# Each schedule as the programs run it on 4 ranks, with a layer of Llama 3 8B a stage.
{
    echo '| | own clock, ms | run, ms | bubble | held |'
    echo '|---|---|---|---|---|'
    for schedule in afab one_f_one_b interleaved zb_h1 zb_h2 zb_v zb_auto dualpipe dualpipe_v; do
        case $schedule in
            zb_h?) program="zero_bubble --schedule $schedule" ;;
            zb_*) program=zero_bubble_${schedule#zb_} ;;
            *) program=$schedule ;;
        esac
        printed "build/05_pipeline_parallel/$program" | awk -v name=$schedule '
            /own clock  / { own = $6 }
            /^  run / { run = $2; bubble = $NF }
            /^  most passes held/ { held = $11 }
            END { print "| " name " | " own " | " run " | " bubble " | " held " |" }'
    done
} | fill 05_pipeline_parallel/README.md pipeline

# figure FILE PROGRAM FLAGS…: a picture that the program draws of its own run; the last flag is the one that
# names it.
figure() {
    local file=$pages/$1 program=$2
    shift 2
    mkdir -p "$(dirname "$file")"
    "$build/$program" "$@" "$file" </dev/null >"$work/figure" 2>&1 || { cat "$work/figure" >&2; exit 1; }
}
figure 00_single_gpu/memory.svg 00_single_gpu/profile --svg
figure 01_data_parallel/timeline.svg 01_data_parallel/ddp_no_sync --ranks 4 --timeline-svg
figure 02_zero/memory.svg 02_zero/zero3 --ranks 8 --svg
figure 02_zero/timeline.svg 02_zero/zero3 --ranks 8 --timeline-svg
figure 03_tensor_parallel/split.svg 03_tensor_parallel/tensor_parallel --ranks 4 --svg
figure 03_tensor_parallel/timeline.svg 03_tensor_parallel/async_tensor_parallel --ranks 8 --timeline-svg
figure 04_context_parallel/timeline.svg 04_context_parallel/zigzag_ring_attention --timeline-svg
figure 06_expert_parallel/timeline.svg 06_expert_parallel/overlapped_experts --ranks 8 --ep 8 --layers 1 \
    --steps 1 --timeline-svg
figure 07_kernels/timeline.svg 07_kernels/flash_attention_3 --timeline-svg
figure 08_mixed_precision/five_d.svg 08_mixed_precision/five_d_methods --svg
figure 08_mixed_precision/curves.svg 08_mixed_precision/find_config --curves
figure 08_mixed_precision/heat_map.svg 08_mixed_precision/find_config --heat-map
figure 08_mixed_precision/points.svg 08_mixed_precision/formats --svg
figure 08_mixed_precision/rates.svg 08_mixed_precision/fp8 --ranks 1 --curves
for schedule in afab one_f_one_b interleaved zb_h1 zb_h2 zb_v zb_auto dualpipe dualpipe_v; do
    figure 05_pipeline_parallel/$schedule.svg 05_pipeline_parallel/schedule \
        --schedule $schedule --stages 4 --micro-batches 8 --svg
done

# row NUMBER CLAIM PROGRAM FLAGS PATTERN: the line of `PROGRAM FLAGS` that has PATTERN.
row() {
    local line
    line=$(printed "$(ls 0*/"$3".c* | sed 's|^|build/|; s|\.cu*$||')${4:+ $4}" | grep -E -m 1 -- "$5" |
        sed -E 's/  +/  /g; s/^ +//; s/ +$//; s/ \((exact|reas).*//; s/\|/\\|/g')
    [ -n "$line" ] || { echo "readme.sh: '$3 $4' prints nothing like '$5'" >&2; exit 1; }
    echo "| $1 | $2 | \`$3${4:+ $4}\` | \`$line\` |"
}
{
    echo '| # | the playbook says | command | it prints |'
    echo '|---|---|---|---|'
    row 1 'gbs = mbs x grad_acc; training does not depend on how it is split' grad_accumulation '' '^PASS'
    row 2 'Psi = h v + L (12 h² + 13 h) + 2 h' memory --claims 'parameters of GPT-3'
    row 2 '16 h² per block with GLU' memory --claims 'block with GLU'
    row 3 '4 Psi + 4 Psi + 8 Psi bytes in f32' memory '--measure' 'gradient bytes'
    row 3 '2 Psi + 2 Psi + 4 Psi + 8 Psi mixed, + 4 Psi for f32 gradients' memory '--measure --dtype bf16' \
        'optimizer bytes'
    row 4 '405B parameters: 6480 GB, 8100 GB with f32 gradients' memory \
        --claims '405B parameters in bf16 and'
    row 5 'L s b h (34 + 5 a s / h)' memory --claims '34 \+ 5 a s / h$|block, 34'
    row 5 'the same for our block, to the byte' memory --measure 'activations kept'
    row 5 'with TP and SP (34 + 5 a s / h) / t; and our block' sequence_parallel '' '^ *TP with SP  +[0-9]'
    row 6 'selective: 70% less activation memory for 2.7% more compute' recompute '' '^GPT-3'
    row 6 '… often faster as well: flash attention recomputes scores, without a trip to memory' recompute '' \
        '^ +8192 '
    row 7 'MFU leaves recomputed FLOPs out, HFU counts them' recompute \
        '--model llama-3-8b --dtype bf16 --dry-run' '^full'
    row 8 'forward 2 Psi, backward 4 Psi FLOPs a token' train '--dry-run --steps 1' 'estimate'
    row 9 'the first step differs; optimizer state appears after it' profile '' '^PASS'
    row 10 'overlap hides the all-reduce behind backward' ddp_no_sync '--ranks 4' '^ *overlap'
    row 10 'buckets cost fewer messages' ddp_no_sync '--ranks 4' '^ *bucketed'
    row 10 'no_sync leaves out all but the last' ddp_no_sync '--ranks 4' '^ *no_sync'
    row 11 'ring all-reduce moves 2 (N - 1) / N K per rank' ring_all_reduce '' \
        'both, 2 .*360132|both, 2 .*720264'
    row 12 'the outputs of the collectives of appendix A0' collectives '' '^PASS'
    row 13 '4M tokens of 4096: 1024 = mbs 2 x 128 GPUs x 4 = mbs 2 x 512 x 1' find_config '--rules' \
        '^ *1024 = '
    row 14 '7.5B on 64 ranks: 120, 31.4, 16.6, 1.9 GB' memory --claims 'k = 12, ZeRO-3'
    row 14 '(2 + 2 + 12) Psi / N bytes; 6 for 2 with f32 gradients' zero3 '--ranks 8' '^ *ZeRO-3 .*3 Psi'
    row 15 'ZeRO-2 sends 2 Psi elements, as DDP does' zero3 '--ranks 8' '^ *ZeRO-2 .*2 Psi'
    row 15 'ZeRO-3 sends 3 Psi (the ends, used once, fewer)' zero3 '--ranks 8' '^ *ZeRO-3 .*3 Psi'
    row 15 'ZeRO-3 gathers every unit twice but the two ends, U = L + 2 units: 2 U - 2 calls (ZeRO-2: U)' \
        zero3 '--ranks 8' '^  all_gather'
    row 16 '8 x 80 GB fit 6.66B, 16B, 24.6B, 53.3B' memory --claims 'k = 8, ZeRO-3'
    row 17 "ZeRO-1's all-gather hides in the step …" zero1 '--ranks 8' '^ *in step +[0-9]'
    row 17 '… or in the next forward' zero1 '--ranks 8' '^ *in forward +[0-9]'
    row 17 'ZeRO-3 hides until DP is about 512' zero3 '--ranks 8' 'hidden up to DP = '
    row 17 '… and a GPU loses throughput from then on' find_config '--rules' 'ZeRO-3 has lost'
    row 17 '… with DP as well, at constant memory' find_config '--rules' 'dp has lost'
    row 18 'ZeRO-R: checkpoints sharded over tp, and no holes' zero_r '' \
        '^ *sharded, all in one tensor +[0-9]'
    row 19 'TP: 2 all-reduces a block in forward, and 2 in backward' tensor_parallel '' \
        'all-reduces, backward'
    row 20 'TP beyond the K/V heads: copies that stay in sync' tensor_parallel '--ranks 8 --verbose' \
        'equal in all copies'
    row 21 'SP: the bytes of the all-reduces, as all-gathers and reduce-scatters' sequence_parallel '' \
        'forward, bytes'
    row 21 'SP: the largest activation of width h is b s h / tp (of width f: b s f / tp)' \
        sequence_parallel '' 'kept with SP'
    row 22 'the embedding: all-reduce, or reduce-scatter to rows' vocab_parallel '' '^  x '
    row 22 'shapes of TP and of TP with SP' sequence_parallel '' '^ *exit TP: out'
    row 23 'TP: throughput a GPU falls where the node ends' tensor_parallel '--ranks 8 --gpus-per-node 4' \
        'beyond the node'
    row 23 '… 43% from one node to two, where pp loses less (14%: claim 29)' find_config '--rules' \
        'from one node to two: tp'
    row 24 'async TP hides part of what TP exposes' async_tensor_parallel '--ranks 8' \
        'exposes .* of what tp does'
    row 25 'ring: cp - 1 hops, a chunk of K/V in flight and one received' ring_attention '--ranks 4' \
        'peak of buffers, forward'
    row 25 'all-gather: K/V of all ranks at once' all_gather_attention '--ranks 4' \
        'peak of buffers, forward'
    row 25 'zig-zag: every rank computes as much, within one block' zigzag_ring_attention '' \
        '^ *zigzag +[0-9]+ +[0-9]+ +1'
    row 26 'zig-zag about 1.67 times as fast as the plain ring, forward and backward' \
        zigzag_ring_attention '' '^ *zigzag +[0-9.]+ +[0-9.]+x'
    row 27 'naive: a bubble of p - 1 times the work' schedule '--schedule afab --micro-batches 1' \
        '^makespan'
    row 27 '1F1B: a bubble of (p - 1) / m, and p micro-batches held' schedule '' '^ *one_f_one_b +[0-9]'
    row 27 'm = p - 1 micro-batches: the bubble takes as long as the work' schedule \
        '--schedule one_f_one_b --stages 8 --micro-batches 7' '^makespan'
    row 27 'interleaved: (p - 1) / (v m), v times the messages' schedule '' '^ *interleaved +[0-9]'
    row 27 '… with p = 8 and m = 8 micro-batches, for v = 1, 2, 4, 8 …' schedule '' '^ *8 +87'
    row 27 '… and with m = 4, less than p' schedule '' '^ *4 +175'
    row 28 "ZB-H1: a third of 1F1B's bubble (90) if F = B = W" schedule \
        '--schedule zb_h1 --forward 10 --backward 10 --weight 10' '^makespan'
    row 28 'ZB-H2: no bubble as a period if F = B = W, at about twice the memory' schedule \
        '--schedule zb_h2 --forward 10 --backward 10 --weight 10' '^period'
    row 28 "DualPipe: (p / 2 - 1) (F&B + B - 3 W), two copies of the weights" schedule \
        '--schedule dualpipe --forward 10 --backward 10 --weight 10' '^makespan'
    row 29 'bandwidth of all-reduce, all-gather and reduce-scatter from 1 node …' collectives '' '^ *1 +8 '
    row 29 '… to 64' collectives '' '^ *64 +512 '
    row 29 'PP from 8 to 16 GPUs, over two nodes: 14% less a GPU with few micro-batches …' one_f_one_b \
        '--ranks 16 --layers 16 --steps 1' '^ *pp, m = 7'
    row 29 '… where TP loses 43%' one_f_one_b '--ranks 16 --layers 16 --steps 1' '^ *tp, m'
    row 30 'EP: k hidden states of a token, both ways, both passes, by all-to-all' expert_parallel \
        '--ranks 8 --ep 8' 'k hidden states of a token'
    row 30 'auxiliary loss and bias balance the experts' load_balance '--ranks 2' '^ *bias 0.02'
    row 30 'at most M nodes a token, DeepSeek-V3 on 64 ranks: sent without the limit …' overlapped_experts \
        '--ranks 8 --ep 8 --layers 1 --steps 1' '^ *plain, two in flight'
    row 30 '… and in two hops' overlapped_experts '--ranks 8 --ep 8 --layers 1 --steps 1' \
        '^ *two hops, two in flight'
    row 30 'Mixtral 8x7B: 46.7B parameters …' moe '--model mixtral-8x7b --dtype bf16 --dry-run' '46.70 B'
    row 30 '… of which a token passes 12.9B' moe '--model mixtral-8x7b --dtype bf16 --dry-run' \
        'a token passes 12.88 B'
    row 31 'ZeRO-3 stores a part of every layer, a pipeline some layers whole …' five_d_methods '' \
        '^ *a rank stores'
    row 31 '… one has weights in flight …' five_d_methods '' '^ *weights and gradients sent'
    row 31 '… the other activations' five_d_methods '' '^ *activations and their'
    row 31 'what each method shards: TP weights and activations …' five_d_methods '' '^ *TP, SP'
    row 31 '… CP activations' five_d_methods '' '^ *CP '
    row 32 'below 10B: a single technique on 8 GPUs' find_config '--rules' 'holds: below 10B'
    row 32 '10B to 100B: TP=8 with PP, TP=8 with ZeRO-3, or ZeRO-3 alone' find_config '--rules' \
        'holds: 10B to 100B'
    row 32 'from 512 GPUs on combine ZeRO-3 with TP or PP (1M tokens a step; with 4M, ZeRO-3 alone is fastest)' \
        find_config '--rules' 'holds: at 512 GPUs'
    row 32 'from 1024 on TP=8, ZeRO-2 and PP' find_config '--rules' 'holds: at 1024 GPUs'
    row 32 'very long sequences: CP …' find_config '--rules' 'holds: very long sequences'
    row 32 '… across nodes' find_config '--rules' 'holds: ... across nodes'
    row 32 '… experts: EP' find_config '--rules' 'holds: experts want ep'
    row 32 'few GPUs: full recomputation …' find_config '--rules' 'holds: few GPUs'
    row 32 '… gradient accumulation' find_config '--rules' 'holds: ... and accumulation'
    row 32 'a smaller batch: less DP, in favour of others' find_config '--rules' 'holds: a smaller batch'
    row 32 "TP up to the node's size" find_config '--rules' 'holds: tp up to'
    row 32 'more DP with ZeRO-3, keeping the batch' find_config '--rules' 'holds: more dp with ZeRO-3'
    row 32 "where DP's communication is the bottleneck, PP" find_config '--rules' 'holds: where dp'
    row 33 'A3: when the gradients of DP hide, by formula and by the clock' find_config '--rules' \
        '^ *DP 8, gradients'
    row 33 '… the gathers of ZeRO-3, over nodes' find_config '--rules' '^ *ZeRO-3 over 64'
    row 33 "… a column linear's of TP" find_config '--rules' '^ *TP 8, a column linear'
    row 33 '… a message of PP' find_config '--rules' '^ *PP, a message across'
    row 33 'A3: ZeRO-3 hides from tokens >= (N - 1) / N peak_flops / peak_bw' zero3 '--ranks 8 --verbose' \
        'forward, all in one node'
    row 33 'a column linear hides its all-gather if (TP - 1) / (2 h) peak_flops / peak_bw <= 1; in bytes of bf16, / h' \
        async_tensor_parallel '--ranks 8' '^The all-gather of rows'
    row 34 'coalescing: about a tenth of the time; 33 sectors a step become 5' coalescing '' '^by y takes'
    row 34 '… a strided product reaches little of the GPU' coalescing '' '^matmul by x'
    row 34 'tiling takes 43% less time' tiling '' '^tiles of 32 take'
    row 34 'coarsening: fewer loads from shared memory' coarsening '' '^8 x 8'
    row 35 'divergence serialises a warp' divergence '' '^branch by lane'
    row 35 'fusion saves round trips to memory' fused_elementwise '' '^fused'
    row 35 '… of the residual and RMSNorm, both ways' fused_norm '' '^PASS'
    row 35 '… and of the logits, of which there is no copy' fused_cross_entropy '' '^kept'
    row 36 'FlashAttention never stores S or P: memory linear in s' flash_attention_1 '' '^flash .*MB .*MB'
    row 36 '… where stored scores are quadratic' flash_attention_1 '' \
        '^scores stored .*GB .*[0-9]\.[0-9]+ +[0-9.]+$'
    row 36 '… and backward computes them again' flash_attention_1_backward '' '^kept of forward'
    row 36 '… FlashAttention-2: fewer exponentials, other FLOPs and bytes' flash_attention_2 '' \
        '^flash 2 .*GB .*MB'
    row 37 '7 numbers between 1 and 2 in e4m3' formats '' '^e4m3 +0.125 +7'
    row 37 '3 in e5m2' formats '' '^e5m2 +0.25 +3'
    row 37 'epsilon: 1.19e-7 in float32, about 10^-3 in float16 …' formats '' '^float16 +0.000977'
    row 37 '… and 10 times as much in bfloat16' formats '' '^bfloat16 +0.00781'
    row 38 'masters: updates below half a step of float16 vanish' fp16 '' 'gains that move without'
    row 38 'loss scaling: without it small gradients become 0 …' fp16 '' '^  none +0'
    row 38 '… an overflow anywhere skips the step everywhere' fp16 '' 'ranks that skip'
    row 38 'sums in f16 overflow at smaller scales than in f32, and are off' fp16 '' '^  f16 +[0-9]+ '
    row 39 'bytes per parameter: 20 in bf16 …' fp8 '--ranks 1' '^  bf16 .* 20$'
    row 39 '… 16 without f32 sums …' fp8 '--ranks 1' '^  bf16, sums'
    row 39 '… 16 by Transformer Engine …' fp8 '--ranks 1' '^  te-delayed .* 16$'
    row 39 '… 9 by FP8-LM …' fp8 '--ranks 1' '^  fp8-lm .* 9$'
    row 39 '… 15 by DeepSeek-V3 …' fp8 '--ranks 1' '^  deepseek .* 15$'
    row 39 '… 10 by nanotron' fp8 '--ranks 1' '^  nanotron .* 10$'
    row 40 'outliers spoil a scale of the tensor …' fp8 '--ranks 1' '^  te-current +0.*0.9'
    row 40 '… and not those of tiles' fp8 '--ranks 1' '^  deepseek +0.037'
    row 40 'training with an outlier: a scale of the tensor fails …' fp8 '--ranks 1' \
        '^  te-delayed +[0-9.]+ +[0-9.]+ +[+]'
    row 40 '… and tiles do not' fp8 '--ranks 1' '^  deepseek +[0-9.]+ +[0-9.]+ +[-+]'
} >"$work/claims" || exit 1
fill tests/CLAIMS.md claims <"$work/claims"
[ "$1" != chapters ] || exit 0

common/report/tour.sh "$build" >"$work/tour" || { cat "$work/tour"; exit 1; }
{
    echo "\$ make run   # $(machine)"
    grep -m 1 '^L=' "$work/tour"
    grep 'held-out loss' "$work/tour" | tail -n 2
    grep -E '^PASS (ddp_overlap|zero3|one_f_one_b|train_5d):' "$work/tour" |
        sed 's/ (.*//; s/$/ …/'
    tail -n 1 "$work/tour"
} | block | fill README.md tour

[ "$1" != pages ] || exit 0

unset OPENBLAS_CORETYPE
{
    echo "\$ make bench   # $(machine)"
    BUILD=$build tests/bench/run
    echo
    echo "\$ make bench-collectives"
    for ranks in 2 4 8; do "$build/tests/bench_comm" --ranks $ranks --sweep; done | grep '^bench'
} | block | fill tests/bench/README.md bench
