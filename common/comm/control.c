// control.c: the control plane over Open MPI, whose mpirun starts and ends the ranks. Notices go through
// mailboxes between ranks that share memory (mailbox.h); otherwise they are messages with a tag of their
// own, which the data plane does not use.
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <mpi.h>
#include <omp.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#include "doorbell.h"
#include "files.h"
#include "launch.h"
#include "mailbox.h"
#include "transport.h"

enum { TAG_NOTICE = 1000 };  // comm_mpi.c's tags are small

static struct {
    bool crowded;
    char claim_file[512];  // "" if the launcher provided no folder
    Notice notice;         // buffer of the receive that is always posted
    MPI_Request notice_request;
    struct Outgoing *outgoing;
    int64_t sent;
} state;

// ---- start ----

static const char *environment(const char *name) {
    const char *value = getenv(name);
    return value && *value ? value : NULL;
}

static int environment_int(const char *name) { return environment(name) ? atoi(getenv(name)) : 0; }

bool control_launched(void) {
    return environment("OMPI_COMM_WORLD_SIZE") || environment("PMIX_RANK") || environment("PMI_RANK") ||
           environment_int("SLURM_STEP_NUM_TASKS") > 1;
}

// Settings of Open MPI for ranks on one machine; what the user has set is kept. For Open MPI 5, vader is
// another name of its sm; it ignores settings that it does not know.
static void tune(bool oversubscribed) {
    // Not looking for networks halves the start-up time.
    setenv("OMPI_MCA_pml", "ob1", 0);
    setenv("OMPI_MCA_btl", "self,vader", 0);
    // Do not load plug-ins that it would reject anyway.
    setenv("OMPI_MCA_coll", "^sm,adapt,han,monitoring,sync", 0);
    // Do not look for devices: each rank and mpirun would read the PCI bus and load plug-ins for displays,
    // and one for XML, with a library and its tables, although hwloc can read XML itself.
    setenv("HWLOC_COMPONENTS", "-linuxio,-pci", 0);
    setenv("HWLOC_PLUGINS_BLACKLIST", "hwloc_pci.so,hwloc_gl.so,hwloc_opencl.so,hwloc_xml_libxml.so",
           0);
    // Do not abbreviate lists of hosts: given a name like a pod's, with 56 letters before the first digit,
    // the code of Open MPI 4.1 and PMIx 4.2 for that overruns the stack.
    setenv("OMPI_MCA_regx", "naive", 0);
    setenv("PMIX_MCA_preg", "^native", 0);
    // PMIx sends each rank the job in messages: a table in mapped files pays only for thousands of ranks.
    setenv("PMIX_MCA_gds", "hash", 0);
    // Copying twice through shared memory is faster than letting the kernel copy once, up to 16 MB.
    setenv("OMPI_MCA_btl_vader_single_copy_mechanism", "none", 0);
    setenv("OMPI_MCA_smsc", "^cma,knem,xpmem", 0);            // the same from Open MPI 5 on
    setenv("OMPI_MCA_btl_vader_segment_size", "4194304", 0);  // part of MPI_SHARED, below
    // Without this, a rank that waits would occupy the core of the rank that it waits for.
    if (oversubscribed) setenv("OMPI_MCA_mpi_yield_when_idle", "1", 0);
}

bool control_crowded(void) { return state.crowded; }

// Where mpirun keeps a folder for each run: where the first of these variables that is set says.
static const char *session_place(void) {
    static const char *const names[] = {"OMPI_MCA_orte_tmpdir_base", "PRTE_MCA_prte_tmpdir_base", "TMPDIR",
                                        "TEMP", "TMP"};
    enum { NAMES = sizeof names / sizeof *names };
    for (int i = 0; i < NAMES; i++)
        if (environment(names[i])) return environment(names[i]);
    return "/tmp";
}

// Why it cannot make one there for this many ranks, which it would itself explain in a page of text; NULL if
// it can.
static const char *no_session_folder(const char *place, int ranks) {
    enum { FILES = 9 };  // files and folders, and one for each rank
    static char why[1024];
    char *trial = format_text("%s/ultrascale.XXXXXX", place);
    mkdir(place, 0700);  // as mpirun does
    struct statvfs disk;
    int error = mkdtemp(trial) ? 0 : errno;
    if (!error) rmdir(trial);
    free(trial);
    if (!error && statvfs(place, &disk) == 0 && disk.f_files && disk.f_favail < (fsfilcnt_t)(FILES + ranks))
        error = ENOSPC;
    snprintf(why, sizeof why,
             "it keeps a folder for each run in %s, and none can be made there: %s (TMPDIR names another "
             "place)",
             place, strerror(error));
    return error ? why : NULL;
}

// Why mpirun may not open as many files as it needs for this many ranks; NULL if it may. With fewer it hangs.
// Open MPI 4.1 opens 4 for each rank, and some 32 besides.
static const char *too_few_files(int ranks) {
    enum { OWN = 64, EACH = 4 };
    static char why[128];
    struct rlimit files;
    const rlim_t takes = OWN + EACH * (rlim_t)ranks;
    if (getrlimit(RLIMIT_NOFILE, &files) != 0 || files.rlim_cur >= takes) return NULL;
    snprintf(why, sizeof why, "it opens up to %llu files, and %llu are allowed (ulimit -n)",
             (unsigned long long)takes, (unsigned long long)files.rlim_max);
    files.rlim_cur = takes;
    return setrlimit(RLIMIT_NOFILE, &files) != 0 ? why : NULL;
}

