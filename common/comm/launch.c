// launch.c: the parent of mpirun. mpirun answers every signal with status 1, the status of a failed check;
// of ranks that die before they know each other it says nothing, since it is quiet; when it is killed, what
// its ranks shared stays, and when this parent is killed, too; and when a rank dies in the first moments of
// a start, it may wait for ever for children that it has not. Who starts mpirun by hand has its --timeout
// SECONDS against that.
#include "launch.h"

#include <errno.h>
#include <fcntl.h>
#include <glob.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "base.h"

#define LAUNCHER "ULTRASCALE_LAUNCHER"  // its process's number, for the ranks

static volatile sig_atomic_t ended_by, spoken;
static volatile pid_t mpirun;
static bool hung, own_group;
static unsigned long job;

// From a terminal a signal reaches mpirun as well, unless that has a group of its own; from kill() it
// reaches us alone.
static void on_end(int signal, siginfo_t *info, void *unused) {
    (void)unused;
    ended_by = signal;
    if ((own_group || info->si_code == SI_USER) && mpirun > 0) kill(mpirun, signal);
}

static void on_word(int signal) {
    (void)signal;
    spoken = 1;
}

static void wake(int signal) { (void)signal; }  // ends a sleep at once

void launcher_hears(void) {
    const char *launcher = getenv(LAUNCHER);
    if (launcher) kill((pid_t)atoi(launcher), SIGUSR1);
}

// The reader of our output has left: the ranks see it too, and end in good order.
static void leave_it_to_the_ranks(const char *sentence, int status) {
    (void)status;
    while (!*sentence) pause();
}

// Whether it runs: a zombie only waits for its parent to look.
static bool lives(int process) {
    char path[64], state = 'Z';
    snprintf(path, sizeof path, "/proc/%d/stat", process);
    FILE *file = fopen(path, "r");
    if (file && fscanf(file, "%*d (%*[^)]) %c", &state) != 1) state = 'Z';
    if (file) fclose(file);
    return state != 'Z';
}

// The number of the job, by which Open MPI names what its ranks share; a rank's environment has it.
static void note_job(int process) {
    static const char name[] = "OMPI_MCA_ess_base_jobid=";
    char path[64], *variable = NULL;
    size_t room = 0;
    snprintf(path, sizeof path, "/proc/%d/environ", process);
    FILE *file = job ? NULL : fopen(path, "r");
    while (file && !job && getdelim(&variable, &room, '\0', file) > 0)
        if (!strncmp(variable, name, sizeof name - 1)) job = strtoul(variable + sizeof name - 1, NULL, 10);
    if (file) fclose(file);
    free(variable);
}

// What mpirun would have removed from /dev/shm, had it not been killed.
static void clear_shared(void) {
    char pattern[64];
    glob_t found;
    snprintf(pattern, sizeof pattern, "/dev/shm/vader_segment.*.%lx.*", job);
    usleep(200000);  // the ranks end with mpirun, but not before it
    if (job && glob(pattern, 0, NULL, &found) == 0) {
        for (size_t i = 0; i < found.gl_pathc; i++) unlink(found.gl_pathv[i]);
        globfree(&found);
    }
}

// Empties the names of those segments that a process maps.
static void leave_out_mapped(glob_t *found) {
    char *line = NULL;
    size_t room = 0;
    glob_t maps;
    if (glob("/proc/[0-9]*/maps", 0, NULL, &maps) != 0) return;
    for (size_t p = 0; p < maps.gl_pathc; p++) {
        FILE *file = fopen(maps.gl_pathv[p], "r");
        while (file && getline(&line, &room, file) > 0) {
            const char *segment = strstr(line, "/dev/shm/vader_segment.");
            line[strcspn(line, "\n")] = '\0';
            for (size_t i = 0; segment && i < found->gl_pathc; i++)
                if (!strcmp(found->gl_pathv[i], segment)) *found->gl_pathv[i] = '\0';
        }
        if (file) fclose(file);
    }
    free(line);
    globfree(&maps);
}

// What a run left in /dev/shm whose launcher was killed, and its mpirun and ranks with it: segments of this
// user on this host that no process maps, and that are too old to belong to a run that is just starting.
static void clear_abandoned(void) {
    enum { OLD = 10 };  // seconds
    char host[64] = "", pattern[128];
    glob_t found;
    struct stat status;
    gethostname(host, sizeof host - 1);
    host[strcspn(host, ".")] = '\0';
    snprintf(pattern, sizeof pattern, "/dev/shm/vader_segment.%s*.%u.*", host, (unsigned)geteuid());
    if (glob(pattern, 0, NULL, &found) != 0) return;
    time_t before = time(NULL) - OLD;
    bool old = false;
    for (size_t i = 0; i < found.gl_pathc; i++) {
        bool young = stat(found.gl_pathv[i], &status) || status.st_mtime > before;
        if (young) *found.gl_pathv[i] = '\0';
        old = old || !young;
    }
    if (old) leave_out_mapped(&found);  // it reads what every process of the machine maps
    for (size_t i = 0; i < found.gl_pathc; i++)
        if (*found.gl_pathv[i]) unlink(found.gl_pathv[i]);
    globfree(&found);
}

