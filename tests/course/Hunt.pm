# Hunt.pm: bug hunts. One of the bugs from tests/mutants/ is planted in a copy, and its symptoms are shown.
package Hunt;
use strict;
use warnings;
use Digest::MD5 'md5_hex';
use Exporter 'import';
use File::Basename;
use File::Path qw(make_path remove_tree);
use Grade;
use Source;
our @EXPORT = qw(hunt answer graded_hunts bugs);

# Bugs that lie in a single file, one that some exercise's proof runs: chapter by chapter, and within one in an
# order that gives no hint where they are. Two mutants may be one edit, for two tests; they are one bug.
sub bugs {
    my (@exercises) = @_;
    my (%proof, %seen, @all);
    for (@exercises) { push @{ $proof{ $_->{file} } }, $_ }
    for my $table (glob 'tests/mutants/[0-9]*.txt') {
        for my $entry (split /^(?=name: )/m, content($table)) {
            my ($name) = $entry =~ /^name: +(\S+)/ or next;
            my @files = $entry =~ /^file: +(\S+)/mg;
            my ($bug) = $entry =~ /^bug: +(.*)/m;
            my ($edit) = $entry =~ /^(file: .*)/ms;
            next if @files != 1 || !$proof{ $files[0] } || $seen{ $edit =~ s/\s+/ /gr }++;
            push @all, { name => $name, file => $files[0], bug => $bug, exercises => $proof{ $files[0] } };
        }
    }
    return sort {
        chapter_of($a) cmp chapter_of($b) || md5_hex($a->{name}) cmp md5_hex($b->{name})
    } @all;
}

sub chapter_of { return substr $_[0]{file}, 0, 2 }

# A line for each chapter: "chapter 02 has 51 to 83".
sub numbers {
    my (@all) = @_;
    my (%first, %last);
    for my $n (1 .. @all) {
        $first{ chapter_of($all[$n - 1]) } //= $n;
        $last{ chapter_of($all[$n - 1]) } = $n;
    }
    return join '', map { "    chapter $_ has $first{$_} to $last{$_}\n" } sort keys %first;
}

sub folder_of { return "$Grade::build/hunt/$_[0]" }

# The first and the last line of the copy that differ from the book's file.
sub place_of {
    my ($file, $folder) = @_;
    my @right = split /\n/, content($file), -1;
    my @wrong = split /\n/, content("$folder/$file"), -1;
    my $first = 0;
    $first++ while $first < @wrong && $first < @right && $wrong[$first] eq $right[$first];
    my $same = 0;
    my $most = (@wrong < @right ? @wrong : @right) - $first;
    $same++ while $same < $most && $wrong[-1 - $same] eq $right[-1 - $same];
    my $last = @wrong - $same;
    return ($first + 1, $last > $first ? $last : $first + 1);
}

# Plants a bug in a copy and runs proofs until one fails. Returns that run and what was wrong first.
sub symptoms {
    my ($bug, $folder) = @_;
    remove_tree($folder);
    make_path($folder);
    system('cp', '-r', 'common', glob('0*_*'), $folder) == 0 or die "the copy cannot be made\n";
    system('tests/mutants/run', '--plant', $bug->{name}, $folder) == 0 or die "$bug->{name} does not fit\n";
    for my $e (@{ $bug->{exercises} }) {
        next if !can_build($e) || compiled($e, "$folder/$bug->{file}", $folder) || linked($e, $folder);
        for my $run (@{ $e->{run} }) {
            my ($wrong) = proof($e, $folder, $run);
            return (join(' ', basename($e->{proof}), split ' ', $run), $wrong) if length $wrong;
        }
    }
    return ();
}

# From a program's output: the first rows that are wrong, below the heading of their table and the titles of
# its columns; nothing if the program ended before it could compare.
sub where_it_shows {
    my @lines = split /\n/, $_[0];
    my ($first) = grep { $lines[$_] =~ /^\s.*\bFAIL\b/ } 0 .. $#lines;
    return () if !defined $first;
    $first-- if $lines[$first] =~ /^\s+FAIL:/;    # a kernel's: show the row above it
    my ($top, $end) = ($first, $first);
    $top-- while $top && $lines[$top - 1] =~ /\S/;
    $end++ while $end < $#lines && $end < $first + 7 && $lines[$end + 1] =~ /\S/;
    my @above = map { $lines[$_] } $top .. $first - 1;
    my ($heading) = grep { /^\S.*(?::$| against )/ } reverse @above;
    my ($titles) = grep { /^\s{10}|^\s\D+$/ } reverse @above;
    return (grep({ defined } $heading, $titles), @lines[$first .. $end]);
}

