# Grade.pm: builds one student's file, runs its proof within limits, and puts what is wrong first in words.
#
# What runs here may be anything: it gets no settings of the caller, a folder of its own, limits of time,
# memory and file size, and whatever it started is ended with it, also what has left its session.
package Grade;
use strict;
use warnings;
use Cwd 'abs_path';
use Exporter 'import';
use File::Basename;
use File::Path 'make_path';
use POSIX ':sys_wait_h';
use Source;
use Time::HiRes qw(sleep time);
our @EXPORT = qw(grade unfit prepare compiled proof some);

our $build = $ENV{BUILD} // 'build';
my $most_seconds = 25;         # of one run
my $all_seconds = 55;          # of all runs of an exercise
my $most_output = 1 << 20;     # bytes that are read of what a run has printed
our %command;                  # how make compiles and links

# ---- what make knows ----

# Builds what the proofs need, and takes over make's commands. A test of the suite has built already.
sub prepare {
    my (@exercises) = @_;
    my %proof = map { ("$build/$_->{proof}" => 1) } @exercises;
    my @make = ('make', '-s', '--no-print-directory', "BUILD=$build");
    delete @ENV{qw(MAKEFLAGS MAKELEVEL MFLAGS)};
    if (!defined $ENV{MUTANT}) {
        print STDERR "building what the proofs need; the first time takes minutes\n"
            if grep { !-e } keys %proof;
        system(@make, '-j' . (0 + `nproc` || 1), sort keys %proof, "$build/corpus.txt") == 0
            or die "the sources themselves do not build; see above\n";
    }
    open my $lines, '-|', @make, 'course-commands' or die "make: $!\n";
    while (<$lines>) { $command{$1} = $2 if /^(compile|link|libraries) (.*)$/ }
    close $lines;
    die "make course-commands does not say how to compile\n" if !$command{compile} || !$command{libraries};
}

# ---- a process within limits ----

# Orphans become children of this process, whatever session they have made for themselves. Where the number
# of prctl is not known, children are ended by their parents alone.
my %prctl = (x86_64 => 157, aarch64 => 167, riscv64 => 167);
my $machine = (POSIX::uname())[4];
syscall($prctl{$machine}, 36, 1, 0, 0, 0) if $prctl{$machine};

