#!/bin/bash
# experts.t: a mixture of experts, with grouped rows against one token after another, and on several ranks
# against one device: kinds of routing, 1 to 8 ranks, ZeRO, recomputation, experts without tokens; what does
# not fit is refused. TAP. With an argument: only the tests whose names match it.
# needs: build/06_expert_parallel/moe build/06_expert_parallel/expert_parallel
# needs: build/06_expert_parallel/node_limited_routing build/06_expert_parallel/overlapped_experts
# needs: build/06_expert_parallel/load_balance build/00_single_gpu/train
. "$(dirname "$0")/tap.sh"
export OMP_NUM_THREADS=1
build=$build/06_expert_parallel
quick="--layers 2 --steps 2"
one="--layers 1 --steps 1"

# ---- one device: experts that multiply their rows, against tokens that go to their experts ----
verdict='tokens grouped by expert'
passes "moe, SGD over 3 steps" moe
passes "moe, AdamW, tied" moe --optimizer adamw --lr 0.001 --tied $quick
passes "moe, one expert for each token" moe --top-k 1 $quick
passes "moe, all experts for each token" moe --experts 3 --top-k 3 $quick
passes "moe, a single expert" moe --experts 1 --top-k 1 $one
passes "moe, experts without a token" moe --experts 64 --top-k 1 --seq 9 --micro-batch 1 $quick
passes "moe, another width than the MLP's" moe --expert-ffn 23 $one
passes "moe, shared experts" moe --shared-experts 2 --expert-ffn 24 $quick
passes "moe, DeepSeek" moe --moe deepseek --shared-experts 1 --expert-ffn 24 --routed-scale 2.5 $quick
passes "moe, DeepSeek in groups" moe --moe deepseek --experts 12 --expert-groups 4 --groups-kept 2 \
    --top-k 4 $quick
passes "moe, DeepSeek, one expert for each token, f32" moe --moe deepseek --top-k 1 --routed-scale 2.7 \
    --dtype f32 $quick
passes "moe, capacity" moe --capacity 0.7 --seq 29 $quick
passes "moe, capacity 3, as the product 0.14 x 75 x 2 / 7" moe --experts 7 --seq 75 --capacity 0.14 $one
passes "moe, capacity, DeepSeek, shared experts, full" moe --capacity 0.4 --moe deepseek \
    --shared-experts 1 --expert-groups 2 --recompute full $quick
passes "moe, recompute selective, flags in f32" moe --recompute selective --dtype f32 $quick
if wanted "moe, trained for real"; then
    run "$build/moe" --no-check --steps 12 --sample 5 --dtype f32 &&
        grep -q '^PASS moe: held-out loss' "$out" &&
        grep -Eq 'FLOPs per step +predicted +[0-9]+ +measured +[0-9]+ FLOP +equal' "$out"
    report $? "moe, trained for real"
fi
if wanted "moe, capacity, a dry run"; then
    # Each token takes all experts, so whatever the router says, as many rows are dropped as in a dry run.
    shape="--experts 3 --top-k 3 --capacity 0.5 $one"
    kept() { grep 'activations kept' "$out" | grep -Eo '[0-9.]+ kB +[0-9.]+ kB$'; }
    run "$build/moe" $shape
    proof=$(kept)
    run "$build/moe" $shape --dry-run && [ -n "$proof" ] && [ "$proof" = "$(kept)" ]
    report $? "moe, capacity, a dry run keeps the activations of a step that computes"
fi
if wanted "moe, capacity, one token after another on the clock"; then
    clock() { run "$build/moe" $one "$@" && grep 'step on' "$out" | grep -Eo '[0-9.]+ ms' | head -n 1; }
    unlimited=$(clock)
    [ -n "$unlimited" ] && [ "$unlimited" = "$(clock --capacity 1.2)" ]
    report $? "moe, capacity, one token after another on the clock: none is dropped if all are even"
fi
if wanted "moe, capacity, MFU"; then
    run "$build/moe" --no-check --experts 4 --top-k 4 --capacity 0.01 --hidden 256 --ffn 512 --heads 8 \
        --seq 128 --micro-batch 4 --grad-acc 1 $one --sample 0 --dtype f32 &&
        grep -Eq 'MFU [1-9][0-9]\.[0-9]%, HFU [1-9][0-9]\.[0-9]% of' "$out"
    report $? "moe, capacity, MFU counts no dropped row: it is below 100%"
