#!/bin/bash
# readme.t: what the README says of the tree is true of the tree: the map of the book, the number of mutants, its links.
. "$(dirname "$0")/tap.sh"
copy=$work/README.md

cp README.md "$copy"
README=$copy common/report/readme.sh map
diff README.md "$copy" >"$out"
report $? "the map and the counts are those of the sources (make readme renews them)"

missing=''
for link in $(grep -oE '\]\([^)#:]+\)' README.md | tr -d '])('); do [ -e "$link" ] || missing="$missing $link"; done
[ -z "$missing" ]
report $? "every file that it links exists${missing:+, but not$missing}"

missing=''
for path in $(grep -oE '(build/0[0-9]_[a-z_]+/[a-z0-9_]+|(common|tests|0[0-9]_[a-z_]+)/[A-Za-z0-9_]+\.(c|h|sh|t))\b' README.md | sort -u); do
    [ -e "$path" ] || [ -e "$(echo "$path" | sed 's/^build.//').c" ] || missing="$missing $path"
done
[ -z "$missing" ]
report $? "every program and file that it names exists${missing:+, but not$missing}"
finish
