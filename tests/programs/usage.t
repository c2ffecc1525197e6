#!/bin/bash
# Wrong use of every program: one sentence on stderr that names the flag, and exit status 2. TAP.
cd "$(dirname "$0")/../.." || exit 2
build=${BUILD:-build}
unset OPENBLAS_CORETYPE
out=$(mktemp) err=$(mktemp)
trap 'rm -f "$out" "$err"' EXIT
count=0

result() {  # result STATUS NAME
    count=$((count + 1))
    if [ "$1" = 0 ]; then
        echo "ok $count - $2"
    else
        echo "not ok $count - $2"
        head -n 3 "$out" "$err" | sed 's/^/#   /'
        failed=1
    fi
}

# refused WORDS PROGRAM FLAGS…: succeeds if the program ends with status 2, and one line on stderr that has
# WORDS.
refused() {
    local words=$1 program=$2
    shift 2
    timeout 20 "$program" "$@" >"$out" 2>"$err"
    [ $? = 2 ] && [ "$(wc -l <"$err")" = 1 ] && ! grep -q '^PASS' "$out" &&
        grep -q "^$(basename "$program"): " "$err" && grep -qF -e "$words" "$err"
}

for program in "$build"/0[0-9]_*/*; do
    [ -f "$program" ] && [ -x "$program" ] || continue
    name=$(basename "$program")
    timeout 20 "$program" --help >"$out" 2>"$err"
    [ $? = 0 ] && [ ! -s "$err" ] && grep -q "^$name: " "$out"
    result $? "$name --help says what it is, and is a success"
    # The lines that begin with a flag: "  --layers N      transformer blocks".
    help=$(grep -E '^  --' "$out")
    flags=$(echo "$help" | awk '{ print $1 }')
    has() { grep -qxF -e "--$1" <<<"$flags"; }

    bad=''
    while read -r flag value _; do
        case $value in
            N | X)
                refused "$flag" "$program" "$flag" 7x && refused "$flag" "$program" "$flag" 1e400 &&
                    refused "$flag needs a value" "$program" "$flag" || bad="$bad $flag" ;;
            *'|'*) refused "$flag" "$program" "$flag" neither || bad="$bad $flag" ;;
            [A-Z][A-Z]*) refused "$flag needs" "$program" "$flag=" || bad="$bad $flag" ;;
        esac
    done <<<"$(grep -v -- '--help' <<<"$help")"
    [ -z "$bad" ]
    result $? "$name refuses malformed values of all $(wc -l <<<"$flags") flags${bad:+, but not of$bad}"

    refused "--nonsense is not one of $name's flags" "$program" --nonsense &&
        refused '"stray"' "$program" stray
    result $? "$name refuses unknown words"

    bad=''
    for flag in layers steps lr recompute data json ranks dp pp cp tp ep zero sp timeline; do
        has $flag || refused "--$flag is not one of $name's flags (" "$program" --$flag 1 ||
            bad="$bad $flag"
    done
    [ -z "$bad" ]
    result $? "$name refuses flags of other programs by name${bad:+, but not$bad}"

    if has hidden && has heads; then
        refused '--hidden 130 is not divisible by --heads 4' "$program" --hidden 130 --heads 4
        result $? "$name refuses sizes that do not divide"
    fi
    if has data; then
        measure=$(has measure && echo --measure)
        refused /nonexistent "$program" $measure --data /nonexistent
        result $? "$name names a data file that is missing"
    fi
    if has machine; then
        refused abacus "$program" --machine abacus
        result $? "$name names an unknown machine"
    fi
done
echo "1..$count"
[ -z "$failed" ]
