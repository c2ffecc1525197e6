// launch.c: the parent of mpirun. It makes up for several faults: mpirun answers every signal with status 1,
// which is the status of a failed check; being quiet, it says nothing about ranks that die before they have
// met, nor about output that a full disk does not take; when it or this parent is killed, the memory that
// its ranks shared remains; if a rank dies in the first moments of a start, it may wait for ever for
// children that it does not have; and as it ends it may take away the folder in which another mpirun is
// just starting. A user who starts mpirun by hand has only --timeout SECONDS against the waiting.
#include "launch.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base.h"

#define LAUNCHER "ULTRASCALE_LAUNCHER"  // tells the ranks its process id

static volatile sig_atomic_t ended_by, spoken;
static volatile pid_t mpirun;
static bool hung, own_group;
static bool lost;                 // output could not be written
static char *shared, *temporary;  // the run's folders (make_folders)

// A signal from a terminal also reaches mpirun, unless that has a process group of its own; one from
// another process (kill, sigqueue: codes up to 0) reaches only us.
static void on_end(int signal, siginfo_t *info, void *unused) {
    (void)unused;
    int error = errno;
    ended_by = signal;
    if ((own_group || info->si_code <= 0) && mpirun > 0) kill(mpirun, signal);
    errno = error;
}

static void on_word(int signal) {
    (void)signal;
    spoken = 1;
}

static void wake(int signal) { (void)signal; }  // ends a sleep at once

void launcher_hears(void) {
    const char *launcher = getenv(LAUNCHER);
    pid_t process = launcher ? (pid_t)atoi(launcher) : 0;
    if (process > 1) kill(process, SIGUSR1);  // 0 and less would be many processes
}

// The reader of our output has left: the ranks notice that too, and end in good order.
static void leave_it_to_the_ranks(const char *sentence, int status) {
    (void)status;
    while (!*sentence) pause();
}

// Whether the process runs: a zombie only waits to be reaped.
static bool lives(int process) {
    char path[64], state = 'Z';
    snprintf(path, sizeof path, "/proc/%d/stat", process);
    FILE *file = fopen(path, "r");
    if (file && fscanf(file, "%*d (%*[^)]) %c", &state) != 1) state = 'Z';
    if (file) fclose(file);
    return state != 'Z';
}

// ---- the run's folders ----
//
// A run has one in /dev/shm, for what its ranks share, and one for temporary files. Its launcher keeps both
// locked: one that nobody has locked was left behind when a launcher was killed together with its mpirun and
// ranks. Its mode, MARK, tells it from a user's own folder of such a name, which is never removed.
#define FOLDER "ultrascale-run-"
enum { MARK = S_ISVTX | S_IRWXU };

static int remove_one(const char *path, const struct stat *status, int type, struct FTW *where) {
    (void)status, (void)type, (void)where;
    remove(path);
    return 0;
}

static void remove_folder(const char *path) {
    enum { OPEN = 8 };  // folders at a time
    if (path) nftw(path, remove_one, OPEN, FTW_DEPTH | FTW_PHYS | FTW_MOUNT);
}

static void remove_folders(void) {
    remove_folder(shared);
    remove_folder(temporary);
}

