#!/bin/sh
# map.sh: the map of the book as a table in Markdown, made from each source's own purpose comment: its name and
# concept from the first line, what it proves from the line "Last line: PASS <program>: …".
echo '| program | concept | lines | what its last line proves |'
echo '|---|---|---|---|'
for source in 0[0-9]_*/*.c 0[0-9]_*/*.cu; do
    [ -e "$source" ] || continue
    awk -v source="$source" -v lines="$(wc -l <"$source")" '
        NR == 1 { sub(/^\/\/ [^:]*: /, ""); sub(/\. Playbook:.*/, ""); sub(/\.$/, ""); concept = $0 }
        /^\/\/ Last line: PASS / { sub(/^\/\/ Last line: PASS [^:]*: /, ""); sub(/ …$/, ""); proves = $0 }
        END {
            name = source; sub(/.*\//, "", name); sub(/\.cu?$/, "", name)
            printf "| [`%s`](%s) | %s | %d | %s |\n", name, source, concept, lines, proves ? proves : "(a part, proven by the programs)"
        }' "$source"
done
