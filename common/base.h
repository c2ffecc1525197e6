// base.h: what every program needs before its first tensor: errors that name their cause, the option table,
// printing from one rank, progress, and start-up.
#ifndef BASE_H
#define BASE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define PRINTF_LIKE(text, first) __attribute__((format(printf, text, first)))
#define NO_RETURN                __attribute__((noreturn))
#else
#define PRINTF_LIKE(text, first)
#define NO_RETURN
#endif

// ---- errors ---- Exit statuses: 0 for a PASS verdict, 1 for a FAIL verdict, 2 for wrong usage or a broken
// environment, 3 for an UNPROVEN verdict (report.h). As in a shell, a signal adds 128: 130 when interrupted
// (Ctrl-C), 141 when nobody reads the output any more.
enum { STATUS_PASS = 0, STATUS_FAIL = 1, STATUS_USAGE = 2, STATUS_UNPROVEN = 3, STATUS_UNREAD = 141 };

// Ends the program with one sentence on stderr, "<program>: <sentence>", and STATUS_USAGE.
void fatal(const char *format, ...) PRINTF_LIKE(1, 2) NO_RETURN;

// From now on this process is rank `rank` of `ranks`: say() and progress() print on rank 0 only, and
// fatal() puts the rank before its sentence and passes sentence and status to `end`, which must end all
// ranks. Before this call a program started by mpirun takes its rank from the environment, so that ranks
// other than 0 are silent from the start.
void base_set_rank(int rank, int ranks, void (*end)(const char *sentence, int status));
int base_rank(void);
// How many processes mpirun, of any MPI, or srun started, this one included; 1 without them.
int base_launched(void);

// Adds something that fatal() also does, on the rank that prints its sentence: after printing, each `act` is
// called with the sentence, in the order in which they were added. A fatal() inside act ends the program.
void base_at_fatal(void (*act)(const char *sentence));
// For the `end` of base_set_rank: prints the sentence on stderr and calls those functions.
void base_last_words(const char *sentence);

// Runs `act` and tells whether it would have ended the program by fatal(): returns the sentence, without
// the program's name, or NULL if act returned. Only for checks that own nothing: what act holds when it
// calls fatal() is never freed. Static buffer.
const char *refusal(void (*act)(const void *context), const void *context);

// From now on fatal() puts this text before its sentence ("step 12"); NULL removes it.
void fatal_context(const char *format, ...) PRINTF_LIKE(1, 2);

// The one check macro: if the condition does not hold, it is fatal with the sentence that follows, which
// says what is wrong.
#define CHECK(condition, ...)                 \
    do {                                      \
        if (!(condition)) fatal(__VA_ARGS__); \
    } while (0)

// Host memory, uninitialized, never NULL. The caller frees it with free(). Fatal if the machine or the
// control group has less left than that: Linux would promise the memory, and kill the program once it used
// it.
void *host_alloc(size_t bytes);
// From now on `ranks` processes of this machine, this one included, are taken to ask for the same memory at
// the same time; 1: this one alone, while the others wait.
void host_share(int ranks);
int host_sharers(void);
// Bytes that the machine and this process's control groups have left, counting as free the memory that only
// caches files; INFINITY if not known.
double host_memory_left(void);
// Bytes of memory that this process has written to; memory allocated but never written does not count.
double host_memory_written(void);
// How many cores' worth of time this process's control groups allow it (docker run --cpus): at most
// `cores`, at least 1. With more threads than that, the kernel would stop all of them for a part of each
// period.
int host_cores(int cores);
// The s of "2 ranks"; "" if n is 1.
const char *plural(int64_t n);
// The formatted text in memory of its own, which the caller frees.
char *format_text(const char *format, ...) PRINTF_LIKE(1, 2);

// Whether the word is one of the names, which are separated by blanks.
bool word_among(const char *names, const char *word);

// A text read from a file, made safe to show in a message: at most 99 characters, with '?' for all that is
// not printable ASCII and might command the reader's terminal. Rotates over 4 static buffers.
const char *printable(const char *text);

// ---- start ----