static void remove_if_abandoned(const char *path) {
    int file = open(path, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    struct stat status;
    if (file < 0) return;
    if (flock(file, LOCK_EX | LOCK_NB) == 0 && fstat(file, &status) == 0 && status.st_uid == geteuid() &&
        (status.st_mode & ALLPERMS) == MARK)
        remove_folder(path);
    close(file);
}

static void remove_abandoned(const char *place) {
    DIR *folder = opendir(place);
    for (struct dirent *entry; folder && (entry = readdir(folder));) {
        if (strncmp(entry->d_name, FOLDER, strlen(FOLDER)) != 0) continue;
        char *path = format_text("%s/%s", place, entry->d_name);
        remove_if_abandoned(path);
        free(path);
    }
    if (folder) closedir(folder);
}

// Returns the path of a new folder there, locked until this process ends; NULL if none can be made.
static char *make_folder(const char *place) {
    remove_abandoned(place);
    char *path = format_text("%s/" FOLDER "XXXXXX", place);
    int file = mkdtemp(path) ? open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;
    if (file >= 0 && flock(file, LOCK_EX) == 0 && fchmod(file, MARK) == 0) return path;  // in this order
    rmdir(path);
    free(path);
    return NULL;
}

// Where one cannot be made, as without /dev/shm, Open MPI chooses a place itself.
static void make_folders(const char *place) {
    shared = make_folder("/dev/shm");
    if (shared) {
        setenv("OMPI_MCA_btl_vader_backing_directory", shared, 0);
        setenv("OMPI_MCA_osc_sm_backing_directory", shared, 0);
    }
    // All mpiruns of Open MPI 4 share one folder in TMPDIR, and the last to end removes it: one that is about
    // to make its own in there would end with status 1.
    temporary = make_folder(place);
    if (temporary) setenv("TMPDIR", temporary, 1);
}

// ---- what mpirun says ----

// mpirun puts its own messages between lines of dashes; all else on its stderr is from the ranks. That of
// Open MPI 4 can be told to be quiet, that of Open MPI 5 cannot: its messages are held back, and shown if
// nobody else says why a run has ended.
//
// Two kinds of lines of Open MPI 5 have no such frame, and begin with a bracket: those of PMIx, which are
// held back too, and those that libevent may write when a process is killed, which are dropped.
enum { FRAME = 74, LINE = 512, CHUNK = 4096 };

static struct {
    bool framed;  // within lines of dashes
    bool passed;  // some output of the ranks has been passed on
    int dashes;  // in a line that has nothing else so far; else -1
    size_t own_length, rest_length, line_length;
    char own[CHUNK], rest[CHUNK + FRAME + LINE], line[LINE];  // line: one that begins with a bracket, so far
} said;

static void take(bool own, char c) {
    if (!own) said.rest[said.rest_length++] = c;
    else if (said.own_length + 1 < sizeof said.own) said.own[said.own_length++] = c;
}

static void take_line(void) {
    said.line[said.line_length] = '\0';
    bool dropped = strncmp(said.line, "[warn] Epoll ", 13) == 0;
    bool own = said.framed || strstr(said.line, "] PMIX ERROR: ");
    for (size_t i = 0; !dropped && i < said.line_length; i++) take(own, said.line[i]);
    said.line_length = 0;
}

static void sort_out(const char *text, size_t length) {
    for (size_t i = 0; i < length; i++) {
        if (!text[i]) continue;  // it ends its messages with one
        bool ends = text[i] == '\n';
        if (said.line_length || (said.dashes == 0 && text[i] == '[')) {
            said.line[said.line_length++] = text[i];
            if (!ends && said.line_length + 1 < LINE) continue;
            take_line();
            said.dashes = ends ? 0 : -1;
            continue;
        }
        bool begins = said.dashes >= 0;
        if (begins && text[i] == '-' && said.dashes < FRAME) {
            said.dashes++;
        } else if (ends && said.dashes == FRAME) {
            said.framed = !said.framed;
            said.dashes = 0;
        } else {
            for (; said.dashes > 0; said.dashes--) take(said.framed, '-');
            take(said.framed, text[i]);
            said.dashes = ends ? 0 : -1;
        }
    }
}

// Passes on all that has come; false at the end of the pipe.
static bool pass_on(int pipe) {
    char text[CHUNK];
    for (ssize_t got; (got = read(pipe, text, sizeof text)) >= 0 || errno == EINTR;) {
        if (got == 0 && !said.line_length) return false;
        if (got < 0) continue;
        said.rest_length = 0;
        if (got) sort_out(text, (size_t)got);
        else take_line();  // its end will not come
        // To a second signal, such as `timeout` sends, mpirun only answers that it is already ending.
        for (size_t done = 0; !ended_by && done < said.rest_length;) {
            ssize_t written = write(STDERR_FILENO, said.rest + done, said.rest_length - done);
            if (written < 0 && errno != EINTR) break;
            if (written > 0) done += (size_t)written, said.passed = true;
        }
    }
    return true;
}

// Whether stdout is a file, or a device other than a terminal. A pipe's reader and a terminal are left to
// mpirun: the ranks watch whether a reader leaves, and ask for the terminal's width.
static bool writes_to_file(void) {
    struct stat status;
    if (fstat(STDOUT_FILENO, &status) != 0) return false;
    return S_ISREG(status.st_mode) || (S_ISCHR(status.st_mode) && !isatty(STDOUT_FILENO));
}

// Writes all that has come to stdout; false at the end of the pipe.
static bool write_out(int pipe) {
    char text[CHUNK];
    for (ssize_t got; (got = read(pipe, text, sizeof text)) >= 0 || errno == EINTR;) {
        if (got == 0) return false;
        for (ssize_t done = 0, written; done < got && !lost; done += written > 0 ? written : 0) {
            written = write(STDOUT_FILENO, text + done, (size_t)(got - done));
            lost = written < 0 && errno != EINTR;
        }
    }
    return true;
}

// Whether mpirun has ranks that run; true if that cannot be found out.
static bool has_ranks(void) {
    char path[64];
    bool some = false;
    snprintf(path, sizeof path, "/proc/%d/task/%d/children", (int)mpirun, (int)mpirun);
    FILE *file = fopen(path, "r");
    if (!file) return true;
    for (int child; !some && fscanf(file, "%d", &child) == 1;) some = lives(child);
    fclose(file);
    return some;
}

// Whether the ranks' output can be written: its reader may pause (Ctrl-S, less).
static bool output_flows(void) {
    struct pollfd out[] = {{.fd = STDOUT_FILENO, .events = POLLOUT},
                           {.fd = STDERR_FILENO, .events = POLLOUT}};
    return poll(out, 2, 0) == 2;
}

// Returns mpirun's status, as from waitpid. If a rank dies in the first moments of a start, mpirun (Open
// MPI 4.1.4) may hang: so it is ended if all its ranks have ended for a while and its output is not
// blocked.
static int wait_for_end(int words, int output) {
    enum { PATIENCE = 5, LOOKS = 10 };  // seconds; looks in each
    bool had = false;
    struct pollfd come[] = {{.fd = words, .events = POLLIN}, {.fd = output, .events = POLLIN}};
    for (int without = 0, status;;) {
        bool ended = waitpid(mpirun, &status, WNOHANG) == mpirun;
        if (come[0].fd >= 0 && !pass_on(words)) come[0].fd = -1;
        if (come[1].fd >= 0 && !write_out(output)) come[1].fd = -1;
        if (ended) return mpirun = 0, status;  // its process id may soon be reused
        bool some = has_ranks();
        had = had || some;
        without = had && !some && output_flows() ? without + 1 : 0;
        if (without == PATIENCE * LOOKS) hung = kill(mpirun, SIGKILL) == 0;
        poll(come, 2, 1000 / LOOKS);
    }
}

static bool is_of_signal(int status) { return status > 128 && status < 128 + NSIG; }

// Ranks announce their verdict (launcher_hears): without that, a status is mpirun's own.
static bool nobodys_verdict(int status) {
    return !spoken && status != STATUS_PASS && !is_of_signal(status);
}

// What a rank says goes through mpirun, and may be lost if mpirun dies.
static void say_what_nobody_said(int status, bool mpirun_itself) {
    if (ended_by || (spoken && (said.passed || !mpirun_itself))) return;
    if (hung)
        fprintf(stderr, "%s: a rank died while they started, and mpirun waited in vain for its end\n",
                base_program());
    if (status == STATUS_USAGE || status == STATUS_UNREAD) return;
    bool by_signal = is_of_signal(status);
    if (!by_signal) fputs(said.own, stderr);
    if (by_signal)
        fprintf(stderr, "%s: %s was ended by signal %d (%s), and the %s with it\n", base_program(),
                mpirun_itself ? "mpirun" : "a rank", status - 128, strsignal(status - 128),
                mpirun_itself ? "ranks" : "others");
    else if (status != STATUS_PASS)
        fprintf(stderr, "%s: mpirun has ended with status %d, and no rank has said why%s\n", base_program(),
                status, said.own_length ? "" : " (OMPI_MCA_orte_execute_quiet=0 shows what mpirun says)");
}

enum { ENDS = 3 };

// Collects the signals that end a run. One that is ignored, as under nohup, stays ignored; since mpirun
// would catch it, mpirun then gets a process group that the terminal does not reach.
static int ends_that_count(int ends[ENDS]) {
    static const int all[ENDS] = {SIGINT, SIGTERM, SIGHUP};
    int count = 0;
    for (int i = 0; i < ENDS; i++) {
        struct sigaction now;
        if (sigaction(all[i], NULL, &now) == 0 && now.sa_handler != SIG_IGN) ends[count++] = all[i];
    }
    return count;
}

// From mpirun: why it did not start, what it and the ranks say, and stdout if this process writes it.
typedef struct Pipes {
    int report[2], errors[2], output[2];
} Pipes;

static int open_pipes(Pipes *p) {
    *p = (Pipes){.output = {-1, -1}};
    if (pipe2(p->report, O_CLOEXEC) < 0 || pipe2(p->errors, O_CLOEXEC) < 0) return errno;
    if (writes_to_file() && pipe2(p->output, O_CLOEXEC) < 0) return errno;
    fcntl(p->errors[0], F_SETFL, O_NONBLOCK);
    fcntl(p->output[0], F_SETFL, O_NONBLOCK);
    return 0;
}

// The child of the fork: becomes mpirun, or reports why not.
static void become_mpirun(char *const *words, const Pipes *p, pid_t parent, const sigset_t *mask) {
    dup2(p->errors[1], STDERR_FILENO);
    if (p->output[1] >= 0) dup2(p->output[1], STDOUT_FILENO);
    // No program reads its input; mpirun would, and take away what a surrounding shell loop reads.
    close(STDIN_FILENO);
    open("/dev/null", O_RDONLY);
    sigprocmask(SIG_SETMASK, mask, NULL);
    if (getppid() == parent) execvp(words[0], words);
    int error = errno;
    if (write(p->report[1], &error, sizeof error) < 0) error = 0;
    _exit(STATUS_USAGE);
}

// Returns 0, or the errno of what failed.
static int start_mpirun(char *const *words, const Pipes *p) {
    struct sigaction end = {.sa_sigaction = on_end, .sa_flags = SA_SIGINFO};
    int ends[ENDS], count = ends_that_count(ends), error = 0;
    own_group = count < ENDS;
    sigset_t blocked, before;  // until mpirun's process id is known
    sigemptyset(&blocked);
    for (int i = 0; i < count; i++) sigaddset(&blocked, ends[i]);
    sigprocmask(SIG_BLOCK, &blocked, &before);
    for (int i = 0; i < count; i++) sigaction(ends[i], &end, NULL);
    signal(SIGUSR1, on_word);
    signal(SIGCHLD, wake);
    pid_t parent = getpid(), child = fork();
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (own_group) setpgid(0, 0);
        for (int i = 0; i < count; i++) signal(ends[i], SIG_DFL);
        signal(SIGUSR1, SIG_DFL);
        become_mpirun(words, p, parent, &before);
    }
    mpirun = child;
    sigprocmask(SIG_SETMASK, &before, NULL);
    if (child < 0) error = errno;
    close(p->report[1]);
    close(p->errors[1]);
    if (p->output[1] >= 0) close(p->output[1]);
    bool started = child > 0 && read(p->report[0], &error, sizeof error) <= 0;
    close(p->report[0]);
    if (!started) waitpid(child, NULL, 0);
    return started ? 0 : error;
}

