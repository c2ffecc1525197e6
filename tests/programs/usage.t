#!/bin/bash
# Wrong use of every program: one sentence on stderr that names the flag, and exit status 2. TAP.
. "$(dirname "$0")/tap.sh"

# is_refused WORDS PROGRAM FLAGS…: succeeds if the program ends with status 2, and one line on stderr with
# WORDS.
is_refused() {
    local words=$1 program=$2
    shift 2
    run "$program" "$@"
    one_line $? -F "$words" && [[ $(<"$err") == "${program##*/}: "* ]]
}

# Under the sanitizers, which start slowly, one program of each chapter: the parser is the same.
declare -A tried seen holders
for program in "$build"/0[0-9]_*/*; do
    [ -f "$program" ] && [ -x "$program" ] || continue
    chapter=${program%/*}
    [[ $build != *-asan ]] || [ -z "${seen[$chapter]}" ] || continue
    seen[$chapter]=yes
    name=$(basename "$program")
    run "$program" --help && [ ! -s "$err" ] && grep -q "^$name: " "$out"
    report $? "$name --help says what it is, and is a success"
    # The lines that begin with a flag: "  --layers N      transformer blocks".
    help=$(grep -E '^  --' "$out")
    flags=$(echo "$help" | awk '{ print $1 }')
    has() { [[ $'\n'$flags$'\n' == *$'\n'--$1$'\n'* ]]; }
    for flag in $flags; do holders[$flag]+=" $name"; done

    # The flags that programs share are in one table (common/options.c), and are refused by the same code:
    # each is tried in the first program that has it, with these words next to it.
    bad='' new=0
    while read -r flag value words; do
        words="$flag $value ${words%%(default*}"
        [ -z "${tried[$words]}" ] || continue
        tried[$words]=$name new=$((new + 1))
        case $value in
            N | X)
                is_refused "$flag" "$program" "$flag" 7x && is_refused "$flag" "$program" "$flag" 1e400 &&
                    is_refused "$flag needs a value" "$program" "$flag" || bad="$bad $flag" ;;
            *'|'*) is_refused "$flag" "$program" "$flag" neither || bad="$bad $flag" ;;
            [A-Z][A-Z]*) is_refused "$flag needs" "$program" "$flag=" || bad="$bad $flag" ;;
        esac
    done <<<"$(grep -v -- '--help' <<<"$help")"
    [ -z "$bad" ]
    report $? "$name refuses malformed values of its $new new flags${bad:+, but not of$bad}"

    is_refused "--nonsense is not one of $name's flags" "$program" --nonsense &&
        is_refused '"stray"' "$program" stray
    report $? "$name refuses unknown words"

    # Words that no program knows and flags that only others have are refused by the same code: each flag is
    # tried in the first program without it.
    bad=''
    for flag in layers steps lr recompute data json ranks dp pp cp tp ep zero sp timeline; do
        ! has $flag && [ -z "${tried[$flag]}" ] || continue
        tried[$flag]=$name
        is_refused "--$flag is not one of $name's flags (" "$program" --$flag 1 || bad="$bad $flag"
    done
    [ -z "$bad" ]
    report $? "$name refuses flags of other programs by name${bad:+, but not$bad}"

    if has hidden && has heads; then
        is_refused '--hidden 130 is not divisible by --heads 4' "$program" --hidden 130 --heads 4
        report $? "$name refuses sizes that do not divide"
    fi
    if has data; then
        measure=$(has measure && echo --measure)
        is_refused /nonexistent "$program" $measure --data /nonexistent
        report $? "$name names a data file that is missing"
    fi
    if has machine; then
        is_refused abacus "$program" --machine abacus
        report $? "$name names an unknown machine"
        machines=$(sed -n 's/.* one of //p' "$err") missing=''
        for machine in ${machines//|/ }; do
            [[ $help$'\n' == *[!a-z0-9]"$machine"[!a-z0-9]* ]] || missing="$missing $machine"
        done
        [ -n "$machines" ] && [ -z "$missing" ]
        report $? "$name --help lists the machines${missing:+, but not$missing}"
    fi
done

# The table of flags that belong to other programs is written by hand. collectives and memory lack most flags.
[[ $build != *-asan ]] || finish
bad=''
for flag in "${!holders[@]}"; do
    [ "$(wc -w <<<"${holders[$flag]}")" -gt 1 ] || continue
    case ${holders[$flag]} in
        *' collectives'*' memory'* | *' memory'*' collectives'*) continue ;;
        *' collectives'*) name=00_single_gpu/memory ;;
        *) name=01_data_parallel/collectives ;;
    esac
    [ -x "$build/$name" ] || continue
    is_refused "$flag is not one of ${name#*/}'s flags (" "$build/$name" "$flag" || bad="$bad $flag"
done
[ -z "$bad" ]
report $? "a flag of several programs is known to one that lacks it${bad:+, but not$bad}"
finish