// First call of every main. Remembers the program's name for messages, tunes malloc for large reused
// buffers, picks the thread count (OMP_NUM_THREADS, else what host_cores allows of all cores), and makes
// sure that the BLAS runs its best kernel for this processor. OpenBLAS chooses its kernel when it is
// loaded; if it chose one below what the processor supports and nobody pinned it, the program restarts
// itself once with OPENBLAS_CORETYPE set. Standard streams that were closed are opened on /dev/null, so
// that no file opened later gets their descriptors.
void base_start(int argc, char **argv);
// "OpenBLAS 0.3.21 SkylakeX, 2 threads". Warns once, on stderr, if a kernel below what the processor
// supports was pinned.
const char *base_blas_name(void);
// File name of the running program without its folder.
const char *base_program(void);
// The command line that it was started with; ends with NULL.
char **base_arguments(void);
// Seconds on a monotonic wall clock.
double wall_seconds(void);

// ---- options: one table gives the parser, the defaults and --help ----
typedef enum OptionType {
    OPTION_INT,
    OPTION_REAL,
    OPTION_TEXT,
    OPTION_OUTPUT,  // a TEXT that names a file to write, which is checked at once (files.h)
    OPTION_CHOICE,
    OPTION_FLAG,
    OPTION_HEADING,  // not a flag: in --help its name is the heading of the flags that follow
} OptionType;

typedef struct Option {
    const char *name;  // without the dashes: "micro-batch"
    OptionType type;
    void *target;  // int64_t * | double * | const char ** (TEXT, OUTPUT) | int * (of the choice) | bool *
    const char *standard;  // the default, as a user would type it; NULL: *target stays (FLAG: false)
    double min, max;       // bounds of INT and REAL, inclusive
    // CHOICE: "f64|f32|bf16|f16"; INT, REAL: the unit, or ""; TEXT: its name in --help, "FILE"
    const char *detail;
    const char *help;  // one line
    bool given;        // set by options_parse: the user typed it
} Option;

// Sets every target: first to its default, then to what the user typed ("--name value" or "--name=value").
// For --help prints the table and exits 0. An unknown flag or a value out of bounds is fatal, and the
// sentence names it; it also says if another program of this book has the flag. Targets of type TEXT point
// into argv. `purpose` is the first line of --help; further lines of it are shown as examples.
void options_parse(int argc, char **argv, const char *purpose, Option *table, int count);
// For what must be known before that: the value typed for a flag ("--model"), "" if it has none, NULL if the
// flag is not there.
const char *option_typed(int argc, char **argv, const char *flag);
// The first flag in the table that is one of these names ("dp tp") and was typed, or NULL.
const char *option_given(const Option *table, int count, const char *names);
// Fatal if one of these flags was typed: they mean nothing without `reader`, which would read them.
void options_need(const Option *table, int count, const char *names, const char *reader);

// ---- printing ----
// Prints one line, on rank 0 only; a newline is added if the format has none. When nobody reads the output
// any more (`| head`), all ranks end at once, silently.
void say(const char *format, ...) PRINTF_LIKE(1, 2);
// Columns of the terminal, 100 in a log. Ranks under mpirun take those of the terminal that mpirun prints to.
int terminal_columns(void);
// The text in a color on a terminal, itself in a log or where NO_COLOR is set. Static buffer.
typedef enum Color { COLOR_RED = 31, COLOR_GREEN = 32, COLOR_YELLOW = 33 } Color;
const char *colored(const char *text, Color color);
// A progress line: on a terminal a line that rewrites itself, with a bar and the time left; in a log a
// plain line about every tenth of the way. `done` counts from 1; `text` says something about this step.
void progress(int64_t done, int64_t total, const char *text);
// The same, but on a terminal only, and the line disappears when `done` reaches `total`.
void progress_on_terminal(int64_t done, int64_t total, const char *text);
// 1536 -> "1.54 kB", 2.1e9 -> "2.10 GB" (powers of ten, as in the playbook). Rotates over 8 static buffers.
const char *bytes_text(double bytes);
const char *flops_text(double flops);  // "21.2 GFLOP"

#ifdef __cplusplus
}
#endif
#endif