fi
if wanted "parameters of Mixtral 8x7B"; then
    run "$build/moe" --dry-run --model mixtral-8x7b --dtype bf16 --micro-batch 1 --seq 4096 --grad-acc 1 &&
        grep -q '46.70 B parameters' "$out" && grep -q 'a token passes 12.88 B parameters' "$out"
    report $? "parameters of Mixtral 8x7B: 46.7B as published, of which a token passes 12.9B"
fi

if wanted "parameters of DeepSeek-V3's experts"; then
    # 58 blocks of 256 routed experts, a shared one and a router: 656.6 B of its 671 B.
    run "$build/moe" --dry-run --model deepseek-v3 --layers 1 --dtype bf16 --micro-batch 1 --seq 64 &&
        grep -q '256 experts of f=2048, top 8, 1 shared, routed as in DeepSeek-V3' "$out" &&
        grep -q '13.42 B parameters' "$out" && grep -q 'a token passes 2.50 B parameters' "$out"
    report $? "parameters of DeepSeek-V3's experts: a block of them, and what a token passes"
fi

# ---- near ties: where rounding decides, one device takes the experts that the run has taken ----
# ties NAME CHOICES PROGRAM FLAGS…: PASS, with near ties among so many choices: at least one, and below 100.
ties() {
    local name=$1 choices=$2 program=$3
    shift 3
    wanted "$name" || return 0
    run "$build/$program" "$@" && grep -Eq \
        "^PASS $program: .*; [1-9][0-9]? of $choices choices of experts were near ties, decided as in" "$out"
    report $? "$name"
}
# 2 proofs x 2 steps x 16 samples x 31 tokens x 2 blocks
ties "near ties, bf16, one token after another" 3968 moe --dtype bf16 --grad-acc 8 $quick
ties "near ties, bf16, 16 experts, full" 3968 expert_parallel --ranks 2 --dtype bf16 --grad-acc 4 \
    --experts 16 --recompute full $quick
verdict='experts are balanced over ranks'
passes "near ties, f32, DeepSeek in groups, a bias" load_balance --ranks 2 --dtype f32 --moe deepseek \
    --z-loss 0 --expert-groups 4 --groups-kept 2 --balance-bias 0.01 --proof-only $quick

# ---- over ranks ----
verdict='ranks that shard the experts'
verdict='1 rank splits nothing' passes "ep 1 of 1 rank" expert_parallel --ranks 1 --ep 1 --experts 24 $one
for ranks in 2 4 6 8; do
    passes "ep $ranks of $ranks ranks" expert_parallel --ranks $ranks --ep $ranks --experts 24 $one
done
passes "ep 2 of 4 ranks, SGD over 3 steps" expert_parallel
prints "ep 2 of 4 ranks, SGD over 3 steps: its tables" \
    "Rows by the rank that has the token, and the rank whose experts it takes:" \
    "A block of Mixtral 8x7B, 4096 tokens a rank, ep 2, equally many rows to each expert:" \
    "The same where all logits are equal, and every token takes the first 2 experts:" \
    "the busiest rank computes 2.00 times the mean"
if wanted "ep 2 of 4 ranks, all in one node"; then  # in the run above
    awk '/^  all in one node/ { node = $NF } /^  one GPU per node/ { network = $NF }
         END { exit !(node > 0 && node < network / 2) }' "$out"
    report $? "ep 2 of 4 ranks, all in one node: so are the copies of experts that their all-reduce sums"
fi
if wanted "ep 2 of 4 ranks, the rows of its table"; then
    run "$build/expert_parallel" $one && grep -A4 '^Rows by the rank' "$out" >"$work/rows" &&
        awk '/tokens of rank/ { to[0] += $(NF - 1); to[1] += $NF } /the busiest rank/ { busiest = $(NF - 3) }
             END { most = to[0] > to[1] ? to[0] : to[1]
                   exit !(to[0] + to[1] == 2 * 4 * 31 * 2 && busiest == sprintf("%.2f", 2 * most / 496)) }' \
            "$work/rows"
    report $? "ep 2 of 4 ranks, the rows of its table: all choices, by the rank that computes them"
