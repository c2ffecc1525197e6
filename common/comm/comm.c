// comm.c: the front of communication: start and end, groups, and what happens when a rank dies. The requests
// are in comm_requests.c, what the ranks tell each other in comm_agreement.c.
#include <errno.h>
#include <math.h>
#include <omp.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "comm_inside.h"
#include "hash.h"
#include "launch.h"
#include "tensor/clock.h"
#include "tensor/device.h"
#include "tensor/in_flight.h"

struct Comm comm = {.alone = true, .ranks = 1, .here = 1, .timeout = 300, .check = true};

int comm_ranks(void) { return comm.ranks; }
int comm_rank(void) { return comm.rank; }
const char *comm_host(int rank) { return comm.identity ? comm.identity[rank].host : "this machine"; }
double comm_timeout(void) { return comm.timeout; }
double comm_set_timeout(double seconds) {
    double before = comm.timeout;
    comm.timeout = seconds;
    return before;
}

void comm_one_works(bool begins) {
    if (begins) comm.patience = comm_set_timeout(INFINITY);
    else comm_wait(comm_barrier(comm_world())), comm_set_timeout(comm.patience);
    host_share(begins ? 1 : comm.here);
}

bool comm_set_check(bool on) {
    bool before = comm.check;
    comm.check = on;
    return before;
}

// ---- whether ranks find the same files ----

// A file that a sandbox hides adds nothing to the hash.
static uint64_t hash_of_file(uint64_t h, const char *path) {
    FILE *file = fopen(path, "rb");
    if (!file) return h;
    static char buffer[1 << 16];
    for (size_t got; (got = fread(buffer, 1, sizeof buffer, file)) > 0;) h = hash_bytes(h, buffer, got);
    fclose(file);
    return h;
}

// Which file this is, the same on all hosts that share it; if that is not known, another one on each rank.
static uint64_t hash_of_inode(uint64_t h, const char *path) {
    struct stat s;
    if (stat(path, &s) != 0) return hash_bytes(h, &comm.rank, sizeof comm.rank);
    const int64_t which[] = {(int64_t)s.st_ino, s.st_size, s.st_ctim.tv_sec, s.st_ctim.tv_nsec};
    return hash_bytes(h, which, sizeof which);
}

bool comm_same_files(char *const *paths, int count, Group group) {
    uint64_t which = HASH_SEED, what = HASH_SEED;
    for (int i = 0; i < count; i++) which = hash_of_inode(which, paths[i]);
    if (comm_same(which, group)) return true;
    for (int i = 0; i < count; i++) what = hash_of_file(what, paths[i]);
    return comm_same(what, group);
}

// ---- groups ----

static void prepare_group(Group group);

Group comm_group(const char *name, Line line, const int *members, int size) {
    Group group = {.size = size, .rank = -1, .handle = ++comm.groups, .line = line};
    CHECK(size >= 1, "group %s: a group has at least one member", name);
    int *copy = host_alloc(sizeof *copy * (size_t)size);
    for (int i = 0; i < size; i++) {
        CHECK(members[i] >= 0 && (members[i] < comm.ranks || comm.for_all),
              "group %s: there is no rank %d among %d", name, members[i], comm.ranks);
        for (int j = 0; j < i; j++)
            CHECK(members[j] != members[i], "group %s: rank %d is in it twice", name, members[i]);
        copy[i] = members[i];
        if (members[i] == (comm.for_all ? comm.acts_as : comm.rank)) group.rank = i;
    }
    group.member = copy;
    group.name = format_text("%s", name);
    const bool moves = !device_is_dry_run();
    comm.group = realloc(comm.group, sizeof *comm.group * (size_t)comm.groups);
    CHECK(comm.group, "out of host memory for groups");
    comm.group[comm.groups - 1] = (GroupMade){group, moves};
    if (transport_launches() && !comm.alone && moves) prepare_group(group);
    return group;
}

Group comm_world(void) {
    static const int alone[] = {0};
    static int *everyone;  // set once comm_start knows the ranks
    if (!everyone && comm.ranks > 1) {
        everyone = host_alloc(sizeof *everyone * (size_t)comm.ranks);
        for (int i = 0; i < comm.ranks; i++) everyone[i] = i;
    }
    return (Group){
        .size = comm.ranks, .rank = comm.rank, .name = "world", .member = everyone ? everyone : alone};
}

void comm_stand_for_all(bool on) {
    CHECK(!on || device_is_dry_run(), "one rank can stand for all only in a dry run");
    comm.for_all = on;
}

