# Check.pm: that the exercises are sound: a stub compiles and is "not done", an empty body fails, and what
# was taken out comes back to the letter and passes.
package Check;
use strict;
use warnings;
use Cwd 'abs_path';
use Exporter 'import';
use File::Path 'make_path';
use Grade;
use Source;
our @EXPORT = qw(check);

# A body that does nothing.
sub empty {
    my ($f) = @_;
    return $f->{type} eq 'void' ? "{\n}" : "{\n    return ($f->{type}){0};\n}";
}

# What is wrong with an exercise, or nothing. The book's own program, which make has built, takes the
# exercise's first run: %$passed has the runs that have passed already.
sub faults {
    my ($e, $folder, $runs, $passed) = @_;
    my @faults;
    my $original = content($e->{file});
    my $f = find_function($original, $e->{function}) or return "$e->{file} has no $e->{function}";
    my $body = substr $original, $f->{open}, $f->{close} - $f->{open} + 1;
    my $stub = stub_of($original, $f, $e->{task});
    my $file = "$folder/$e->{name}.c";
    make_path($folder);

    store($file, $stub);
    my $unfit = unfit($e, $file);
    push @faults, 'the stub is not "not done"' if !$unfit || $unfit->{status} ne 'not done';
    my $again = find_function($stub, $e->{function});
    push @faults, 'the body does not come back to the letter'
        if with_body($stub, $again, $body) ne $original;
    return @faults if !$runs;
    my $error = compiled($e, $file, $folder, '-O0 -g0');
    push @faults, "the stub does not build: $error" if length $error;

    store($file, with_body($original, $f, empty($f)));
    my %first = (%$e, run => [$e->{run}[0]]);
    my $result = unfit($e, $file) // grade(\%first, $file, $folder, '-O0 -g0');
    push @faults, "an empty body ends as $result->{status}: $result->{first}"
        if $result->{status} ne 'fail' || $result->{kind} eq 'compile' || !length $result->{first};

    my $program = abs_path("$Grade::build/$e->{proof}");
    if (!$passed->{"$program $e->{run}[0]"}++) {
        my ($wrong) = proof($e, $folder, $e->{run}[0], undef, $program);
        push @faults, "the original fails: $wrong" if length $wrong;
    }
    return @faults;
}

# All files are looked at; of $parts parts of the exercises, which take turns by the day, one is built and
# run.
sub check {
    my ($parts, @exercises) = @_;
    my (%passed, $bad);
    my $turn = int(time / 86400) % $parts;
    my %runs = map { ($exercises[$_]{name} => $_ % $parts == $turn) } 0 .. $#exercises;
    prepare(grep { $runs{ $_->{name} } } @exercises);
    for my $e (@exercises) {
        my $folder = abs_path('.') . "/$Grade::build/grade/check/$e->{name}";
        my @faults = faults($e, $folder, $runs{ $e->{name} }, \%passed);
        print @faults ? "not ok $e->{name}: " . join('; ', @faults) . "\n" : "ok $e->{name}\n";
        $bad += @faults;
    }
    return $bad ? 1 : 0;
}

1;
