// control_tcp.c: the control plane for launchers without MPI: torchrun, srun, a shell loop. They say in the
// environment who is which rank; the ranks find each other through one file that all of them can read.
//
//     rank 0   listens, and writes "host port secret" into FILE
//     others   read FILE until somebody answers there, and say who they are and where they listen
//     rank 0   when all have come: tells each where the others are, and removes FILE
//     all      rank r connects to ranks 1 … r - 1: one socket between every two ranks, which carries notices
//
// A file that an earlier run left behind names a port where nobody answers, or where nobody knows the
// secret; its readers go on reading until the new rank 0 has put its own in place. The secret also keeps
// strangers out.
//
// A second file, FILE.<secret>, lies there as long as the run: who can remove it is the first, and may tell
// the user why all end. A thread sleeps until a socket closes, so that a death is seen while nobody waits.
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include "transport.h"

static const char first_line[] = "ultrascale rendezvous 1\n";
enum { SECRET = 32, HOST = 64, READ_AHEAD = 16384, ATTEMPT_SECONDS = 2 };

// The first word of a rank, to rank 0 or to a lower one.
typedef struct Hello {
    char magic[8], secret[SECRET], host[HOST];
    int32_t rank, ranks, port;
} Hello;
static const char magic[8] = "uscale1";

// What rank 0 answers. ENDED: it has told the user why. TAKEN: another run has put its own FILE in place.
typedef enum Answer { WELCOME = 1, ENDED, TAKEN } Answer;

typedef struct Address {  // of a rank; ip 0: rank 0's machine
    uint32_t ip;          // network order
    int32_t port;
    char host[HOST];
} Address;

typedef struct Bytes {  // data[begin, end) in a buffer that grows
    char *data;
    size_t begin, end, room;
} Bytes;

// What goes over a socket after the joining: frames of one kind or the other, each with its length.
typedef enum FrameKind { NOTICE, SHARED } FrameKind;
typedef struct Frame {
    int32_t kind;
    uint32_t bytes;
} Frame;

typedef struct Peer {
    int socket;        // -1: myself
    atomic_bool gone;  // its socket has closed
    Bytes pending;     // frames that could not leave yet
    Bytes come;        // as it came: whole frames are taken from its beginning
    Bytes notices, shared;
} Peer;

static struct {
    int rank, ranks;
    double timeout;
    char secret[SECRET + 1];
    char *file, *token;
    int listener;
    bool crowded;  // more ranks here than cores: who waits must give its core away
    Peer *peer;
    int epoll, next;
    // the thread
    void (*died)(int rank);
    pthread_t watcher;
    int wake[2];
} state = {.epoll = -1};

// ---- who am I ----

