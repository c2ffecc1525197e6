#!/bin/bash
# tour.sh [build]: trains the small model on real text, then runs every other program of this book, one line
# each. Exit status 1 if a verdict is not PASS.
build=${1:-build}
logs=$build/tour
mkdir -p "$logs" && [ -w "$logs" ] || {
    echo "make run: what the programs print cannot be kept in $logs/" >&2
    exit 2
}
train=$build/00_single_gpu/train
failed=0 count=0

if [ -x "$train" ]; then
    echo "== train: the default model on this book's own sources"
    count=1
    "$train" || failed=1
    echo
fi
echo "== every other program, in the order of the map in README.md (whole output in $logs/)"
# take PROGRAM FLAGS…: its verdict, or the end of what it printed.
take() {
    local log verdict status
    log=$logs/$(basename "$1")${2:+.$(tr -dc 'a-z0-9-' <<<"${*:2}")}.log
    [ ! -t 1 ] || printf '%s …' "$*"
    "$@" >"$log" 2>&1
    status=$?
    [ ! -t 1 ] || printf '\r\033[K'
    verdict=$(grep -E '^(PASS|FAIL|UNPROVEN) ' "$log" | tail -n 1)
    count=$((count + 1))
    if [ $status = 0 ] && [ "${verdict%% *}" = PASS ]; then
        printf '%s\n' "${verdict/:/${2:+ ${*:2}}:}"
    else
        failed=$((failed + 1))
        : "${verdict:=FAIL $(basename "$1"): it ended without a verdict}"
        printf '%s (exit status %d)\n' "$verdict" $status
        tail -n 8 "$log" | sed 's/^/    /'
    fi
}

last=$build/08_mixed_precision/train_5d
for program in $("${0%/*}/map.sh" | grep -oE '\]\(0[0-9]_[a-z_]+/[a-z0-9_]+\.cu?\)' | tr -d '])('); do
    program=$build/${program%.*}
    [ -x "$program" ] || continue
    [ "$program" != "$train" ] && [ "$program" != "$last" ] || continue
    take "$program"
done
if [ -x "$last" ]; then
    echo "== all techniques together, 200 steps of real text beside one device; then the same with experts"
    take "$last"
    take "$last" --experts 4 --ep 4 --sp
fi
echo
echo "$count runs, $failed failed"
[ $failed = 0 ] && [ $count -gt 0 ]