// Whether mpirun has ranks that run; who cannot look assumes so.
static bool has_ranks(void) {
    char path[64];
    bool some = false;
    snprintf(path, sizeof path, "/proc/%d/task/%d/children", (int)mpirun, (int)mpirun);
    FILE *file = fopen(path, "r");
    for (int child; file && !some && fscanf(file, "%d", &child) == 1;) {
        some = lives(child);
        if (some) note_job(child);
    }
    if (!file) return true;
    fclose(file);
    return some;
}

// Whether what the ranks have printed finds its way: whoever reads it may pause (Ctrl-S, less).
static bool output_flows(void) {
    struct pollfd out[] = {{.fd = STDOUT_FILENO, .events = POLLOUT},
                           {.fd = STDERR_FILENO, .events = POLLOUT}};
    return poll(out, 2, 0) == 2;
}

// Its status as waitpid has it. When a rank dies in the first moments of a start, mpirun may wait for
// itself for ever (Open MPI 4.1.4): one whose ranks have all ended, and whose output flows, does not last.
static int wait_for_end(void) {
    enum { PATIENCE = 5, LOOKS = 10 };  // seconds; looks in each
    bool had = false;
    for (int without = 0, status;;) {
        if (waitpid(mpirun, &status, WNOHANG) == mpirun) return status;
        bool some = has_ranks();
        had = had || some;
        without = had && !some && output_flows() ? without + 1 : 0;
        if (without == PATIENCE * LOOKS) hung = kill(mpirun, SIGKILL) == 0;
        usleep(1000000 / LOOKS);
    }
}

// Ranks tell of their verdict (launcher_hears): without that, the status of one is mpirun's own.
static bool nobodys_verdict(int status) {
    return !spoken && (status == STATUS_FAIL || status == STATUS_UNPROVEN);
}

static void say_what_nobody_said(int status) {
    if (spoken || ended_by) return;
    if (hung)
        fprintf(stderr, "%s: a rank died while they started, and mpirun waited in vain for its end\n",
                base_program());
    if (status == STATUS_PASS || status == STATUS_USAGE || status == STATUS_UNREAD) return;
    if (status > 128)
        fprintf(stderr, "%s: a rank was ended by signal %d (%s), and the others with it\n", base_program(),
                status - 128, strsignal(status - 128));
    else
        fprintf(stderr, "%s: mpirun has ended with status %d, and no rank has said why\n", base_program(),
                status);
}

enum { ENDS = 3 };

// The signals that end a run. One that is ignored, as nohup has it, stays so; mpirun would catch it, and
// gets a process group that a terminal does not reach.
static int ends_that_count(int ends[ENDS]) {
    static const int all[ENDS] = {SIGINT, SIGTERM, SIGHUP};
    int count = 0;
    for (int i = 0; i < ENDS; i++) {
        struct sigaction now;
        if (sigaction(all[i], NULL, &now) == 0 && now.sa_handler != SIG_IGN) ends[count++] = all[i];
    }
    return count;
}

int launch(char *const *words) {
    int report[2], error = 0;
    char number[16];
    if (pipe2(report, O_CLOEXEC) < 0) return errno;
    snprintf(number, sizeof number, "%d", (int)getpid());
    setenv(LAUNCHER, number, 1);
    clear_abandoned();
    base_set_rank(0, 1, leave_it_to_the_ranks);
    struct sigaction end = {.sa_sigaction = on_end, .sa_flags = SA_SIGINFO};
    int ends[ENDS], count = ends_that_count(ends);
    own_group = count < ENDS;
    sigset_t blocked, before;  // until it is known to whom they are passed on
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
        sigprocmask(SIG_SETMASK, &before, NULL);
        if (getppid() == parent) execvp(words[0], words);
        error = errno;
        if (write(report[1], &error, sizeof error) < 0) error = 0;
        _exit(STATUS_USAGE);
    }
    mpirun = child;
    sigprocmask(SIG_SETMASK, &before, NULL);
    if (child < 0) return errno;
    close(report[1]);
    bool started = read(report[0], &error, sizeof error) <= 0;
    close(report[0]);
    if (!started) return waitpid(child, NULL, 0), error;
    int end_status = wait_for_end();
    int status = WIFEXITED(end_status) ? WEXITSTATUS(end_status) : 128 + WTERMSIG(end_status);
    if (WIFSIGNALED(end_status)) clear_shared();
    // mpirun that fell over ranks it could not end (Open MPI 4.1.4), after one of them had said why.
    bool fell = WIFSIGNALED(end_status) && WTERMSIG(end_status) == SIGSEGV && spoken;
    if (hung || fell) status = STATUS_USAGE;
    say_what_nobody_said(status);
    if (nobodys_verdict(status)) status = STATUS_USAGE;  // mpirun's own, when a rank crashes as it starts
    _exit(ended_by ? 128 + ended_by : status);
}