StandIn comm_act_as(StandIn next) {
    StandIn before = {.rank = comm.acts_as, .now = clock_model_now()};
    CHECK(comm.for_all, "a rank that does not stand for all acts as no other");
    clock_model_set(next.now);
    comm.acts_as = next.rank;
    for (int line = 0; line < COMM_LINES; line++) {
        before.line_end[line] = comm.line[line].end;
        comm.line[line].end = next.line_end[line];
    }
    for (int port = 0; port < 2; port++) {
        before.port_free[port] = port_free_at[port];
        port_free_at[port] = next.port_free[port];
    }
    return before;
}

// ---- groups that the data plane prepares ----

// All ranks meet, and each says what it needs: nothing (it is not a member, or the only one), a new group,
// or one with the line and the members of an older group, which it names by its handle.
enum { NOTHING = -2, NEW = -1 };

static bool same_members(Group a, Group b) {
    return a.line == b.line && a.size == b.size &&
           !memcmp(a.member, b.member, sizeof *a.member * (size_t)a.size);
}

static void prepare_group(Group group) {
    Request *r = request_new((CollectiveKind)GROUP, comm_world(), 0, F32);
    int as = group.rank < 0 || group.size == 1 ? NOTHING : NEW;
    if (as == NEW && same_members(group, comm_world())) as = 0;
    for (int h = 1; h < group.handle && as == NEW; h++)
        if (comm.group[h - 1].moves && same_members(group, comm.group[h - 1].group)) as = h;
    r->values = host_alloc(sizeof *r->values * (size_t)comm.ranks);
    r->values[comm.rank] = as;
    r->value_count = 1;
    r->made = group;
    r->total = group.handle;
    line_append(r);
    request_await(r);
    request_release(r);
}

Operation *group_operation(const Request *r) {
    int as = NOTHING, mine = (int)r->values[comm.rank];
    for (int i = 0; i < comm.ranks; i++) {
        int theirs = (int)r->values[i];
        if (as == NOTHING) as = theirs;
        else if (theirs != NOTHING && theirs != as) as = NEW;
    }
    if (as == NOTHING) return NULL;
    int color = r->made.member[0];
    for (int i = 1; i < r->made.size; i++)
        if (r->made.member[i] < color) color = r->made.member[i];
    Group group = r->made;
    if (mine == NOTHING) group.rank = -1;
    return transport_group(group, color, as);
}

// ---- a dead rank ----

// A rank that has died, or -1: a process id that no longer exists, since its launcher has reaped it. Only
// for processes in the same id namespace as this one; of others only the launcher knows.
int find_dead(void) {
    for (int r = 0; comm.identity && r < comm.ranks; r++)
        if (r != comm.rank && !comm.peer[r].ended &&
            comm.identity[r].numbers == comm.identity[comm.rank].numbers &&
            kill(comm.identity[r].pid, 0) < 0 && errno == ESRCH)
            return r;
    return -1;
}

static const char DIED[] = " has died; all ranks end\n";

// Ends this rank, as all others end; the first that knows why says so: "rank 2" and what happened to it.
// Makes only calls that are allowed in a signal handler.
static void end_with(int dead, const char *what) {
    if (dead >= 0 && control_claim()) {
        char digits[16], *digit = digits + sizeof digits;
        for (int r = dead; r || digit == digits + sizeof digits; r /= 10) *--digit = (char)('0' + r % 10);
        const char *name = base_program(), *texts[] = {name, ": rank ", digit, what};
        size_t lengths[] = {strlen(name), 7, (size_t)(digits + sizeof digits - digit), strlen(what)};
        char line[256];
        size_t length = 0;
        for (int i = 0; i < 4; i++)
            for (size_t j = 0; j < lengths[i] && length < sizeof line; j++) line[length++] = texts[i][j];
        if (write(STDERR_FILENO, line, length) < 0) _exit(STATUS_USAGE);
    }
    _exit(STATUS_USAGE);
}

// When a rank dies, mpirun ends the others with SIGTERM. It runs with --quiet, so that a verdict of FAIL
// does not look like a crash, and so nobody else would say why. A SIGTERM from elsewhere is meant for this
// rank.
static void on_terminate(int signal, siginfo_t *info, void *unused) {
    (void)signal, (void)unused;
    bool meant = info->si_code <= 0 && info->si_pid != getppid();  // sent by a process: kill, sigqueue
    end_with(meant ? comm.rank : find_dead(), meant ? " was ended by SIGTERM; all ranks end\n" : DIED);
}