fi
passes "ep 2, another width than the MLP's" expert_parallel --ranks 2 --expert-ffn 23 --proof-only $one
passes "ep 2 of 2 ranks, documents" expert_parallel --ranks 2 --documents 32 $one
verdict='--ep 1 splits nothing' passes "ep 1 of 2 ranks" expert_parallel --ranks 2 --ep 1 $quick
passes "ep 3 of 6 ranks" expert_parallel --ranks 6 --ep 3 --experts 6 $quick
passes "ep 4 of 8 ranks, one expert a rank and a token" expert_parallel --ranks 8 --ep 4 --experts 4 \
    --top-k 1 $one
passes "ep 4, experts without a token" expert_parallel --ep 4 --experts 64 --top-k 1 --seq 9 \
    --micro-batch 1 $one
passes "ep 2, AdamW, tied, 3 micro-batches" expert_parallel --optimizer adamw --lr 0.001 --tied \
    --grad-acc 3 $quick
passes "ep 2, zero 1, AdamW" expert_parallel --zero 1 --optimizer adamw --lr 0.001 $quick
passes "ep 4 of 8 ranks, zero 2, full, 3 micro-batches" expert_parallel --ranks 8 --ep 4 --zero 2 \
    --recompute full --grad-acc 3 $quick
passes "ep 2, full" expert_parallel --recompute full $quick
passes "ep 2, DeepSeek in groups, shared" expert_parallel --moe deepseek --expert-groups 4 --groups-kept 2 \
    --shared-experts 1 --routed-scale 2.5 $quick
passes "ep 4 within dp 2 x cp 2" expert_parallel --cp 2 --dp 2 --ep 4 --seq 32 $quick
passes "ep 2, cp 4, ring" expert_parallel --cp 4 --ep 2 --seq 32 $one
passes "ep 4, cp 2 of 8 ranks, all-gather, zero 2, full" expert_parallel --ranks 8 --cp 2 --ep 4 --seq 32 \
    --context all-gather --zero 2 --recompute full $one
passes "ep 2, cp 3 of 6 ranks" expert_parallel --ranks 6 --cp 3 --seq 36 $one
passes "ep 4, capacity, zero 1, 3 micro-batches" expert_parallel --ep 4 --capacity 0.6 --zero 1 \
    --grad-acc 3 --proof-only $quick
passes "ep 2, f32" expert_parallel --dtype f32 $quick

# ---- balance: the loss on each sequence is the same on any number of ranks. Its effect on a router is
# trained only once: the flags of the run that is compared with one device do not change it ----
verdict='experts are balanced over ranks'
passes "balance, 4 ranks, SGD over 3 steps" load_balance
prints "balance, 4 ranks, SGD over 3 steps: its tables" \
    "On a made-up corpus of 64 symbols, one device, 120 steps; means of the last 40:" \
    "Busiest expert / mean in single steps:"
if wanted "balance, 4 ranks, SGD over 3 steps, in single steps"; then  # in the run above
    grep -A5 '^Busiest expert' "$out" | tail -n 4 >"$work/busiest"
    [ "$(awk '{ print $(NF - 5) }' "$work/busiest" | sort -u | wc -l)" = 1 ] &&
        awk '{ rows++; if ($NF < 1) bad = 1 } END { exit bad || rows != 4 }' "$work/busiest"
    report $? "balance, 4 ranks, SGD over 3 steps, in single steps: the first is before any update"
fi
passes "balance, 3 ranks, auxiliary loss alone, 1 micro-batch" load_balance --ranks 3 --ep 3 --experts 6 \
    --z-loss 0 --balance-bias 0 --grad-acc 1 --proof-only $quick
passes "balance, DeepSeek, zero 3" load_balance --moe deepseek --zero 3 --layers 1 --steps 2 --proof-only
passes "balance, DeepSeek, full, zero 2" load_balance --ranks 2 --moe deepseek --z-loss 0 --aux-loss 0.1 \
    --expert-groups 2 --zero 2 --recompute full --layers 1 --steps 3 --proof-only
verdict='one step counted'
passes "ep 8, a dry run of Mixtral 8x7B" expert_parallel --ranks 8 --ep 8 --model mixtral-8x7b \
    --dtype bf16 --seq 4096 --micro-batch 1 --zero 1 --dry-run
verdict=''
if wanted "ep 2, trained for real"; then
    shape="--no-check --steps 10 --sample 20 --eval-every 5 --dtype f32"
    held_out() { grep -o 'held-out loss [0-9.]* -> [0-9.]* nats in .* steps' "$out"; }
    run "$build/moe" $shape --micro-batch 4 --grad-acc 2
    alone=$(held_out)
    run "$build/expert_parallel" $shape --ranks 2 && [ -n "$alone" ] && [ "$alone" = "$(held_out)" ]
    report $? "ep 2, trained for real: the held-out loss of one device"