sub children {
    my ($pid) = @_;
    my @all;
    for my $list (glob "/proc/$pid/task/*/children") { push @all, split ' ', content($list) // '' }
    return map { ($_, children($_)) } @all;
}

# Ends all that is below this process; several times, as who is ended may have begun another.
sub end_all {
    my ($signal) = @_;
    for (1 .. 20) {
        my @left = children($$) or return;
        kill $signal, @left;
        sleep 0.05;
        while (waitpid(-1, WNOHANG) > 0) { }
    }
}

# Runs a command in a folder; its output goes to files `out` and `err` there. Returns the exit status, or -1
# where it took too long.
sub run_limited {
    my ($folder, $seconds, @command) = @_;
    my $pid = fork // die "fork: $!\n";
    if (!$pid) {
        POSIX::setsid();
        my %keep = map { ($_ => $ENV{$_}) } grep { defined $ENV{$_} } qw(PATH LD_LIBRARY_PATH LANG);
        %ENV = (%keep, HOME => $folder, OMP_NUM_THREADS => 1, OMP_WAIT_POLICY => 'passive', NO_COLOR => 1);
        chdir $folder or POSIX::_exit(127);
        open STDIN, '<', '/dev/null';
        open STDOUT, '>', 'out' or POSIX::_exit(127);
        open STDERR, '>', 'err' or POSIX::_exit(127);
        # processor seconds, blocks of files, no core, KiB of memory: of each process
        my $limits = 'ulimit -t 60 -c 0; ulimit -f 65536; ulimit -v 16777216; exec "$@"';
        exec 'sh', '-c', $limits, 'sh', @command or POSIX::_exit(127);
    }
    my $until = time + $seconds;
    my $status;
    while (!defined $status) {
        $status = $? if waitpid($pid, WNOHANG) == $pid;
        last if defined $status;
        if (time > $until) {
            kill 'TERM', $pid;    # a launcher ends its ranks, and clears up
            sleep 0.5;
            $status = -1;
        }
        sleep 0.02;
    }
    end_all('KILL');
    return $status < 0 ? -1 : $status & 127 ? 128 + ($status & 127) : $status >> 8;
}

# The first so many bytes of a file, without what is no text.
sub some {
    my ($file) = @_;
    open my $in, '<', $file or return '';
    read $in, my ($text), $most_output;
    $text =~ s/\e\[[0-9;]*m//g;
    $text =~ s/[^\n\t -~\x80-\xff]/?/g;
    return $text;
}

# ---- building ----

# The program keeps its name, by which it speaks of itself, and finds its text in the folder above its own.
sub program_of { return "$_[1]/bin/" . basename($_[0]->{proof}) }

# Compiles a file in place of that of the exercise, and links the proof with it. Returns what the compiler
# says first, or ''. @more: flags behind make's.
sub compiled {
    my ($e, $file, $folder, @more) = @_;
    my ($own, $chapter) = ("$e->{proof}.c" eq $e->{file}, dirname($e->{file}));
    my @todo = map { ('-include', $_) } 'tests/course/todo.h';
    my $flags = join ' ', "-iquote $chapter", @todo, '-Wno-unused-function -Wno-unused-parameter -O1',
        $own ? '' : '-DNO_MAIN', @more;
    my $main = $e->{proof} =~ m{^tests/(.*)} ? "$build/main/tests/unit/$1.o" : "$build/main/$e->{proof}.o";
    my $objects = "'$folder/mine.o'" . ($own ? '' : " $main") . " $build/libultrascale.a";
    my $library = $e->{proof} =~ /^tests/ ? '-lcmocka' : '';
    my $program = program_of($e, $folder);
    make_path("$folder/bin");
    unlink "$folder/mine.o", $program, "$folder/corpus.txt";
    link "$build/corpus.txt", "$folder/corpus.txt" or symlink abs_path("$build/corpus.txt"), "$folder/corpus.txt";
    my $compile = "$command{compile} $flags -c '$file' -o '$folder/mine.o'";
    my $link = "$command{link} $objects $library $command{libraries} -o '$program'";
    return '' if !system "ulimit -t 60; { $compile && $link; } >'$folder/build.log' 2>&1";
    my $log = some("$folder/build.log");
    return $1 if $log =~ /^(.*(?:error|undefined reference|multiple definition).*)$/m;
    return (split /\n/, $log)[0] // 'the compiler ends without a word';
}

# ---- words ----

# What usually is wrong, by the sentence that a program ends with. The first that fits.
my @advice = (
    [qr/^TODO in/, 'not done', 'the function, or a branch of it, still says TODO.'],
    [qr/averaged twice/, 'scale', 'The loss is divided by the labels of the whole batch already: sum, and divide by no N again.'],
    [qr/scaled twice/, 'scale', 'loss_scale has the division already: leave yours out.'],
    [qr/summed twice|summed, and not averaged/, 'scale',
     'Sums that are on every rank already are summed again: keep 1 / N of them before the next sum, or sum once.'],
    [qr/one rank's share alone/, 'scale', 'Is the sum over ranks made for this tensor, over the right group, and waited for?'],
    [qr/never written|cleared before/, 'scale', 'Nothing adds to this gradient. Is the function called for each unit, and does it write where sums stand?'],
    [qr/usually a sign/, 'sign', 'Something is subtracted that should be added.'],
    [qr/not waited|in flight|has not been waited/, 'wait', 'A request is not waited for before its tensor is used or freed.'],
    [qr/for [\d.e+-]+ s \(--timeout\)|deadlock|waits (?:itself|for)/, 'hang',
     'The ranks wait for each other. Compare who waits for what: a call is missing on one rank, has another order, or goes to the wrong neighbour.'],
    [qr/called .* where rank/, 'order', 'Every rank of a group makes the same calls, with the same sizes, in the same order. Which branch or size depends on the rank?'],
    [qr/breaks the rule/, 'order', 'The list of the rank that is named has this pass missing, twice, or too early.'],
    [qr/peak of|kept|held|memory|weights, all|gradients, all|optimizer, all/, 'memory', undef],
    [qr/: calls of|all-reduces|all-gathers|messages|collectives/, 'calls', undef],
    [qr/bytes/, 'bytes', undef],
    [qr/bubble|period|makespan/, 'bubble', 'The order is sound, but ranks wait longer than they must. Draw it: schedule --schedule NAME.'],
    [qr/has died|SIGSEGV|SIGBUS|SIGABRT|SIGFPE|address/, 'crash', 'It reads or writes memory that is not there. Was the tensor made, or freed already?'],
    [qr/^gradients.*of/, 'gradients', 'The first step is wrong in this tensor. Which elements does your code leave out, or take from the wrong place?'],
    [qr/^(?:losses|loss)/, 'loss', 'Forward differs already: look there first.'],
    [qr/^gradient norm|norms of/, 'norm', 'Gradients are right, and their norm is not.'],
    [qr/^parameters/, 'parameters', 'The step is right, and weights do not come back, or are stepped twice.'],
);

# What measured and predicted say of a count.
sub of_count {
    my ($text, $what) = @_;
    my ($predicted, $measured) = $text =~ /predicted ([\d.e+-]+).*?measured ([\d.e+-]+)/ or return '';
    my $more = $measured > $predicted;
    return 'Memory is above the formula: something is not freed, freed too late, or whole where a shard would do.'
        if $what eq 'memory' && $more;
    return 'Memory is below the formula: something is freed too early, or never made.' if $what eq 'memory';
    return $more ? "Too many $what: what is sent twice, or whole where a part would do?"
        : "Too few $what: who has not sent, or only a part of it?";
}

# Kind and words for the sentence that a failed run ends with.
sub advice {
    my ($text) = @_;
    for (@advice) {
        my ($pattern, $kind, $words) = @$_;
        return ($kind, $words // of_count($text, $kind)) if $text =~ $pattern;
    }
    return ('proof', '');
}

# The sentence with which a run has ended badly, '' if it passed.
sub first_wrong {
    my ($e, $folder, $status) = @_;
    my ($out, $err) = (some("$folder/out"), some("$folder/err"));
    my $program = basename($e->{proof});
    return $1 if $err =~ /^(TODO in .*)$/m;
    if ($e->{proof} =~ /^tests/) {
        return '' if $status == 0 && $out =~ /^ok/m && $out !~ /^not ok/m;
        my ($test) = $out =~ /^not ok \d+ - (.*)$/m;
        my ($why) = "$out\n$err" =~ /^(?:# )?(?:\[ *ERROR *\] --- )?(\S.*(?:!=|not within|is not|differ|relative|expected).*)$/m;
        return join ': ', grep { defined } "$program" . ($test ? ", test $test" : ''), $why if $status >= 0 && $test;
    } else {
        return '' if $status == 0 && $out =~ /^PASS \Q$program\E: /m;
        return $1 if $out =~ /^FAIL \Q$program\E: (.*)$/m;
    }
    return sprintf 'it was stopped after %d s', $most_seconds if $status == -1 && $err !~ /^\Q$program\E: /m;
    my @said = $err =~ /^\Q$program\E: (.*)$/mg;
    # Of a deadlock every rank says where it waits; the one that gave up says so last.
    return join('; ', grep { /waits/ } @said) if @said > 1 && grep { /--timeout/ } @said;
    my ($best) = (grep({ !/has died/ } @said), @said);
    return $best if defined $best;
    return "it ends by signal @{[$status - 128]}" . ($status == 139 ? ' (SIGSEGV)' : $status == 134 ? ' (SIGABRT)' : '')
        if $status > 128;
    my ($line) = grep { /\S/ } split /\n/, $err;
    return "it ends with status $status and no verdict" . ($line ? ": $line" : '');
}

# ---- one submission ----

sub record {
    my ($e, $file, $status, $kind, $first, $advice) = @_;
    return { exercise => $e->{name}, file => $file, status => $status, kind => $kind, first => $first,
        advice => $advice, run => '', seconds => 0 };
}

# What can be said of a file without a compiler: a record if it need not be run, else undef.
sub unfit {
    my ($e, $file) = @_;
    my $original = content($e->{file});
    my $f = find_function($original, $e->{function}) or die "$e->{file} has no function $e->{function}\n";
    my $mine = -s $file && -s $file < 1e6 ? content($file) : undef;
    return record($e, $file, 'fail', 'file', "$file is empty, unreadable or longer than a megabyte", '')
        if !defined $mine;
    my ($part, $line, $number) = between($original, $f, $mine);
    return record(
        $e, $file, 'fail', 'changed elsewhere', "line $number of $e->{file} is missing or changed: $line",
        "Only $e->{function} is graded, and helpers right above it: put the other lines back.") if !defined $part;
    return record($e, $file, 'not done', 'not done', "$e->{function} still says TODO", "$e->{task}.")
        if code_of($part) =~ /\bTODO\s*\(/;
    return undef;
}

# Builds a file that is fit and runs its proof. Returns a record: exercise, file, status ("pass", "fail",
# "not done"), kind, first (what is wrong first), advice, run, seconds.
sub grade {
    my ($e, $file, $folder, @flags) = @_;
    my $began = time;
    my ($run, $seconds) = ('', sub { 0 + sprintf '%.1f', time - $began });
    my $end = sub { return { %{ record($e, $file, @_) }, run => $run, seconds => $seconds->() } };
    my $error = compiled($e, $file, $folder, @flags);
    return $end->('fail', 'compile', $error, "All of it is in $folder/build.log.") if length $error;
    my $passed = '';
    for (@{ $e->{run} }) {
        $run = join ' ', $e->{proof}, split ' ';
        my $left = $all_seconds - $seconds->();
        my ($wrong, $pass) = proof($e, $folder, $_, $left < $most_seconds ? $left : $most_seconds);
        $passed = $pass;
        next if !length $wrong;
        my ($kind, $words) = advice($wrong);
        return $end->($kind eq 'not done' ? 'not done' : 'fail', $kind, $wrong, $words);
    }
    return $end->('pass', 'pass', $passed, '');
}

# One run of the proof in a folder. Returns what is wrong first, or '', and what a pass has shown.
sub proof {
    my ($e, $folder, $run, $seconds, $program) = @_;
    my @flags = (split(' ', $run), $run =~ /--ranks/ ? ('--timeout', 6) : ());
    unlink "$folder/out", "$folder/err";
    my $status = run_limited($folder, $seconds // $most_seconds, $program // program_of($e, $folder), @flags);
    my $wrong = first_wrong($e, $folder, $status);
    my ($shown) = some("$folder/out") =~ /^PASS [^\n(]*\((.*)\)$/m;
    return ($wrong, $shown // 'all tests pass');
}

1;
