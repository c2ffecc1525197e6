#!/bin/bash
# install.t: what is installed, when and how, with an apt-get that only records what it was told. TAP.
# needs: build/corpus.txt
. "$(dirname "$0")/tap.sh"
bin=$work/bin
mkdir "$bin" && ln -s "$(type -P env)" "$(type -P sh)" "$(type -P true)" "$bin/"
cat >"$bin/apt-get" <<APT
#!/bin/sh
echo "\$DEBIAN_FRONTEND: \$*" >>$work/told
[ \$1 != update ] || exit 100  # a third party's list is not available
APT
printf '#!/bin/sh\necho 1000\n' >"$bin/id"
# sudo gives its command a clean environment.
printf '#!/bin/sh\n[ "$1" != -n ] || shift\nexec env -u DEBIAN_FRONTEND "$@"\n' >"$bin/sudo"
chmod +x "$bin"/*

run env PATH="$bin" sh common/install.sh run
[ $? = 0 ] && [ "$(head -n 1 "$work/told")" = 'noninteractive: update -q' ] &&
    grep -q '^noninteractive: install -y --no-install-recommends gcc .*openmpi-bin' "$work/told"
report $? "a list that cannot be read stops nothing, and nobody is asked"

# A compiler that finds no header, and so no cmocka.h.
cat >"$bin/no-headers" <<CC
#!/bin/sh
for word; do [ "\$word" != -c ] || echo compiles >>$work/told; done
exit 1
CC
chmod +x "$bin/no-headers"
for tool in cat cmp find grep mkdir mv rm sed; do ln -s "$(type -P $tool)" "$bin/"; done
makes() {  # makes GOALS…: on a machine without a compiler and perl
    : >"$work/told"
    run env PATH="$bin" "$(type -P make)" -j2 CC=no-headers BUILD="$work/build" "$@"
}
for goal in all tests; do
    makes $goal
    [ "$(sed 's/^noninteractive: //; s/ .*//' "$work/told" | uniq | tr '\n' ' ')" = \
        'update install compiles ' ] &&
        grep -q ' install .* perl' "$work/told" && grep -q "^make $goal needs packages" "$err"
    report $? "make $goal installs what tests need, once, before it compiles anything"
done
makes -n all
[ ! -s "$work/told" ]
report $? "make -n all installs nothing"
printf '#!/bin/sh\nexit 100\n' >"$bin/apt-get"
makes all
[ $status = 2 ] && [ ! -s "$work/told" ] && grep -q '^    apt-get install .* perl' "$err"
report $? "make all where it may not install names the command that does, and compiles nothing"
finish
