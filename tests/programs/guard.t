#!/bin/bash
# guard.t: no program touches device memory outside operations and communication: each runs at a tiny size with the
# memory closed to it (common/tensor/guard.h), and would end with the line of its source that did. TAP.
# With an argument: only the programs whose names match it. RANKS=8: those of several ranks, on so many.
cd "$(dirname "$0")/../.." || exit 2
unset OPENBLAS_CORETYPE
export OMP_NUM_THREADS=1 ULTRASCALE_GUARD=1
build=${BUILD:-build}
out=$(mktemp)
trap 'rm -rf "$out"*' EXIT
count=0 failed=0

# passes PROGRAM FLAGS…: exit status 0 and a PASS verdict within a minute.
passes() {
    local program=$1 name
    shift
    name=$(basename "$program")
    count=$((count + 1))
    if timeout -k 5 60 "$program" "$@" >"$out" 2>&1 && grep -q "^PASS $name: " "$out"; then
        echo "ok $count - $name $*"
    else
        echo "not ok $count - $name $*: $(grep "^$name: " "$out" | head -n 1)"
        tail -n 12 "$out" | sed 's/^/#   /'
        failed=1
        [ -z "$MUTANT" ] || exit 1  # one red is all that a mutant needs
    fi
}

for program in "$build"/0[0-9]_*/*; do
    [ -f "$program" ] && [ -x "$program" ] && [[ $(basename "$program") == ${1:-*} ]] || continue
    help=$("$program" --help)
    has() { grep -q "^  --$1 " <<<"$help"; }
    flags=()
    ! has layers || flags+=(--layers 1)
    ! has hidden || flags+=(--hidden 24 --heads 6 --kv-heads 2 --ffn 20 --seq 13)
    ! has steps || flags+=(--steps 2)
    ! has measure || flags+=(--measure)
    has ranks || [ -z "$RANKS" ] || continue
    ! has ranks || flags+=(--ranks "${RANKS:-2}")
    ! has sample || flags+=(--sample 3)
    passes "$program" "${flags[@]}"
    # Other ways through the core: 16-bit storage with its f32 copies, tied weights, accumulation.
    ! has tied || passes "$program" "${flags[@]}" --dtype bf16 --tied
    [ "$(basename "$program")" = train ] || continue
    passes "$program" "${flags[@]}" --save "$out.checkpoint"
    passes "$program" --seq 13 --steps 4 --sample 0 --resume "$out.checkpoint"
done
echo "1..$count"
[ $failed = 0 ] && [ $count -gt 0 ]
