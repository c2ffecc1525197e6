#!/bin/bash
# install.t: what is installed, and how, where apt-get is one that only writes what it was told. TAP.
# needs: build/corpus.txt
. "$(dirname "$0")/tap.sh"
bin=$work/bin
mkdir "$bin" && ln -s "$(type -P env)" "$(type -P sh)" "$(type -P true)" "$bin/"
cat >"$bin/apt-get" <<APT
#!/bin/sh
echo "\$DEBIAN_FRONTEND: \$*" >>$work/told
[ \$1 != update ] || exit 100  # one list of a third party is dead
APT
printf '#!/bin/sh\necho 1000\n' >"$bin/id"
# sudo gives its command an environment of its own.
printf '#!/bin/sh\n[ "$1" != -n ] || shift\nexec env -u DEBIAN_FRONTEND "$@"\n' >"$bin/sudo"
chmod +x "$bin"/*

run env PATH="$bin" sh common/install.sh run
[ $? = 0 ] && [ "$(head -n 1 "$work/told")" = 'noninteractive: update -q' ] &&
    grep -q '^noninteractive: install -y --no-install-recommends gcc .*openmpi-bin' "$work/told"
report $? "a list that cannot be read stops nothing, and nobody is asked"
finish
