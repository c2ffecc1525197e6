#!/bin/bash
# readme.t: what the pages say about the tree is true: the map of this book, the files of the core, the number
# of mutants, links, names of programs and files, commands.
. "$(dirname "$0")/tap.sh"
written='README.md common/README.md common/cuda/README.md tests/README.md tests/CLAIMS.md'
written+=' tests/bench/README.md'
all="$written $(ls 0[0-9]_*/README.md)"

for page in README.md common/README.md; do
    mkdir -p "$work/pages/$(dirname $page)" && cp $page "$work/pages/$page"
done
PAGES=$work/pages common/report/readme.sh map
for page in README.md common/README.md; do diff $page "$work/pages/$page"; done >"$out"
[ ! -s "$out" ]
report $? "the map and the counts are those of the sources (make readme renews them)"

[ "$(wc -l <README.md)" -le 150 ]
report $? "the README is a page of at most 150 lines"

missing=''
for page in $all; do
    for link in $(grep -oE '\]\([^)#:]+\)' $page | tr -d '])('); do
        [ -e "$(dirname $page)/$link" ] || missing="$missing $page:$link"
    done
done
[ -z "$missing" ]
report $? "every file that a page links exists${missing:+, but not$missing}"

# `make readme` draws every figure and writes every row of the claims.
script=common/report/readme.sh
missing=''
for page in $all; do
    for figure in $(grep -oE '\]\([a-z_0-9]+\.svg\)' $page | tr -d '])('); do
        figure=$(dirname $page)/$figure
        grep -qF "$figure " $script $page || grep -qF "$(dirname $figure)/\$schedule.svg" $script ||
            missing="$missing $figure"
    done
done
[ -z "$missing" ]
report $? "every figure of a page is one that readme.sh draws${missing:+, but not$missing}"
tests/programs/legible.py 0*/*.svg >"$out"
[ $? = 0 ] && [ ! -s "$out" ]
report $? "every figure's title is large enough, no text leaves its picture, and all follow the page's theme"
rows=$(sed -n '/^<!-- claims -->/,/^<!-- .claims -->/p' tests/CLAIMS.md | grep -c '^| [0-9]')
[ "$rows" = "$(grep -cE '^    row [0-9]' $script)" ]
report $? "the table of claims has as many rows as readme.sh writes"

# Those of programs that run in one process and at once; the quotes are every second field of a row.
stale='' command='' rows=0
while IFS='`' read -r _ next _ line _; do
    program=$build/$(ls 0*/"${next%% *}".c 2>/dev/null | sed 's/\.c$//')
    [[ $program =~ /(memory|recompute|train|schedule|formats|moe)$ ]] || continue
    [ "$next" = "$command" ] || run "$program" $(grep -o ' .*' <<<"$next") || stale="$stale $next;"
    command=$next rows=$((rows + 1))
    sed -E 's/ +/ /g; s/^ //; s/ \((exact|reas).*//' "$out" | grep -qxF -e "$(sed -E 's/ +/ /g' <<<"$line")" ||
        stale="$stale $next: $line;"
done < <(grep '^| [0-9]' tests/CLAIMS.md)
[ -z "$stale" ] && [ $rows -gt 20 ]
report $? "programs of one process print what the table of claims says${stale:+, but not$stale}"

missing=''
sources='(common|tests|0[0-9]_[a-z_]+)/[A-Za-z0-9_/]+\.(c|cc|cu|h|md|sh|t|txt)'
names="(build/0[0-9]_[a-z_]+/[a-z0-9_]+|$sources)\b"
for path in $(grep -ohE "$names" $all | sort -u); do
    [ -e "$path" ] || [ -e "${path#build/}.c" ] || [ -e "${path#build/}.cu" ] || missing="$missing $path"
done
[ -z "$missing" ]
report $? "every program and file that a page names exists${missing:+, but not$missing}"

# A command on a page accepts the flags that it shows (05's page has a test of its own).
bad='' asked=0
for page in $(ls 0[0-9]_*/README.md); do
    while read -r program flags; do
        asked=$((asked + 1))
        help=$("$build${program#build}" --help)
        for flag in $(grep -oE -- '--[a-z0-9-]+' <<<"${flags%%|*}"); do
            line=$'\n'" +$flag[[:space:]]"
            [[ $'\n'$help$'\n' =~ $line ]] || bad="$bad $program $flag;"
        done
    done < <(grep -ohE '^( +|<!-- (run|dated) )build/0[0-9][^>]*' "$page" |
        sed 's/<!-- [a-z]* //; s/ --$//')
done
[ -z "$bad" ] && [ $asked -gt 40 ]
report $? "every command of a chapter's page has flags that its program takes${bad:+, but not$bad}"

# Each block of counts has its command above what that printed.
bad=''
for page in $(ls 0[0-9]_*/README.md); do
    empty=$(awk '/^<!-- (run|dated) / {
        getline line; if (line !~ /^    \$ build\//) print FILENAME ": " $0 }' "$page")
    bad="$bad$empty"
done
[ -z "$bad" ]
report $? "every block of a page is filled${bad:+, but not $bad}"
finish