static const char *const names[][2] = {{"RANK", "WORLD_SIZE"},
                                       {"SLURM_PROCID", "SLURM_NTASKS"},
                                       {"PMI_RANK", "PMI_SIZE"},
                                       {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"}};
enum { NAMES = sizeof names / sizeof *names };

static int number_in(const char *name) {
    const char *text = getenv(name);
    char *end;
    long value = strtol(text, &end, 10);
    CHECK(*text && !*end && value >= 0 && value <= 1 << 20, "%s=%s in the environment is not a count", name,
          text);
    return (int)value;
}

// The first pair of variables that is set, or NULL.
static const char *const *who(void) {
    for (int i = 0; i < NAMES; i++)
        if (getenv(names[i][0]) && getenv(names[i][1])) return names[i];
    return NULL;
}

static bool launched(void) { return who(); }

static const char *launch(int argc, char **argv, int ranks) {
    (void)argc, (void)argv, (void)ranks;
    return "--rendezvous takes RANK and WORLD_SIZE, or SLURM_PROCID and SLURM_NTASKS, from the "
           "environment, and "
           "they are not there";
}

// ---- bytes over sockets ----

static double deadline_in(double seconds) { return wall_seconds() + seconds; }

static int milliseconds_until(double deadline) {
    double left = 1e3 * (deadline - wall_seconds());
    return left < 0 ? 0 : left > 1e6 ? 1000000 : (int)left + 1;
}

// All of them, or false: closed, broken or too late.
static bool move_all(int socket, void *bytes, size_t count, bool out, double deadline) {
    for (size_t done = 0; done < count;) {
        struct pollfd ready = {.fd = socket, .events = out ? POLLOUT : POLLIN};
        if (poll(&ready, 1, milliseconds_until(deadline)) == 0) return false;
        ssize_t moved = out ? send(socket, (char *)bytes + done, count - done, MSG_NOSIGNAL | MSG_DONTWAIT)
                            : recv(socket, (char *)bytes + done, count - done, MSG_DONTWAIT);
        if (moved > 0) done += (size_t)moved;
        else if (moved == 0 || (errno != EAGAIN && errno != EINTR)) return false;
    }
    return true;
}

static bool put(int socket, const void *bytes, size_t count, double deadline) {
    return move_all(socket, (void *)bytes, count, true, deadline);
}

static bool get(int socket, void *bytes, size_t count, double deadline) {
    return move_all(socket, bytes, count, false, deadline);
}

static int new_socket(void) {
    int s = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1, idle = 10, between = 5, times = 3;
    CHECK(s >= 0, "--rendezvous: no socket can be opened: %s", strerror(errno));
    setsockopt(s, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    // A machine that vanishes closes nothing; these find it in half a minute.
    setsockopt(s, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
    setsockopt(s, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
    setsockopt(s, IPPROTO_TCP, TCP_KEEPINTVL, &between, sizeof between);
    setsockopt(s, IPPROTO_TCP, TCP_KEEPCNT, &times, sizeof times);
    return s;
}

static int new_listener(int *port) {
    int listener = new_socket();
    struct sockaddr_in address = {.sin_family = AF_INET};
    socklen_t size = sizeof address;
    CHECK(bind(listener, (struct sockaddr *)&address, size) == 0 && listen(listener, SOMAXCONN) == 0 &&
              getsockname(listener, (struct sockaddr *)&address, &size) == 0,
          "--rendezvous: cannot listen on any port: %s", strerror(errno));
    *port = ntohs(address.sin_port);
    return listener;
}

// -1 if nobody listens there.
static int connect_to(uint32_t ip, int port, double deadline) {
    int s = new_socket();
    struct sockaddr_in address = {
        .sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr = {ip}};
    fcntl(s, F_SETFL, O_NONBLOCK);
    if (connect(s, (struct sockaddr *)&address, sizeof address) < 0 && errno == EINPROGRESS) {
        struct pollfd ready = {.fd = s, .events = POLLOUT};
        poll(&ready, 1, milliseconds_until(deadline));
    }
    socklen_t size = sizeof address;
    if (getpeername(s, (struct sockaddr *)&address, &size) == 0) return s;
    close(s);
    return -1;
}

static Hello hello(int port) {
    Hello mine = {.rank = state.rank, .ranks = state.ranks, .port = port};
    memcpy(mine.magic, magic, sizeof magic);
    memcpy(mine.secret, state.secret, SECRET);
    gethostname(mine.host, sizeof mine.host - 1);
    return mine;
}

// One that knows the secret has come, and is a rank between these; else its socket is closed. -1: none in
// time.
static int accept_hello(int listener, Hello *from, double deadline) {
    struct pollfd ready = {.fd = listener, .events = POLLIN};
    if (poll(&ready, 1, milliseconds_until(deadline)) <= 0) return -1;
    int s = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
    // Who connects speaks at once; a stranger that is silent holds the others up for no longer than this.
    double patience = deadline_in(ATTEMPT_SECONDS);
    if (s >= 0 && get(s, from, sizeof *from, patience < deadline ? patience : deadline) &&
        !memcmp(from->magic, magic, sizeof magic) && !memcmp(from->secret, state.secret, SECRET) &&
        from->rank > 0)
        return s;
    if (s >= 0) close(s);
    return -1;
}

// ---- the file ----

// What FILE holds now; false: nothing that a rank 0 has written; errno is 0 if it is something else.
static bool read_file(char *host, int *port, char *secret) {
    char text[256] = "";
    FILE *file = fopen(state.file, "r");
    if (!file) return false;
    errno = 0;
    size_t got = fread(text, 1, sizeof text - 1, file);
    fclose(file);
    text[got] = '\0';
    return !strncmp(text, first_line, strlen(first_line)) &&
           sscanf(text + strlen(first_line), "%63s %d %32s", host, port, secret) == 3;
}

static bool file_is_mine(void) {
    char host[HOST], secret[SECRET + 1];
    int port;
    return read_file(host, &port, secret) && !strcmp(secret, state.secret);
}

static void write_text(const char *path, const char *text) {
    int file = open(path, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600);
    ssize_t length = (ssize_t)strlen(text);
    CHECK(file >= 0 && write(file, text, (size_t)length) == length && close(file) == 0,
          "--rendezvous %s cannot be written: %s", state.file, strerror(errno));
}

static void write_file(int port) {
    char host[HOST] = "", secret[SECRET + 1];
    int other;
    CHECK(access(state.file, F_OK) != 0 || read_file(host, &other, secret),
          "--rendezvous %s: there is such a file, and it is of something else: name a new one", state.file);
    gethostname(host, sizeof host - 1);
    char *text = format_text("%s%s %d %s\n", first_line, host, port, state.secret);
    char *before = format_text("%s.%s.new", state.file, state.secret);
    write_text(before, text);
    if (rename(before, state.file) != 0) {
        int why = errno;
        unlink(before);
        fatal("--rendezvous %s cannot be written: %s", state.file, strerror(why));
    }
    write_text(state.token, text);
    free(text);
    free(before);
}

static void draw_secret(void) {
    unsigned char bytes[SECRET / 2];
    CHECK(getrandom(bytes, sizeof bytes, 0) == sizeof bytes, "--rendezvous: no random numbers: %s",
          strerror(errno));
    for (size_t i = 0; i < sizeof bytes; i++) sprintf(state.secret + 2 * i, "%02x", bytes[i]);
}

static void name_token(void) {
    free(state.token);
    state.token = format_text("%s.%.8s", state.file, state.secret);
}

// ---- joining: rank 0 ----

static void answer_one(int socket, Answer answer) {
    int32_t word = answer;
    put(socket, &word, sizeof word, deadline_in(1));
}

static void answer_all(Answer answer) {
    for (int r = 1; r < state.ranks; r++)
        if (state.peer[r].socket >= 0) answer_one(state.peer[r].socket, answer);
}

static void remove_files(void) {
    if (file_is_mine()) unlink(state.file);
    unlink(state.token);
}

static void end_joining(Answer answer, const char *format, ...) PRINTF_LIKE(2, 3) NO_RETURN;
static void end_joining(Answer answer, const char *format, ...) {
    char sentence[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(sentence, sizeof sentence, format, arguments);
    va_end(arguments);
    answer_all(answer);
    remove_files();
    // Who is on its way here hears it, too.
    Hello from;
    for (double until = deadline_in(0.5); wall_seconds() < until;) {
        int s = accept_hello(state.listener, &from, until);
        if (s >= 0) answer_one(s, answer);
    }
    fatal("%s", sentence);
}

// "rank 2", "ranks 1, 2 and 3 more"
static const char *missing_text(void) {
    static char text[64];
    int count = 0, used = 0;
    for (int r = 1; r < state.ranks; r++) count += state.peer[r].socket < 0;
    used += snprintf(text, sizeof text, count > 1 ? "ranks" : "rank");
    for (int r = 1, named = 0; r < state.ranks && named < 4; r++)
        if (state.peer[r].socket < 0)
            used += snprintf(text + used, sizeof text - (size_t)used, "%s%d", named++ ? ", " : " ", r);
    if (count > 4) snprintf(text + used, sizeof text - (size_t)used, " and %d more", count - 4);
    return text;
}

static uint32_t address_of(int socket, bool peer) {
    struct sockaddr_in address = {0};
    socklen_t size = sizeof address;
    if (peer) getpeername(socket, (struct sockaddr *)&address, &size);
    else getsockname(socket, (struct sockaddr *)&address, &size);
    return address.sin_addr.s_addr;
}

static void gather_ranks(Address *table, double timeout, double deadline) {
    for (int come = 1; come < state.ranks;) {
        Hello from;
        double look = deadline_in(0.5);
        int s = accept_hello(state.listener, &from, look < deadline ? look : deadline);
        if (s < 0) {
            if (wall_seconds() > deadline)
                end_joining(ENDED, "--rendezvous %s: %s of %d did not come in %.3g s (--timeout)",
                            state.file, missing_text(), state.ranks, timeout);
            if (!file_is_mine())
                end_joining(TAKEN,
                            "--rendezvous %s: another run has taken the file: each run needs its own",
                            state.file);
            continue;
        }
        bool other = from.ranks != state.ranks, twice = !other && state.peer[from.rank].socket >= 0;
        if (other || twice) answer_one(s, ENDED);
        if (other)
            end_joining(
                ENDED, "rank %d on %s was started as one of %d ranks (WORLD_SIZE), and rank 0 as one of %d",
                from.rank, from.host, from.ranks, state.ranks);
        if (twice)
            end_joining(ENDED,
                        "--rendezvous %s: two processes say that they are rank %d (RANK), the second on %s",
                        state.file, from.rank, from.host);
        state.peer[from.rank].socket = s;
        Address *a = &table[from.rank];
        a->ip = address_of(s, true);
        if (a->ip == htonl(INADDR_LOOPBACK) || a->ip == address_of(s, false)) a->ip = 0;
        a->port = from.port;
        memcpy(a->host, from.host, sizeof a->host);
        come++;
    }
    gethostname(table[0].host, sizeof table[0].host - 1);
    answer_all(WELCOME);
    for (int r = 1; r < state.ranks; r++)
        if (!put(state.peer[r].socket, table, sizeof *table * (size_t)state.ranks, deadline))
            end_joining(ENDED, "rank %d on %s was there, and has gone", r, table[r].host);
    if (file_is_mine()) unlink(state.file);
}

// ---- joining: the others ----

// The address of a host as its name says, or of this machine.
static bool look_up(const char *host, uint32_t *ip) {
    char here[HOST] = "";
    gethostname(here, sizeof here - 1);
    *ip = htonl(INADDR_LOOPBACK);
    if (!strcmp(host, here)) return true;
    struct addrinfo want = {.ai_family = AF_INET, .ai_socktype = SOCK_STREAM}, *found;
    if (getaddrinfo(host, NULL, &want, &found) != 0) return false;
    *ip = ((struct sockaddr_in *)found->ai_addr)->sin_addr.s_addr;
    freeaddrinfo(found);
    return true;
}

static void join_rank_0(int port_of_mine, Address *table, double timeout, double deadline) {
    char host[HOST] = "", why[256] = "";
    for (; wall_seconds() < deadline; usleep(50000)) {
        int port;
        uint32_t ip;
        if (!read_file(host, &port, state.secret)) {
            if (!*why || errno != ENOENT)
                snprintf(why, sizeof why,
                         errno == ENOENT ? "the file is not there"
                         : errno         ? "the file cannot be read"
                                         : "the file is of something else");
            continue;
        }
        if (!look_up(host, &ip)) {
            snprintf(why, sizeof why, "it names %s, which has no address here", host);
            continue;
        }
        double patience = deadline_in(ATTEMPT_SECONDS);
        int s = connect_to(ip, port, patience < deadline ? patience : deadline);
        snprintf(why, sizeof why, "it names port %d of %s, where nobody waits: it is of an earlier run",
                 port, host);
        if (s < 0) continue;
        Hello mine = hello(port_of_mine);
        int32_t answer = 0;
        // While others are missing rank 0 is silent. It is the one to say that they are; so it is given
        // longer.
        double longer = deadline + 5;
        if (put(s, &mine, sizeof mine, deadline) && get(s, &answer, sizeof answer, longer) &&
            answer == WELCOME && get(s, table, sizeof *table * (size_t)state.ranks, longer)) {
            state.peer[0].socket = s;
            table[0].ip = ip;
            for (int r = 1; r < state.ranks; r++)
                if (!table[r].ip) table[r].ip = ip;
            name_token();
            return;
        }
        close(s);
        if (answer == ENDED) _exit(STATUS_USAGE);
        if (answer == 0 && wall_seconds() >= deadline)
            snprintf(why, sizeof why, "rank 0 on %s answers nothing", host);
    }
    fatal("--rendezvous %s: rank 0 did not come in %.3g s (--timeout): %s", state.file, timeout, why);
}

// Rank r calls ranks 1 … r - 1, and is called by r + 1 … n - 1.
static void connect_others(const Address *table, double timeout, double deadline) {
    for (int r = 1; r < state.rank; r++) {
        int s = connect_to(table[r].ip, table[r].port, deadline);
        Hello mine = hello(0);
        CHECK(s >= 0 && put(s, &mine, sizeof mine, deadline),
              "rank %d cannot reach rank %d at %s, port %d, as a firewall would have it", state.rank, r,
              inet_ntoa((struct in_addr){table[r].ip}), table[r].port);
        state.peer[r].socket = s;
    }
    for (int missing = state.rank ? state.ranks - 1 - state.rank : 0; missing > 0;) {
        Hello from;
        int s = accept_hello(state.listener, &from, deadline);
        CHECK(s >= 0 || wall_seconds() < deadline,
              "rank %d: %d higher ranks did not connect in %.3g s (--timeout)", state.rank, missing,
              timeout);
        if (s < 0) continue;
        CHECK(from.rank > state.rank && from.rank < state.ranks && state.peer[from.rank].socket < 0,
              "rank %d: a process on %s says that it is rank %d, and cannot be", state.rank, from.host,
              from.rank);
        state.peer[from.rank].socket = s;
        missing--;
    }
}

// ---- the thread that sees deaths ----

static void *watch(void *unused) {
    (void)unused;
    struct pollfd *look = host_alloc(sizeof *look * (size_t)(state.ranks + 1));
    for (int r = 0; r < state.ranks; r++)
        look[r] = (struct pollfd){.fd = state.peer[r].socket, .events = POLLRDHUP};
    look[state.ranks] = (struct pollfd){.fd = state.wake[0], .events = POLLIN};
    while (!look[state.ranks].revents) {
        if (poll(look, (nfds_t)state.ranks + 1, -1) < 0) continue;
        for (int r = 0; r < state.ranks && !look[state.ranks].revents; r++)
            if (look[r].fd >= 0 && look[r].revents) {
                look[r].fd = -1;
                state.peer[r].gone = true;
                state.died(r);
            }
    }
    free(look);
    return NULL;
}

static void start_watching(void) {
    sigset_t all, before;
    CHECK(pipe2(state.wake, O_CLOEXEC) == 0, "--rendezvous: no pipe can be opened: %s", strerror(errno));
    sigfillset(&all);  // signals are for the thread that works
    pthread_sigmask(SIG_SETMASK, &all, &before);
    CHECK(pthread_create(&state.watcher, NULL, watch, NULL) == 0, "--rendezvous: no thread can be started");
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

// ---- start ----

static void start(const Joining *how, int *rank, int *ranks) {
    const char *const *pair = who();
    state.rank = *rank = number_in(pair[0]);
    state.ranks = *ranks = number_in(pair[1]);
    CHECK(state.rank < state.ranks, "%s=%d is no rank of %s=%d: they count from 0", pair[0], state.rank,
          pair[1], state.ranks);
    state.file = format_text("%s", how->rendezvous);
    state.died = how->died;
    state.timeout = how->timeout;
    state.peer = calloc((size_t)state.ranks, sizeof *state.peer);
    Address *table = calloc((size_t)state.ranks, sizeof *table);
    CHECK(state.peer && table, "out of host memory for %d ranks", state.ranks);
    for (int r = 0; r < state.ranks; r++) state.peer[r].socket = -1;
    double deadline = deadline_in(how->timeout);
    int port;
    state.listener = new_listener(&port);
    if (state.rank == 0) {
        draw_secret();
        name_token();
        write_file(port);
        gather_ranks(table, how->timeout, deadline);
    } else {
        join_rank_0(port, table, how->timeout, deadline);
        connect_others(table, how->timeout, deadline);
    }
    close(state.listener);
    int here = 0;
    for (int r = 0; r < state.ranks; r++) here += !strcmp(table[r].host, table[state.rank].host);
    state.crowded = here > sysconf(_SC_NPROCESSORS_ONLN);
    free(table);
    state.epoll = epoll_create1(EPOLL_CLOEXEC);
    CHECK(state.epoll >= 0, "--rendezvous: no epoll: %s", strerror(errno));
    for (int r = 0; r < state.ranks; r++) {
        struct epoll_event event = {.events = EPOLLIN, .data.u32 = (uint32_t)r};
        if (state.peer[r].socket >= 0) epoll_ctl(state.epoll, EPOLL_CTL_ADD, state.peer[r].socket, &event);
    }
    start_watching();
}

// ---- frames ----

static void bytes_add(Bytes *b, const void *data, size_t count) {
    if (b->begin == b->end) b->begin = b->end = 0;
    if (b->end + count > b->room) {
        if (b->begin < b->end) memmove(b->data, b->data + b->begin, b->end - b->begin);
        b->end -= b->begin;
        b->begin = 0;
        while (b->end + count > b->room) b->room = 2 * b->room + 1024;
        b->data = realloc(b->data, b->room);
        CHECK(b->data, "out of host memory for what ranks tell each other");
    }
    if (data) memcpy(b->data + b->end, data, count);
    b->end += data ? count : 0;
}

static bool bytes_take(Bytes *b, void *to, size_t count) {
    if (b->end - b->begin < count) return false;
    memcpy(to, b->data + b->begin, count);
    b->begin += count;
    return true;
}

static void flush_pending(Peer *peer) {
    Bytes *b = &peer->pending;
    while (b->begin < b->end) {
        ssize_t moved =
            send(peer->socket, b->data + b->begin, b->end - b->begin, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (moved <= 0) return;  // later; a peer that is gone misses nothing
        b->begin += (size_t)moved;
    }
}

static void send_frame(int rank, FrameKind kind, const void *data, size_t bytes) {
    Frame frame = {kind, (uint32_t)bytes};
    bytes_add(&state.peer[rank].pending, &frame, sizeof frame);
    bytes_add(&state.peer[rank].pending, data, bytes);
    flush_pending(&state.peer[rank]);
}

static void sort_frames(Peer *peer) {
    Bytes *b = &peer->come;
    Frame frame;
    while (b->end - b->begin >= sizeof frame) {
        memcpy(&frame, b->data + b->begin, sizeof frame);
        if (b->end - b->begin < sizeof frame + frame.bytes) return;
        bytes_add(frame.kind == NOTICE ? &peer->notices : &peer->shared, b->data + b->begin + sizeof frame,
                  frame.bytes);
        b->begin += sizeof frame + frame.bytes;
    }
}

// Takes what has come and sends what could not leave before; true if something came.
static bool move_frames(void) {
    struct epoll_event ready[16];
    int count = epoll_wait(state.epoll, ready, 16, 0);
    for (int i = 0; i < count; i++) {
        Peer *peer = &state.peer[ready[i].data.u32];
        bytes_add(&peer->come, NULL, READ_AHEAD);  // room for it
        ssize_t moved = recv(peer->socket, peer->come.data + peer->come.end, READ_AHEAD, MSG_DONTWAIT);
        if (moved > 0) {
            peer->come.end += (size_t)moved;
            sort_frames(peer);
        } else if (moved == 0 || (errno != EAGAIN && errno != EINTR)) {
            epoll_ctl(state.epoll, EPOLL_CTL_DEL, peer->socket, NULL);  // the thread knows what to do
        }
    }
    for (int r = 0; r < state.ranks; r++) flush_pending(&state.peer[r]);
    return count > 0;
}

static void share(const void *mine, void *all, size_t bytes) {
    for (int r = 0; r < state.ranks; r++)
        if (r != state.rank) send_frame(r, SHARED, mine, bytes);
    memcpy((char *)all + bytes * (size_t)state.rank, mine, bytes);
    for (int r = 0; r < state.ranks; r++)
        for (double until = deadline_in(state.timeout);
             r != state.rank &&
             !bytes_take(&state.peer[r].shared, (char *)all + bytes * (size_t)r, bytes);) {
            if (!move_frames()) sched_yield();
            CHECK(wall_seconds() < until, "rank %d said nothing for %.3g s (--timeout) while the ranks met",
                  r, state.timeout);
        }
}

static void send_notice(const Notice *notice, int rank) {
    send_frame(rank, NOTICE, notice, sizeof *notice);
}

static bool take_notice(Notice *notice, int *rank) {
    for (int i = 0; i < state.ranks; i++) {
        int r = (state.next + i) % state.ranks;
        if (!bytes_take(&state.peer[r].notices, notice, sizeof *notice)) continue;
        *rank = state.next = r;
        return true;
    }
    return false;
}

static bool receive_notice(Notice *notice, int *rank) {
    if (take_notice(notice, rank)) return true;
    if (!move_frames() && state.crowded) sched_yield();
    return take_notice(notice, rank);
}

// ---- the end ----

static bool gone(int rank) { return state.peer[rank].gone; }

static bool claim(void) { return !state.token || unlink(state.token) == 0 || errno != ENOENT; }

// The sockets close, and the others' threads see it.
static void abort_all(int status) { _exit(status); }

static bool is_pending(const Peer *peer) { return !peer->gone && peer->pending.begin < peer->pending.end; }

static void finish(void) {
    if (state.rank == 0) unlink(state.token);
    for (int r = 0; r < state.ranks; r++)
        for (double until = deadline_in(5); is_pending(&state.peer[r]) && wall_seconds() < until;
             sched_yield())
            flush_pending(&state.peer[r]);
    if (write(state.wake[1], "", 1) == 1) pthread_join(state.watcher, NULL);
    for (int r = 0; r < state.ranks; r++) {
        if (state.peer[r].socket >= 0) close(state.peer[r].socket);
        Peer *peer = &state.peer[r];
        Bytes *buffers[] = {&peer->pending, &peer->come, &peer->notices, &peer->shared};
        for (int i = 0; i < 4; i++) free(buffers[i]->data);
    }
    close(state.wake[0]);
    close(state.wake[1]);
    close(state.epoll);
    free(state.peer);
    free(state.file);
    free(state.token);
    state.token = NULL;
}

const Control control_tcp = {"a launcher",   launched, launch, start,     share, send_notice,
                             receive_notice, gone,     claim,  abort_all, finish};