bool claim_last_word(void) {
    if (!comm.claimed) comm.claimed = control_claim();
    return comm.claimed;
}

static void end_all(const char *sentence, int status) {
    if (!*sentence) {  // nobody reads the output any more; noticed by a thread that must not call MPI
        control_claim();
        _exit(status);
    }
    comm.finished = true;  // so that exiting does not call comm_finish
    // If all fail in the same way, the lowest rank speaks, usually rank 0.
    usleep((useconds_t)(comm.rank ? 60000 + 40000 * (comm.rank < 8 ? comm.rank : 8) : 0));
    int dead = find_dead();  // if there is one, its death is the cause of all else
    if (claim_last_word()) {
        char died[160];
        snprintf(died, sizeof died, "%s: rank %d%s", base_program(), dead, DIED);
        base_last_words(dead >= 0 ? died : sentence);
        usleep(20000);  // so that mpirun passes on the sentence before it learns of the end
    } else {
        usleep(3000000);  // another has spoken, and ends this one
    }
    transport_abort();
    control_abort(status);
    _exit(status);
}

// As in_flight_push: called while this rank computes. (lines_push may wait for the device and call back.)
// A rank that stands for all has completed each request at its start.
static void push(void) {
    if (comm.pushing || comm.finished || comm.for_all) return;
    double began = wall_seconds();
    lines_push();
    count_push(wall_seconds() - began);
}

// Called while the host waits for the device, which may itself wait for another rank's.
static void look_from_device(void) {
    static int64_t turn;
    if (comm.alone || ++turn % 64) return;
    push();
    if (look_is_due(wall_seconds())) look_after_all();
}

// ---- start and end ----

// The number given for --name in argv, else `standard`.
static double number(int argc, char **argv, const char *name, double standard) {
    const char *text = option_typed(argc, argv, name);
    if (!text) return standard;
    char *end;
    double value = strtod(text, &end);
    CHECK(*text && !*end && value >= 0, "%s %s is not a number of at least 0", name, text);
    return value;
}

// Divides the cores among the ranks of this machine, a thread per core, unless the user has set the threads.
static void share_cores(int ranks_here) {
    if (getenv("OMP_NUM_THREADS")) return;
    int threads = host_cores((int)sysconf(_SC_NPROCESSORS_ONLN)) / ranks_here, bound = omp_get_num_procs();
    if (threads > bound) threads = bound;
    omp_set_num_threads(threads > 1 ? threads : 1);
}

// Exchanges identities, and checks that all ranks run the same program. Returns this rank's place.
static Place check_identities(int argc, char **argv) {
    Identity mine = {.binary = hash_of_file(HASH_SEED, "/proc/self/exe"),
                     .arguments = HASH_SEED,
                     .pid = (int32_t)getpid()};
    for (int i = 1; i < argc; i++)
        mine.arguments = hash_bytes(mine.arguments, argv[i], strlen(argv[i]) + 1);
    gethostname(mine.host, sizeof mine.host - 1);
    mine.machine =
        hash_of_file(hash_bytes(HASH_SEED, mine.host, sizeof mine.host), "/proc/sys/kernel/random/boot_id");
    char space[64];
    ssize_t length = readlink("/proc/self/ns/pid", space, sizeof space);
    mine.numbers = hash_bytes(mine.machine, space, length > 0 ? (size_t)length : 0);
    Identity *all = host_alloc(sizeof mine * (size_t)comm.ranks);
    control_share(&mine, all, sizeof mine);
    comm.identity = all;
    int here = 0, local = 0;
    for (int r = 0; r < comm.ranks; r++) {
        const Identity *other = &comm.identity[r], *first = &comm.identity[0];
        if (r == comm.rank) local = here;
        here += other->machine == mine.machine;
        CHECK(other->binary == first->binary,
              "rank %d on %s runs another build of this program than rank 0 on %s", r, other->host,
              first->host);
        CHECK(other->arguments == first->arguments, "rank %d was started with other arguments than rank 0",
              r);
    }
    share_cores(here);
    comm.here = here;
    host_share(here);
    return (Place){comm.rank, comm.ranks, local, here, here == comm.ranks, mine.machine};
}

static void finish_at_exit(int status, void *unused) {
    (void)unused;
    if (comm.finished || comm.alone) return;
    int worst = comm_finish(status);
    if (worst == status) return;
    fflush(NULL);
    _exit(worst);
}