// The same for address space. Each rank takes Open MPI's besides OpenBLAS's (base.c).
static const char *too_little_space(void) {
    enum { EACH = 768 };  // MB, with one thread
    static char why[128];
    struct rlimit space;
    if (getrlimit(RLIMIT_AS, &space) != 0 || space.rlim_cur >> 20 >= EACH) return NULL;
    snprintf(why, sizeof why, "each rank takes %d MB of address space, and %llu are allowed (ulimit -v)",
             EACH, (unsigned long long)space.rlim_cur >> 20);
    return why;
}

const char *control_launch(int argc, char **argv, int ranks) {
    static char self[4096], number[16];
    ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
    if (length <= 0) return "/proc/self/exe cannot be read";
    char *here = getcwd(NULL, 0);
    if (!here) return "the folder in which it would start is gone";
    free(here);
    const char *few = too_few_files(ranks), *little = few ? few : too_little_space();
    const char *place = session_place(), *nowhere = little ? little : no_session_folder(place, ranks);
    if (nowhere) return nowhere;
    self[length] = '\0';
    snprintf(number, sizeof number, "%d", ranks);
    const char *const before[] = {
        "mpirun", "--oversubscribe", "--allow-run-as-root", "--bind-to", "none", "-n", number, self};
    enum { BEFORE = sizeof before / sizeof *before };
    char **words = host_alloc(sizeof *words * (size_t)(BEFORE + argc));
    for (int i = 0; i < BEFORE; i++) words[i] = (char *)before[i];
    for (int i = 1; i <= argc; i++) words[BEFORE + i - 1] = argv[i];  // with the NULL at its end
    // Only the cores that this process may use (docker run --cpuset-cpus, --cpus).
    tune(ranks > host_cores(omp_get_num_procs()));
    int error = launch(words, place);
    free(words);
    return error == ENOENT ? "it is not on the PATH (apt-get install openmpi-bin)" : strerror(error);
}

// ---- the start and the end of a rank: the others may be stopped or gone, and nobody looks for them ----

// What Open MPI itself maps in /dev/shm for each rank: btl_vader_segment_size, and what precedes it.
enum { MPI_SHARED = (4 << 20) + (64 << 10) };
enum { PATIENCE = 20 };  // seconds that a start or an end may take on a busy machine

static const char *watched;  // the sentence of the signal handler

static void on_too_long(int signal) {
    (void)signal;
    if (control_claim() && write(STDERR_FILENO, watched, strlen(watched)) < 0) _exit(STATUS_USAGE);
    _exit(STATUS_USAGE);
}

Watch control_watch(double seconds, const char *sentence) {
    const char *before = watched;
    watched = sentence;
    signal(SIGALRM, on_too_long);
    return (Watch){alarm((unsigned)ceil(fmin(seconds, 2e9))), before};
}

void control_watch_end(Watch before) {
    alarm(before.seconds);
    watched = before.sentence;
    if (!before.seconds) signal(SIGALRM, SIG_DFL);
}

// `done`: what the other ranks must have done by then; `to`: how the sentence puts that for one rank.
static void expect_others(double timeout, const char *done, const char *to) {
    static char sentence[160];
    snprintf(sentence, sizeof sentence,
             "%s: rank %d: the ranks have not %s in %.3g s (--timeout, and %d s to %s): one is stopped "
             "or gone\n",
             base_program(), base_rank(), done, timeout + PATIENCE, PATIENCE, to);
    control_watch(timeout + PATIENCE, sentence);
}

void control_met(void) { control_watch_end((Watch){0}); }

void control_check_shared(double bytes, int ranks) {
    struct statvfs shared;
    if (ranks < 2 || statvfs("/dev/shm", &shared) != 0) return;
    double left = (double)shared.f_bavail * (double)shared.f_frsize;
    CHECK(left >= bytes,
          "/dev/shm has %s left, and what the %d ranks of this machine share there takes %s: mount it "
          "larger (docker run --shm-size), or start fewer ranks",
          bytes_text(left), ranks, bytes_text(bytes));
}

// Under AddressSanitizer, leaks are looked for while MPI still holds what it forgets to free at its end, so
// that this does not count. Of a leak only the function that asked for the memory is known: unwinding whole
// stacks, through libraries without frame pointers, takes as long as all tests. So what MPI leaks at its
// start, where libc asks for the memory, is left out.
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/lsan_interface.h>
const char *__asan_default_options(void) { return "print_suppressions=0"; }
const char *__lsan_default_suppressions(void) {
    return "leak:libmpi\nleak:libopen-\nleak:libpmix\nleak:mca_\nleak:libevent\nleak:libhwloc\n";
}
#else
static void __lsan_do_leak_check(void) {}
static void __lsan_disable(void) {}
static void __lsan_enable(void) {}
#endif