fi

verdict='held-out loss'
passes "ep 2, an evaluation's rows are not among those kept" expert_parallel --no-check --steps 1 --sample 0 \
    --eval-every 1 --ranks 2 --dtype f32 --seq 7 --micro-batch 1 --grad-acc 1 --top-k 1
verdict=''
if wanted "a folder of experts"; then
    run "$build/moe" --layers 2 --steps 2 --save "$work/one" &&
        grep -q '"num_local_experts": 8' "$work"/one/step-000002/config.json &&
        run "$build/expert_parallel" --resume "$work/one" --ranks 2 --grad-acc 1 --steps 3 \
            --save "$work/three" &&
        run "$build/moe" --resume "$work/three" --steps 4
    report $? "a folder of experts: one device's on 2 ranks, and theirs on one device"
fi

refused "dry run, step 1: route_order: 67108864 tokens of 64 experts each" moe --dry-run $one --grad-acc 1 \
    --seq 1048576 --micro-batch 64 --experts 64 --top-k 64
refused "room for rows of a whole sequence, which --cp 2 splits: --capacity 0 would fit, or --cp 1" \
    expert_parallel --cp 2 --seq 32 --capacity 1
refused "which --tp 2 --sp splits: --capacity 0 would fit, or --tp 1" expert_parallel \
    --tp 2 --sp --seq 32 --capacity 1
# Flags that would be ignored.
shown='says what is shown after the proof'
refused "--proof-only $shown, and --no-check leaves that out" load_balance --no-check --proof-only
refused "--proof-only $shown, and --dry-run leaves that out" load_balance --dry-run --proof-only
idle='which has nothing to do here: leave it out, or give'
refused "--schedule is an option of pipeline, $idle --pp 2" expert_parallel --schedule zb_h1
refused "--no-prefetch is an option of zero3, $idle --zero 3" expert_parallel --zero 2 --no-prefetch
refused "--vocab-parallel is an option of vocab_parallel, $idle --tp 2" expert_parallel --vocab-parallel
refused "--layout is an option of ring_attention, $idle --cp 2" expert_parallel --layout striped
refused "--top-k 9 is more than --experts 8" moe --top-k 9
refused "--expert-groups 2 and --routed-scale 1 are those of --moe deepseek: with --moe mixtral both are 1" \
    moe --expert-groups 2
refused "--expert-groups 3 does not divide --experts 8" moe --moe deepseek --expert-groups 3
refused "--groups-kept 3 is more than --expert-groups 2" moe --moe deepseek --expert-groups 2 \
    --groups-kept 3
refused "--top-k 4 is more than 2, the number of experts of --groups-kept 1 of" moe --moe deepseek \
    --expert-groups 4 --top-k 4
refused "--ep 4 does not divide --experts 6: --experts 8 would fit" expert_parallel --ep 4 --experts 6
refused "--ep 3 does not divide the 4 ranks of --dp x --cp x --tp: --ep 1, 2 would fit" expert_parallel \
    --ep 3 --experts 6
refused "--seq 31 must be a multiple of it" expert_parallel --cp 2
for program in moe expert_parallel node_limited_routing load_balance overlapped_experts; do
    refused "$program shows what it does with experts, and --experts 0 has none" $program --experts 0
done
refused "--z-loss is of a softmax, and --moe deepseek has sigmoids; --z-loss 0 would fit" load_balance \
    --moe deepseek --z-loss 0.001
refused "a folder has no place for it: --balance-bias 0 would fit" load_balance --save "$work/balanced"
for from in --init --resume; do
    refused "a folder has no place for it: --balance-bias 0 would fit" load_balance $from tests/fixtures/mixtral_tied_bf16
done
refused "and --capacity drops some: --balance-bias 0 would fit" load_balance --capacity 1
refused "which have no place for --moe deepseek" moe --moe deepseek --save "$work/deepseek"
refused "no place for --moe deepseek or --shared-experts" moe --shared-experts 1 --save "$work/shared"
refused "--model mixtral-8x7b has experts, and this program has only dense layers" \
    ../00_single_gpu/train --model mixtral-8x7b
refused "tests/fixtures/mixtral_tied_bf16 has experts, and this program has only dense layers" \
    ../00_single_gpu/train --init tests/fixtures/mixtral_tied_bf16
finish