// Ends this process as mpirun has ended, by its status from waitpid.
static void end_as_mpirun(int wait_status) {
    int status = WIFEXITED(wait_status) ? WEXITSTATUS(wait_status) : 128 + WTERMSIG(wait_status);
    if (WIFSIGNALED(wait_status)) usleep(200000);  // the ranks end with it, but slightly later
    remove_folders();
    // mpirun crashed on ranks that it could not end (Open MPI 4.1.4), after one of them had said why.
    bool fell = WIFSIGNALED(wait_status) && WTERMSIG(wait_status) == SIGSEGV && spoken && said.passed;
    if (hung || fell) status = STATUS_USAGE;
    say_what_nobody_said(status, WIFSIGNALED(wait_status));
    if (nobodys_verdict(status)) status = STATUS_USAGE;  // mpirun's own, when a rank crashes as it starts
    if (lost && !ended_by) {
        fprintf(stderr, "%s: stdout could not be written whole: is the disk full?\n", base_program());
        status = STATUS_USAGE;
    }
    _exit(ended_by ? 128 + ended_by : status);
}

int launch(char *const *words, const char *place) {
    Pipes pipes;
    char number[16];
    int error = open_pipes(&pipes);
    if (error) return error;
    snprintf(number, sizeof number, "%d", (int)getpid());
    setenv(LAUNCHER, number, 1);
    setenv("OMPI_MCA_orte_execute_quiet", "1", 0);
    // A rank tells mpirun that it leaves MPI, and waits 2 s for the answer. If mpirun is held up for longer,
    // as on a busy machine, this would turn a run that has passed into a failure. Ranks that leave too early
    // are noticed by the others. The second name is Open MPI 5's.
    setenv("OMPI_MCA_orte_allowed_exit_without_sync", "1", 0);
    setenv("PRTE_MCA_prte_allowed_exit_without_sync", "1", 0);
    // Without a PATH mpirun is found, but ends without a word because it does not find ssh.
    setenv("PATH", "/usr/local/bin:/usr/bin:/bin", 0);
    make_folders(place);
    base_set_rank(0, 1, leave_it_to_the_ranks);
    error = start_mpirun(words, &pipes);
    if (!error) end_as_mpirun(wait_for_end(pipes.errors[0], pipes.output[0]));
    remove_folders();
    return error;
}
