// base.h: what every program needs before its first tensor: errors that name their cause, the option table,
// printing from one rank, progress, and a sound start.
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

// ---- errors ---- Exit statuses: 0 a PASS verdict, 1 a FAIL verdict, 2 wrong use or a broken environment,
// 3 an UNPROVEN verdict (report.h); as a shell counts signals, 130 interrupted (Ctrl-C), 141 nobody reads
// the output any more.
enum {
    STATUS_PASS = 0,
    STATUS_FAIL = 1,
    STATUS_USAGE = 2,
    STATUS_UNPROVEN = 3,
    STATUS_INTERRUPTED = 130,
    STATUS_UNREAD = 141
};

// Ends the program with one sentence on stderr, "<program>: <sentence>", and STATUS_USAGE.
void fatal(const char *format, ...) PRINTF_LIKE(1, 2) NO_RETURN;

// This program is rank `rank` of `ranks` from now on: rank 0 alone prints with say() and
// progress(), and fatal() puts the rank before its sentence and hands both to `end`, which must end
// all ranks. Before that a program that mpirun started knows its rank from the environment, so that
// it is silent where it should be.
void base_set_rank(int rank, int ranks, void (*end)(const char *sentence, int status));
int base_rank(void);
// Of how many processes mpirun or srun has started this one: 1 without them.
int base_launched(void);

// Whether `act` would end the program: the sentence, without the program's name, or NULL where it returns.
// For checks that own nothing: what act holds when it is fatal, nobody frees. Static buffer.
const char *refusal(void (*act)(const void *context), const void *context);

// What fatal() says before its sentence from now on: "step 12"; NULL for nothing.
void fatal_context(const char *format, ...) PRINTF_LIKE(1, 2);

// The one check macro: when the condition does not hold, the sentence that follows says
// what broke, and all ends.
#define CHECK(condition, ...)                 \
    do {                                      \
        if (!(condition)) fatal(__VA_ARGS__); \
    } while (0)

// Host memory that is never NULL. The caller frees it with free(). Fatal where the machine, or the control
// group, has not so much left: Linux would promise it and kill the program that believes it.
void *host_alloc(size_t bytes);
// Bytes that the machine, or this process's control group, has left, without the files that it keeps in
// memory; INFINITY where that is not known.
double host_memory_left(void);
// Bytes of this process that it has written to: memory that was only asked for is not there yet.
double host_memory_written(void);
// Of so many cores, as many as this process's control groups give it the time of (docker run --cpus), at
// least 1: more threads than that would stand still together for a part of each period.
int host_cores(int cores);
// The s of "2 ranks": "" for 1.
const char *plural(int64_t n);
// A formatted string of its own. The caller frees it.
char *format_text(const char *format, ...) PRINTF_LIKE(1, 2);

// A text from a file as a sentence may show it, without what would command the reader's terminal, and of at
// most 99 letters. Rotates over 4 static buffers.
const char *printable(const char *text);

// ---- start ----

// First call of every main. Remembers the program's name for messages, tunes malloc for large reused
// buffers, picks the thread count (OMP_NUM_THREADS, else what host_cores leaves of all cores), and makes
// sure that the BLAS runs its best kernel for this processor: OpenBLAS chooses when it is loaded, so when it
// chose below what the processor has and nobody pinned it, the program starts itself once more with
// OPENBLAS_CORETYPE set. Standard streams that were closed are opened on /dev/null, so that no file of ours
// takes their numbers.
void base_start(int argc, char **argv);
// "OpenBLAS 0.3.21 SkylakeX, 2 threads"; a pinned kernel below the processor's is warned of
// here, once, on stderr.
const char *base_blas_name(void);
// File name of the running program without its folder.
const char *base_program(void);
// Seconds on a monotonic wall clock.
double wall_seconds(void);

// ---- options: one table makes the parser, the defaults and --help ----
typedef enum OptionType {
    OPTION_INT,
    OPTION_REAL,
    OPTION_TEXT,
    OPTION_OUTPUT,  // a TEXT, the name of a file to write; whether that works is tried at once (files.h)
    OPTION_CHOICE,
    OPTION_FLAG,
    OPTION_HEADING,  // no flag: its name stands above those that follow, in --help
} OptionType;

typedef struct Option {
    const char *name;  // without the dashes: "micro-batch"
    OptionType type;
    void *target;  // int64_t * | double * | const char ** (TEXT, OUTPUT) | int * (of the choice) | bool *
    const char *standard;  // the default, as one would type it; NULL: leaves *target alone (FLAG: false)
    double min, max;       // bounds of INT and REAL, inclusive
    const char *
        detail;  // CHOICE: "f64|f32|bf16|f16"; INT, REAL: the unit, or ""; TEXT: its name in --help, "FILE"
    const char *help;  // one line
    bool given;        // set by options_parse: the user typed it
} Option;

// Fills every target: first the defaults, then what was typed ("--name value" or "--name=value"). Prints
// --help from the same table and exits 0. Anything unknown or out of bounds is fatal and named; a name that
// other programs of this book have, and this one has not, is told so. Targets of TEXT point into argv.
// purpose is one line of --help; further lines of it are shown as examples.
void options_parse(int argc, char **argv, const char *purpose, Option *table, int count);
// The first flag of the table that was typed and is one of these names ("dp tp"), or NULL.
const char *option_given(const Option *table, int count, const char *names);
// Refuses those of these flags that were typed: without the reader nothing would read them.
void options_need(const Option *table, int count, const char *names, const char *reader);

// ---- printing ----
// One line, from one rank: rank 0 prints, the others are silent. The newline is added
// where the format has none. When nobody reads any more (`| head`), all ranks end at once, without a word.
void say(const char *format, ...) PRINTF_LIKE(1, 2);
// Columns of the terminal; 100 in a log. Ranks know it from the program that started them.
int terminal_columns(void);
// The text in a color on a terminal, itself in a log or where NO_COLOR is set. Static buffer.
typedef enum Color { COLOR_RED = 31, COLOR_GREEN = 32, COLOR_YELLOW = 33 } Color;
const char *colored(const char *text, Color color);
// A progress line: on a terminal it rewrites itself with a bar and the time left; in a log a plain line
// about every tenth of the way. `done` counts from 1; `text` is what to say about this step.
void progress(int64_t done, int64_t total, const char *text);
// The same for work of which a log says nothing: the line is gone when `done` has reached `total`.
void progress_on_terminal(int64_t done, int64_t total, const char *text);
// 1536 -> "1.54 kB", 2.1e9 -> "2.10 GB" (powers of ten, as the playbook counts). Rotates
// over 8 static buffers.
const char *bytes_text(double bytes);
const char *flops_text(double flops);  // "21.2 GFLOP"

#ifdef __cplusplus
}
#endif
#endif
