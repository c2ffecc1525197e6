#!/bin/bash
# guard.t: no program accesses device memory outside operations and communication: each runs at a tiny size
# with that memory closed to it (common/tensor/guard.h), and would end naming the source line that did. TAP.
# A pattern, such as train*, chooses among the programs. RANKS=8: programs of several ranks run on so many.
. "$(dirname "$0")/tap.sh"
export OMP_NUM_THREADS=1 ULTRASCALE_GUARD=1

# One program for each chapter: these also run in bf16 with tied weights.
sharp=" train ddp_bucketed zero2 zero3 vocab_parallel async_tensor_parallel ulysses dualpipe "
sharp+="expert_parallel "
# Left out on emulated GPUs, where each takes seconds: other pipelines run the same kernels in another order.
# The matrix proves cells of train_5d; five_d_methods and find_config compute nothing, and formats has no
# tensors.
left_out=" matrix five_d_methods find_config formats "
# kernels.t closes the memory to the programs of chapter 07.
[[ $build != *-on-cpu ]] ||
    left_out+=" afab one_f_one_b interleaved zero_bubble zero_bubble_auto dualpipe_v "

passes_at() {  # passes_at PROGRAM FLAGS...: its name and flags are the test's
    local program=$1
    passes "${program##*/} ${*:2}" "${program#$build/}" "${@:2}"
}

for program in "$build"/0[0-9]_*/*; do
    name=${program##*/}
    [ -f "$program" ] && [ -x "$program" ] && [[ $program != */07_* ]] || continue
    [[ "$name " == $only && $left_out != *" $name "* ]] || continue
    help=$("$program" --help)
    has() { [[ $'\n'$help == *$'\n'"  --$1 "* ]]; }
    # A pipeline: two chunks a rank with a layer each, and the fewest micro-batches that DualPipe takes.
    layers=1 steps=2 stages=$((2 * ${RANKS:-2}))
    [[ $program != */05_* ]] || layers=$stages steps=1
    flags=() size=(--hidden 24 --heads 6 --kv-heads 2 --ffn 20 --seq 13)
    # With more ranks, each has a head, and everything that tensor parallelism splits divides evenly.
    [ "${RANKS:-2}" -le 2 ] ||
        size=(--hidden $((4 * RANKS)) --heads $RANKS --kv-heads $RANKS --ffn $((5 * RANKS)) \
            --seq $((4 * RANKS)))
    ! has layers || flags+=(--layers $layers)
    ! has hidden || flags+=("${size[@]}")
    ! has steps || flags+=(--steps $steps)
    [ $layers = 1 ] || ! has grad-acc || flags+=(--grad-acc $stages)
    ! has proof-only || flags+=(--proof-only)
    ! has measure || flags+=(--measure)
    has ranks || [ -z "$RANKS" ] || continue
    ! has ranks || flags+=(--ranks "${RANKS:-2}")
    ! has sample || has no-check || flags+=(--sample 3)
    ! has shown || flags+=(--tp 1 --shown 2)
    [ $name != hybrid_zero ] || flags+=(--shard-ranks 1)
    [ $name != overlapped_experts ] || flags+=(--ep "${RANKS:-2}")
    [ $name != node_limited_routing ] ||
        flags+=(--ep "${RANKS:-2}" --gpus-per-node $(((${RANKS:-2} + 3) / 4)))
    passes_at "$program" "${flags[@]}"
    # Other paths through the core: 16-bit storage with its f32 copies, tied weights, accumulation. Every
    # token goes to all experts, or rounding would decide which.
    [[ $sharp == *" $name "* ]] || continue
    [[ $program != */06_* ]] || flags+=(--experts 2 --top-k 2)
    passes_at "$program" "${flags[@]}" --dtype bf16 --tied
    [ $name = train ] || continue
    passes_at "$program" "${flags[@]}" --save "$work/checkpoint"
    passes_at "$program" --seq 13 --steps 4 --sample 0 --resume "$work/checkpoint"
done
finish
