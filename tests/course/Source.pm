# Source.pm: the table of exercises, and functions in C files.
#
# Finding where a function ends takes no compiler: comments, strings, characters and directives are blanked,
# and braces are counted in what is left. The sources carry no marks.
package Source;
use strict;
use warnings;
use Exporter 'import';
our @EXPORT = qw(content store words exercises exercise_named file_of is_cuda find_function stub_of
    with_body between code_of);

sub content {
    my ($file) = @_;
    local $/;
    open my $in, '<', $file or return undef;
    my $text = <$in> // '';
    $text =~ s/\r\n/\n/g;
    return $text;
}

sub store {
    my ($file, $text) = @_;
    open my $out, '>', $file or die "$file: $!\n";
    print $out $text;
    close $out or die "$file: $!\n";
}

# Text wrapped at so many columns.
sub words {
    my ($text, $columns) = @_;
    my @lines = ('');
    for my $word (split ' ', $text) {
        push @lines, '' if length $lines[-1] && length("$lines[-1] $word") > $columns;
        $lines[-1] .= length $lines[-1] ? " $word" : $word;
    }
    return @lines;
}

# ---- the table ----

my @fields = qw(file function minutes task hint read reach);
my @optional = qw(proof then predicts counted within);

# Exercises in the order of the table, each with name, the fields, proof (a program below build/), run (its
# flags, one element for each run) and then (a unit test below build/).
sub exercises {
    my ($table) = @_;
    my (@all, $last);
    open my $in, '<', $table or die "$table: $!\n";
    while (my $line = <$in>) {
        chomp $line;
        if ($line =~ /^name: +(\S+)$/) { push @all, { name => $1, run => [] }; undef $last }
        elsif (@all && $line =~ /^run: *(.*)$/) { push @{ $all[-1]{run} }, $1; undef $last }
        elsif (@all && $line =~ /^(\w+): +(.*\S)$/ && grep { $_ eq $1 } @fields, @optional) {
            $all[-1]{ $last = $1 } = $2;
        }
        elsif ($last && $line =~ /^ +(.*\S)$/) { $all[-1]{$last} .= " $1" }
        elsif ($line !~ /^(#.*)?$/) { die "$table:$.: neither a field nor the rest of one: $line\n" }
    }
    my %seen;
    for my $e (@all) {
        my @lacks = grep { !defined $e->{$_} } @fields;
        die "$table: $e->{name} lacks @lacks\n" if @lacks;
        die "$table: $e->{name} stands there twice\n" if $seen{ $e->{name} }++;
        ($e->{proof} = $e->{file}) =~ s/\.cu?$// if !$e->{proof};
        push @{ $e->{run} }, '' if !@{ $e->{run} };
    }
    return @all;
}

sub exercise_named {
    my ($name, @all) = @_;
    my ($found) = grep { $_->{name} eq $name } @all;
    return $found if $found;
    my @near = map { $_->{name} } grep { index($_->{name}, substr $name, 0, 3) >= 0 } @all;
    die "there is no exercise $name" . (@near ? "; there is " . join ', ', @near : '') .
        ". `make exercises` lists all.\n";
}

sub is_cuda { return $_[0]->{file} =~ /\.cu$/ }

# The name of a student's file, with the suffix of the chapter's file.
sub file_of { return $_[0]->{name} . (is_cuda($_[0]) ? '.cu' : '.c') }

# ---- C, and C++ as kernels use it ----

# The text with all but code blanked out, so that positions stay the same.
sub code_of {
    my ($text) = @_;
    my $blank = sub { my $t = shift; $t =~ s/[^\n]/ /g; $t };
    $text =~ s{(//(?:\\\n|[^\n])*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')}{$blank->($1)}gse;
    $text =~ s{^([ \t]*#(?:\\\n|[^\n])*)}{$blank->($1)}gme;
    return $text;
}

# Where a function is defined: begin (of its type), open and close (its braces), and its type; or undef.
sub find_function {
    my ($text, $name) = @_;
    my $code = code_of($text);
    my ($depth, $begin, $open) = (0, 0, 0);
    while ($code =~ /([{};])/g) {
        my $at = $-[1];
        if ($1 eq '{') { $open = $at if !$depth++; next }
        $depth-- if $1 eq '}';
        next if $depth;
        if ($1 eq '}' && substr($code, $begin, $open - $begin) =~ /^(\s*)(.*?)\b\Q$name\E\s*\(.*\)\s*$/s) {
            my ($space, $type) = ($1, $2);
            $type =~ s/\btemplate\s*<[^<>]*>|\b__launch_bounds__\s*\([^()]*\)//g;
            $type =~ s/\b(static|inline|extern|constexpr|__(global|device|host)__)(?=\s|$)//g;
            $type =~ s/^\s+|\s+$//g;
            $type =~ s/\s+/ /g;
            return { begin => $begin + length $space, open => $open, close => $at, type => $type }
                if $type =~ /^\w[\w ]*\**$/;
        }
        $begin = $at + 1;
    }
    return undef;
}

sub with_body {
    my ($text, $f, $body) = @_;
    return substr($text, 0, $f->{open}) . $body . substr($text, $f->{close} + 1);
}

# The text with TODO("…") as the function's body; the task is split into strings that C concatenates.
sub stub_of {
    my ($text, $f, $task) = @_;
    s/([\\"])/\\$1/g for $task;
    my @lines = map { "\"$_ \"" } words($task, 90);
    $lines[-1] =~ s/ "$/"/;
    return with_body($text, $f, "{\n    TODO(" . join("\n         ", @lines) . ");\n}");
}

# Whether a text begins with another one, apart from white space. Returns how much of the text that is; or -1,
# the number of the other text's line at which they part, and that of the text's. To compare ends, the caller
# reverses both.
sub begins {
    my ($text, $with) = @_;
    my ($at, $line) = (0, 1);
    my $parts = sub { return (-1, $line, 1 + substr($text, 0, $at) =~ tr/\n//) };
    while ($with =~ /(\s+)|(\S)/g) {
        if (defined $1) { $line += ($1 =~ tr/\n//); next }
        my $c = $2;
        $at++ while $at < length $text && substr($text, $at, 1) =~ /\s/;
        return $parts->() if $at >= length $text || substr($text, $at, 1) ne $c;
        $at++;
    }
    return ($at, $line);
}

# What a student's file has between the lines before the function and those after it: the function, and
# helpers above it. Else undef, and a sentence that names the first line that is not as in the original.
sub between {
    my ($original, $f, $mine) = @_;
    my $before = substr $original, 0, $f->{begin};
    my $behind = substr $original, $f->{close} + 1;
    my @lines = split /\n/, $original, -1;
    my @own = split /\n/, $mine, -1;
    my ($from, $line, $own_line) = begins($mine, $before);
    return (undef, difference_at(\@lines, $line, \@own, $own_line)) if $from < 0;
    my ($length, $up, $own_up) = begins(scalar reverse($mine), scalar reverse $behind);
    return (undef, difference_at(\@lines, @lines - $up + 1, \@own, @own - $own_up + 1)) if $length < 0;
    return (undef, 'the function is missing') if $from + $length > length $mine;
    return substr $mine, $from, length($mine) - $length - $from;
}

# Two texts part at these lines, which count from 1. If the original's line is there all the same, the other
# one has been inserted or changed.
sub difference_at {
    my ($lines, $line, $own, $own_line) = @_;
    my ($text, $own_text) = map { s/^\s+|\s+$//gr } $lines->[$line - 1], $own->[$own_line - 1] // '';
    my $is_there = grep { s/^\s+|\s+$//gr eq $text } @$own;
    return "line $own_line of the file is not in the original: $own_text" if $is_there && length $own_text;
    my $ends = @$lines - $line < 2 && $own_line >= @$own - 1 ? ': does the file end too early?' : '';
    return "line $line of the original is missing or changed: $text$ends";
}

1;
