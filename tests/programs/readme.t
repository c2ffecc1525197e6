#!/bin/bash
# readme.t: what the README says of the tree is true of the tree: the map of the book, the number of mutants, its links.
cd "$(dirname "$0")/../.." || exit 2
copy=$(mktemp)
trap 'rm -f "$copy"' EXIT
failed=0
report() { if [ "$1" = 0 ]; then echo "ok $2"; else echo "not ok $2"; failed=1; fi; }

cp README.md "$copy"
README=$copy common/report/readme.sh map
difference=$(diff README.md "$copy")
report $? "1 - the map and the counts are those of the sources (make readme renews them)"
[ -z "$difference" ] || echo "$difference" | sed 's/^/# /'

missing=''
for link in $(grep -oE '\]\([^)#:]+\)' README.md | tr -d '])('); do [ -e "$link" ] || missing="$missing $link"; done
[ -z "$missing" ]
report $? "2 - every file that it links exists${missing:+, but not$missing}"

missing=''
for path in $(grep -oE '(build/0[0-9]_[a-z_]+/[a-z0-9_]+|(common|tests|0[0-9]_[a-z_]+)/[A-Za-z0-9_]+\.(c|h|sh|t))\b' README.md | sort -u); do
    [ -e "$path" ] || [ -e "$(echo "$path" | sed 's/^build.//').c" ] || missing="$missing $path"
done
[ -z "$missing" ]
report $? "3 - every program and file that it names exists${missing:+, but not$missing}"
echo 1..3
exit $failed