sub bug_numbered {
    my ($n, @all) = @_;
    die "hunt which bug? make hunt N=1, to N=" . @all . ":\n" . numbers(@all)
        if !defined $n || $n !~ /^\d+$/ || !$n || $n > @all;
    return $all[$n - 1];
}

sub hunt {
    my ($n, @exercises) = @_;
    my @all = bugs(@exercises);
    bug_numbered($n, @all);
    prepare(@exercises);
    my $folder = abs_folder(folder_of($n));
    # If these small runs do not show bug n, the next one that they do show takes its place.
    for my $try (0 .. 9) {
        my $bug = $all[($n - 1 + $try) % @all];
        my ($run, $wrong) = symptoms($bug, $folder) or next;
        my ($first, $last) = place_of($bug->{file}, $folder);
        store("$folder/.answer", join("\n", $bug->{name}, $bug->{file}, $first, $last, $bug->{bug}) . "\n");
        print "One or a few lines of a chapter are wrong in the copy below " . folder_of($n)
            . "/. The book's own\nprogram passes this run; the copy's fails:\n\n";
        print '$ ' . folder_of($n) . "/bin/$run\n";
        print "    $_\n" for words($wrong, 100);
        my @table = where_it_shows(some("$folder/out"));
        print "\nWhere its output is wrong first:\n\n" if @table;
        print "    $_\n" for @table;
        print "\nWhich file, and which line? make hunt-answer N=$n AT=chapter/file.c:LINE\n";
        return 0;
    }
    die "none of ten bugs from $n on shows in the proofs' small runs\n";
}

sub abs_folder { return $_[0] =~ m{^/} ? $_[0] : Cwd::abs_path('.') . "/$_[0]" }

# "pass" and the answer, or "fail" and which part of the place is right; "answer" and the answer if no place
# is given; "not done" if nobody knows the answer yet.
sub judged {
    my ($n, $at) = @_;
    my ($name, $file, $first, $last, $bug) = split /\n/, content(folder_of($n) . '/.answer') // '';
    return ('not done', "it has not been started here: make hunt N=$n") if !$bug;
    my $answer = "$file:$first" . ($last > $first ? "-$last" : '') . ": $bug";
    return ('answer', $answer) if !defined $at;
    my ($where, $line) = $at =~ m{^\s*(\S+?):(\d+)\s*$} or die "AT=$at: a place is chapter/file.c:LINE\n";
    my $same = $where eq $file || $where eq basename($file);
    return ('fail', 'the bug is in another file') if !$same;
    return ('fail', 'the file is right, but the line is not') if $line < $first - 2 || $line > $last + 2;
    return ('pass', $answer);
}

sub answer {
    my ($n, $at) = @_;
    die "answer to which hunt? make hunt-answer N=1 AT=chapter/file.c:LINE\n" if !defined $n;
    my ($status, $words) = judged($n, $at);
    die "hunt $n: $words\n" if $status eq 'not done';
    print { pass => 'PASS ', fail => 'FAIL ', answer => '' }->{$status} . "hunt $n: $words\n";
    return $status eq 'fail' ? 1 : 0;
}

# Grades a student's answers, lines such as "12 chapter/file.c:LINE". Lines that begin with # are comments.
sub graded_hunts {
    my ($file) = @_;
    my @results;
    for my $line (split /\n/, content($file) // '') {
        next if $line =~ /^\s*(#|$)/;
        my ($n, $at) = $line =~ /^\s*(\d+)\s+(\S+:\d+)\s*$/;
        my ($status, $words) = defined $n ? judged($n, $at)
            : ('fail', "a line is N chapter/file.c:LINE, and this is not: $line");
        $n //= 'line';
        push @results, { exercise => "hunt $n", file => $file, status => $status, kind => 'hunt',
            first => $words, advice => '', run => '', seconds => 0 };
    }
    return @results;
}

1;