void comm_start(int argc, char **argv, int natural) {
    CHECK(!comm.started, "comm_start was called twice");
    double wanted = number(argc, argv, "--ranks", 0);
    CHECK(wanted == floor(wanted) && wanted <= 4096, "--ranks %g is not a whole number up to 4096", wanted);
    comm.timeout = number(argc, argv, "--timeout", comm.timeout);
    if (option_typed(argc, argv, "--trust-calls")) comm_set_check(false);
    int ranks = wanted > 0 ? (int)wanted : natural;
    comm.started = true;
    comm.alone = !control_launched() && ranks == 1;
    if (comm.alone) return;
    if (!control_launched()) {
        static const double LEAST = 8 << 20;  // bytes of a rank's own, mostly Open MPI's
        CHECK(ranks * LEAST <= host_memory_left(),
              "--ranks %d does not fit: a rank takes %s of memory or more, and %s are left", ranks,
              bytes_text(LEAST), bytes_text(host_memory_left()));
        char threads[16];
        int share = host_cores(omp_get_num_procs()) / ranks;
        snprintf(threads, sizeof threads, "%d", share > 1 ? share : 1);
        setenv("OMP_NUM_THREADS", threads, 0);
        fatal("%d ranks need mpirun: %s; --ranks 1 runs without it", ranks,
              control_launch(argc, argv, ranks));
    }
    control_start(&comm.rank, &comm.ranks, comm.timeout);
    base_set_rank(comm.rank, comm.ranks, end_all);
    CHECK(wanted == 0 || (int)wanted == comm.ranks,
          "--ranks %d, but mpirun has started %d: leave --ranks out, or start as many", (int)wanted,
          comm.ranks);
    comm.peer = calloc((size_t)comm.ranks, sizeof *comm.peer);
    CHECK(comm.peer, "out of host memory for %d ranks", comm.ranks);
    Place place = check_identities(argc, argv);
    backend_start(place.local_rank, place.ranks_here);
    transport_start(place, look_from_device);
    control_met();
    in_flight_push = push;
    struct sigaction terminate = {.sa_sigaction = on_terminate, .sa_flags = SA_SIGINFO};
    sigaction(SIGTERM, &terminate, NULL);
    on_exit(finish_at_exit, NULL);
}

// Fatal if the rank has called anything but comm_finish since its last call with this one.
static bool has_ended(int rank, const Notice *mine) {
    notices_take();
    for (int line = 0; line < COMM_LINES; line++)
        if (comm.peer[rank].inbox[line].count)
            notice_mismatch(comm.rank, mine, rank, &comm.peer[rank].inbox[line].notice[0], "");
    return comm.peer[rank].ended;
}

int comm_finish(int status) {
    if (comm.finished) return status;
    if (comm.live) {
        const Request *r = comm.live;
        while (r->live_after) r = r->live_after;
        Notice mine = notice_of(r, 0);
        fatal("comm_finish: nobody waited for %s in group %s, call %lld of rank %d", notice_text(&mine),
              r->call.group.name ? r->call.group.name : "of one", (long long)r->index, comm.rank);
    }
    comm.finished = true;
    if (!comm.started || comm.alone) return status;
    fflush(NULL);
    Notice mine = {.kind = FINISHED, .count = status};
    for (int r = 0; r < comm.ranks; r++)
        if (r != comm.rank) control_send(&mine, r);
    comm.peer[comm.rank].ended = true;
    comm.peer[comm.rank].ended_status = status;
    int worst = 0;
    Wait wait = wait_begin();
    for (int r = 0; r < comm.ranks; r++) {
        for (wait_turn(&wait); !has_ended(r, &mine); wait_turn(&wait)) {
            if (!wait_pause(&wait)) continue;
            int dead = find_dead();
            notices_take();  // by now, all that a process sent before it ended has come
            CHECK(dead < 0 || comm.peer[dead].ended, "rank %d has died; all ranks end", dead);
            CHECK(wait.waited < comm.timeout, "comm_finish: rank %d has not come in %.3g s (--timeout)", r,
                  comm.timeout);
        }
        if (comm.peer[r].ended_status > worst) worst = comm.peer[r].ended_status;
    }
    // From here on a missing rank is no fault. When the first leaves with a status other than 0, mpirun may
    // end the others.
    signal(SIGTERM, SIG_IGN);
    if (comm.rank == 0 && worst) launcher_hears();
    control_part(comm.timeout);
    transport_finish();
    control_finish();
    return worst;
}
