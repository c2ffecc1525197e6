#!/bin/bash
# map.sh: the map of this book as a table in Markdown: the chapters, and in each the programs in the order
# in which its page names them. A program's concept is the first line of its source; a file without a main
# is no row, and X_backward, X_tensor, X_tensor_backward and X_fp8 share X's.
#
# map.sh core: the files of common/ instead, each with the first sentence of its purpose comment.
export LC_ALL=C  # the order of names is the same everywhere

# sentence FILE: what a file's purpose comment says after its name, up to the first full stop.
sentence() {
    awk '!/^\/\/ ./ { exit }
         { sub(/^\/\/ /, ""); text = text " " $0 }
         END {
             sub(/^ [^ ]*: /, "", text)
             if (match(text, /\.( |$)/)) text = substr(text, 1, RSTART - 1)
             gsub(/\|/, "\\|", text)
             print text
         }' "$1"
}

if [ "$1" = core ]; then
    echo '| file | what |'
    echo '|---|---|'
    for room in common common/tensor common/comm common/train common/report common/cuda \
        common/cuda_on_cpu; do
        for file in "$room"/*.h "$room"/*.c "$room"/*.cu "$room"/*.cc; do
            [ -e "$file" ] || continue
            what=$(sentence "$file")
            [[ $what != see\ * ]] || continue  # its header has said it
            echo "| [\`${file#common/}\`](${file#common/}) | $what |"
        done
    done
    exit
fi

echo '| chapter | program | concept | lines |'
echo '|---|---|---|---|'
for chapter in 0[0-9]_*; do
    page=$chapter/README.md
    title=${chapter//_/ }
    [ ! -e "$page" ] || title="[$title]($page)"
    for source in $(grep -slE '^int main\b' "$chapter"/*.c "$chapter"/*.cu); do
        name=$(basename "$source")
        place=$(grep -nF -m 1 "]($name)" "$page" 2>/dev/null | cut -d: -f1)
        column=$(sed -n "${place:-1}p" "$page" 2>/dev/null |
            awk -v name="]($name)" '{ print index($0, name) }')
        echo "${place:-9999} ${column:-0} $source"
    done | sort -n -k 1,1 -k 2,2 | while read -r _ _ source; do
        [[ $source != *_@(backward|tensor).* && $source != 07_kernels/*_fp8.* ]] || continue
        concept=$(sentence "$source")
        concept=${concept%%. Playbook:*}
        program="[\`$(basename "${source%.*}")\`]($source)"
        lines=$(wc -l <"$source")
        for part in _backward _tensor _tensor_backward _fp8; do
            other=${source%.*}$part.${source##*.}
            [ -e "$other" ] || continue
            program+=", [\`$part\`]($other)"
            lines+=" + $(wc -l <"$other")"
        done
        echo "| $title | $program | $concept | $lines |"
        title=''  # stands at the chapter's first program
    done
done