// mpirun's folder may be one that a killed run has left, of an mpirun with the same process id.
static void clear_old_claim(void) {
    enum { OLD = 60 };  // seconds: no rank of this run has claimed anything then
    struct stat claim;
    if (stat(state.claim_file, &claim) == 0 && time(NULL) - claim.st_mtime > OLD) unlink(state.claim_file);
}

void control_start(int *rank, int *ranks, double timeout) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);  // ranks do not outlive their launcher
    int size = environment_int("OMPI_COMM_WORLD_SIZE");
    int here = environment_int("OMPI_COMM_WORLD_LOCAL_SIZE");
    setenv("OMPI_MCA_osc", "sm", 0);  // all that shared memory needs; UCX's would complain of what it lacks
    if (size && size == here) tune(here > host_cores((int)sysconf(_SC_NPROCESSORS_ONLN)));
    const char *folder = environment("PMIX_SERVER_TMPDIR");  // mpirun's, for this run
    if (folder) snprintf(state.claim_file, sizeof state.claim_file, "%s/ultrascale-ends", folder);
    clear_old_claim();
    if (environment_int("OMPI_COMM_WORLD_LOCAL_RANK") == 0)
        control_check_shared((double)MPI_SHARED * here, here);
    state.crowded = environment_int("OMPI_MCA_mpi_yield_when_idle");
    // A rank that wakes another goes on with what it can do, rather than be interrupted by it each time.
    if (state.crowded && sched_getscheduler(0) == SCHED_OTHER)
        sched_setscheduler(0, SCHED_BATCH, &(struct sched_param){0});
    watch_mapped_files();  // before Open MPI, which only adds handlers where there are none
    expect_others(timeout, "met", "start");
    int provided;
    __lsan_disable();
    MPI_Init_thread(NULL, NULL, MPI_THREAD_FUNNELED, &provided);
    __lsan_enable();
    MPI_Comm_rank(MPI_COMM_WORLD, rank);
    MPI_Comm_size(MPI_COMM_WORLD, ranks);
    CHECK(*ranks > 1 || base_launched() == 1, "%d processes were started that do not find each other; %s",
          base_launched(),
          environment("SLURM_STEP_NUM_TASKS") ? "try srun --mpi=pmix" : "is that mpirun Open MPI's?");
    state.notice_request = MPI_REQUEST_NULL;
}

void control_share(const void *mine, void *all, size_t bytes) {
    MPI_Allgather(mine, (int)bytes, MPI_BYTE, all, (int)bytes, MPI_BYTE, MPI_COMM_WORLD);
}

// ---- notices ----

typedef struct Outgoing {
    struct Outgoing *next;
    Notice notice;
    MPI_Request request;
} Outgoing;

void control_send(const Notice *notice, int rank) {
    state.sent++;
    if (mailbox_send(notice, rank)) return;
    // Reuse a buffer whose message has been sent; such short messages are sent at once.
    Outgoing *out = state.outgoing;
    int left = 0;
    while (out && !(MPI_Test(&out->request, &left, MPI_STATUS_IGNORE), left)) out = out->next;
    if (!out) {
        out = host_alloc(sizeof *out);
        out->next = state.outgoing;
        state.outgoing = out;
    }
    out->notice = *notice;
    MPI_Isend(&out->notice, sizeof out->notice, MPI_BYTE, rank, TAG_NOTICE, MPI_COMM_WORLD, &out->request);
    doorbell_ring(rank);
}

int64_t control_sent(void) { return state.sent; }

bool control_receive(Notice *notice, int *rank) {
    if (mailbox_receive(notice, rank)) return true;
    if (mailboxes_reach_all()) return false;
    if (state.notice_request == MPI_REQUEST_NULL)
        MPI_Irecv(&state.notice, sizeof state.notice, MPI_BYTE, MPI_ANY_SOURCE, TAG_NOTICE, MPI_COMM_WORLD,
                  &state.notice_request);
    int come;
    MPI_Status status;
    MPI_Test(&state.notice_request, &come, &status);
    if (!come) return false;
    *notice = state.notice;
    *rank = status.MPI_SOURCE;
    return true;
}

// ---- the end ----

bool control_claim(void) {
    launcher_hears();
    if (!*state.claim_file) return true;
    int file = open(state.claim_file, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600);
    if (file < 0) return errno != EEXIST && errno != ENOENT;  // no folder: the run is being cleaned up
    close(file);
    return true;
}

void control_abort(int status) {
    MPI_Abort(MPI_COMM_WORLD, status);
    _exit(status);
}

void control_part(double timeout) {
    expect_others(timeout, "left MPI", "end");
    mailboxes_flush();
}

void control_finish(void) {
    if (state.notice_request != MPI_REQUEST_NULL) {
        MPI_Cancel(&state.notice_request);
        MPI_Request_free(&state.notice_request);
    }
    __lsan_do_leak_check();
    MPI_Finalize();
    control_met();
    while (state.outgoing) {
        Outgoing *gone = state.outgoing;
        state.outgoing = gone->next;
        free(gone);
    }
}
