# Check.pm: checks that the exercises are sound: a stub compiles and is "not done", an empty body fails, and
# the body that was taken out can be put back exactly, and passes.
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
    my ($e, $f) = @_;
    return "{\n    return {};\n}" if is_cuda($e) && $f->{type} ne 'void';
    return $f->{type} eq 'void' ? "{\n}" : "{\n    return ($f->{type}){0};\n}";
}

# Builds a file that is fit, without optimization. Returns what the first run says is wrong, or ''; undef and
# the compiler's error if it does not build.
sub first_fault {
    my ($e, $file, $folder) = @_;
    my $error = compiled($e, $file, $folder, '-O0 -g0') || linked($e, $folder);
    return (undef, $error) if length $error;
    return proof($e, $folder, $e->{run}[0]);
}

# Whether kernels.t runs the original like this: it runs all kernels without flags, and some with these.
sub is_run_by_kernels {
    my ($e) = @_;
    return is_cuda($e) && (!length $e->{run}[0]
        || content('tests/programs/kernels.t') =~ /^passes .* \Q$e->{proof} $e->{run}[0]\E$/m);
}

# What is wrong with an exercise, or nothing. The original is the book's own program, which make has built; it
# makes the exercise's first run. %$passed has the runs that have already passed.
sub faults {
    my ($e, $folder, $passed) = @_;
    my @faults;
    my $original = content($e->{file});
    my $f = find_function($original, $e->{function}) or return "$e->{file} has no $e->{function}";
    my $body = substr $original, $f->{open}, $f->{close} - $f->{open} + 1;
    my $stub = stub_of($original, $f, $e->{task});
    my $file = "$folder/" . file_of($e);
    make_path($folder);

    store($file, $stub);
    my $unfit = unfit($e, $file);
    push @faults, 'the stub is not "not done"' if !$unfit || $unfit->{status} ne 'not done';
    my $again = find_function($stub, $e->{function});
    push @faults, 'the body does not come back to the letter'
        if with_body($stub, $again, $body) ne $original;
    my $error = compiled($e, $file, $folder, '-fsyntax-only');
    push @faults, "the stub does not build: $error" if length $error;

    store($file, with_body($original, $f, empty($e, $f)));
    push @faults, 'an empty body does not fit the sources' if unfit($e, $file);
    ($Grade::wait_seconds, $Grade::first_is_enough) = (1, 1);
    my ($wrong, $why) = first_fault($e, $file, $folder);
    push @faults, "an empty body does not build: $why" if !defined $wrong;
    push @faults, 'an empty body passes' if defined $wrong && !length $wrong;

    my $program = abs_path("$Grade::build/$e->{proof}");
    if (!$passed->{"$program $e->{run}[0]"}++ && !is_run_by_kernels($e)) {
        ($Grade::wait_seconds, $Grade::first_is_enough) = (60, 0);
        ($wrong) = proof($e, $folder, $e->{run}[0], undef, $program);
        push @faults, "the original fails: $wrong" if length $wrong;
    }
    return @faults;
}

sub check {
    my (@exercises) = @_;
    my (%passed, $bad);
    prepare(@exercises);
    for my $link (grep { defined } @Grade::command{qw(link link-cu)}) {  # nobody debugs these programs
        my $gold = system("$link -fuse-ld=gold -Wl,--version >/dev/null 2>&1") == 0;
        $link .= ' -Wl,--strip-debug' . ($gold ? ' -fuse-ld=gold' : '');
    }
    for my $e (@exercises) {
        my $folder = abs_path('.') . "/$Grade::build/grade/check/$e->{name}";
        my @faults = can_build($e) ? faults($e, $folder, \%passed) : ();
        my $why = can_build($e) ? '' : ' # SKIP g++ or libboost-context-dev is not installed';
        print @faults ? "not ok $e->{name}: " . join('; ', @faults) . "\n" : "ok $e->{name}$why\n";
        $bad += @faults;
    }
    return $bad ? 1 : 0;
}

1;
