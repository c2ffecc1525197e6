export OPENBLAS_CORETYPE=SkylakeX
for i in 1 2; do for w in old new; do /tmp/q/mm2t$w > /tmp/q/t.$w.$i; done; done
paste <(cut -c1-12 /tmp/q/t.old.1) $(for w in old new; do echo "/tmp/q/t.$w.1 /tmp/q/t.$w.2"; done) | sed 's/m=[^r]*ratio//g; s/\[[^]]*\]//g; s/\t[^\t0-9]*[0-9]*r\? *[L0-9]* *[a-z]* *[a-z]* */\t/g'
