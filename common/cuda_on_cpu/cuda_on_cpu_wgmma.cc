// cuda_on_cpu_wgmma.cc: products of a warpgroup, from the PTX ISA: "Asynchronous Warpgroup Level Matrix
// Multiply-Accumulate Instructions". Each warp has its rows of a product, which is computed when the warp
// waits for it: until then its sums are 0xff (NaN), as these registers must not be read, and its tiles are
// checked twice, when it is issued and when it is done. Sums are f32, one product after another; a tensor
// core may add in another order, and round less carefully. With 8-bit numbers, Hopper's tensor cores add 32
// products at a time, of which they keep 14 bits (sum_in_bits, tensor/tensor.h).
//
// A group must begin with wgmma_fence, even if the ISA does not require it because the sums were not accessed
// since the last one.
#include "cuda/instructions_hopper.h"
#include "cuda_on_cpu_inside.h"

enum { WARPS = 4, WARP_ROWS = 16, K_BYTES = 32, MOST_K = 32, MOST_N = 256, BITS_OF_8_BIT_SUM = 14 };

namespace {
// One warp's part of a product.
struct Product {
    CudaWgmma of_lane[LANES];
    uint32_t a[LANES][4];       // A's registers at issue
    uintptr_t low[2], high[2];  // the address ranges of its operands, A and B
    uint32_t group;
    const char *file;
    int line;
    const void *site;
};

// The future contents of the lanes' registers `d`.
struct Sums {
    float *d[LANES];
    int count;
    float at[LANES][MOST_N / 2];
};

struct Cores {
    uint32_t block;  // the block_start for which this is valid
    List<Product> products;
    List<Sums> sums;
    uint32_t committed, issued;
    uint16_t waits;
    bool fenced;
};

// The first warp's issue of each product of a warpgroup, with which the others must agree.
struct Issue {
    uint64_t a, b;
    const char *file;
    int line;
};
struct Group {
    uint32_t block;
    List<Issue> issues;
};
}  // namespace

static Cores cores[MAX_WARPS];
static Group groups[MAX_WARPS / WARPS];
int wgmma_in_flight;

static Cores *cores_of(int warp) {
    Cores *c = &cores[warp];
    if (c->block == now.block_start) return c;
    c->block = now.block_start;
    c->products.count = c->sums.count = 0;
    c->committed = c->issued = c->waits = 0, c->fenced = false;
    return c;
}

static List<Issue> *issues_of(int warp) {
    Group *g = &groups[warp / WARPS];
    if (g->block != now.block_start) g->block = now.block_start, g->issues.count = 0;
    return &g->issues;
}

// ---- operands in shared memory ----

// On the CPU, bit 15 of a descriptor means that its operand is in a static array.
uint64_t cuda_wgmma_operand(const void *at, uint32_t next) {
    const uint32_t number = memory_shared_number(at, __builtin_return_address(0));
    return wgmma_descriptor(number, next) | (uint64_t)(number >> 18) << 15;
}

// Calls f(16 bytes, row, k) for an operand's rows from `first` on, whose numbers have so many bytes: each
// call's bytes begin with element (row, k) of A, or (column, k) of B.
template <class F>
static inline void each_chunk(uint64_t operand, Major major, int bytes, int first, int rows, F f) {
    const uint32_t start = ((uint32_t)operand & 0x3fff) << 4, next = ((uint32_t)(operand >> 16) & 0x3fff)
                                                                     << 4;
    const uint32_t stride = ((uint32_t)(operand >> 32) & 0x3fff) << 4;
    const char *memory = memory_shared_at((uint32_t)(operand >> 15 & 1) << 18);
    const auto swizzled = [&](uint32_t at) { return memory + (at ^ (at / TILE_ROW % 8) << 4); };
    for (int row = first; row < first + rows && major == K_MAJOR; row++) {
        const uint32_t r = (uint32_t)row;
        for (uint32_t c = 0; c < K_BYTES; c += 16)
            f(swizzled(start + r / 8 * stride + r % 8 * TILE_ROW + c), row, (int)c / bytes);
    }
    for (int row = first; row < first + rows && major == MN_MAJOR; row += 8) {
        const uint32_t r = (uint32_t)row;
        for (uint32_t k = 0; k < (uint32_t)(K_BYTES / bytes); k++)
            f(swizzled(start + r / 64 * next + r % 64 * 2 + k / 8 * stride + k % 8 * TILE_ROW), row,
              (int)k);
    }
}

// The same for everything that a warp reads.
template <class F>
static void each_chunk_of(const Product &p, int warp, F f) {
    const CudaWgmma &x = p.of_lane[0];
    if (!x.a) each_chunk(x.operand_a, x.major_a, x.bytes, warp % WARPS * WARP_ROWS, WARP_ROWS, f);
    each_chunk(x.operand_b, x.major_b, x.bytes, 0, x.n, f);
}

void wgmma_need_unread(uintptr_t address, size_t size, const void *site) {
    for (int w = 0; w * LANES < now.threads; w++) {
        const Cores *c = cores_of(w);
        for (size_t i = 0; i < c->products.count; i++) {
            const Product &p = c->products.items[i];
            if ((address + size <= p.low[0] || p.high[0] <= address) &&
                (address + size <= p.low[1] || p.high[1] <= address))
                continue;
            each_chunk_of(p, w, [&](const char *chunk, int, int) {
                if (address < (uintptr_t)chunk + 16 && (uintptr_t)chunk < address + size)
                    broken(
                        site,
                        "writes to a tile that a wgmma of warp %d (%s:%d) reads, for which that warp has "
                        "not waited",
                        w, p.file, p.line);
            });
        }
    }
}

// Each byte must have been written, ordered before this thread, and must no longer be in flight.
static void look(const Product &p, int warp, uint16_t stamp) {
    const Agent agent = {TENSOR_CORES + warp, stamp};
    now.agent = &agent;
    each_chunk_of(p, warp, [&](const char *chunk, int, int) { memory_async_load(chunk, 16, p.site); });
    now.agent = NULL;
}

// ---- issue ----

static void find_range(Product *p, int operand, uint64_t descriptor, Major major, int first, int rows) {
    p->low[operand] = UINTPTR_MAX, p->high[operand] = 0;
    each_chunk(descriptor, major, p->of_lane[0].bytes, first, rows, [&](const char *chunk, int, int) {
        if (p->low[operand] > (uintptr_t)chunk) p->low[operand] = (uintptr_t)chunk;
        if (p->high[operand] < (uintptr_t)chunk + 16) p->high[operand] = (uintptr_t)chunk + 16;
    });
}

// An operand begins where the swizzle does, at a multiple of 1024 bytes, as its descriptor does not say
// otherwise; if its rows are along k, also further on in the first row, which has all of its 32 bytes.
static void need_operand(const Product &p, uint64_t operand, Major major, int rows) {
    const int first = (int)(operand << 4) % TILE_ALIGNMENT, next = (int)(operand >> 16 & 0x3fff) << 4;
    const int most = major == K_MAJOR ? TILE_ROW - K_BYTES : 0;
    if (operand >> 62 != 1)
        broken(p.site, "has wgmma read an operand of swizzle mode %d; here there is the 128-byte one, 1",
               (int)(operand >> 62));
    if (operand >> 49 & 7) broken(p.site, "has wgmma read an operand whose swizzle begins elsewhere");
    if (first > most)
        broken(p.site,
               "has wgmma read an operand that begins %d bytes behind a multiple of %d; %d are the most",
               first, (int)TILE_ALIGNMENT, most);
    if (major == MN_MAJOR && rows > TILE_ROW / 2 && next % TILE_ALIGNMENT)
        broken(p.site,
               "has wgmma read an operand whose tiles are %d bytes apart, which is no multiple of %d", next,
               (int)TILE_ALIGNMENT);
}

static void need_agreement(const Product &p, int warp, Cores *c) {
    const CudaWgmma &x = p.of_lane[0];
    for (int l = 1; l < LANES; l++) {
        const CudaWgmma &y = p.of_lane[l];
        if (y.operand_a != x.operand_a || y.operand_b != x.operand_b || y.add != x.add || y.n != x.n)
            broken(p.site, "calls wgmma with other operands than lane 0 of its warp");
    }
    List<Issue> *group = issues_of(warp);
    if (c->issued == group->count) group->add({x.operand_a, x.operand_b, p.file, p.line});
    const Issue &first = group->items[c->issued++];
    if (first.a != x.operand_a || first.b != x.operand_b || first.line != p.line)
        broken(p.site,
               "calls wgmma with other operands than the warps beside it (%s:%d): a warpgroup multiplies "
               "together",
               first.file, first.line);
}

static Sums *sums_at(Cores *c, const float *d) {
    for (size_t i = 0; i < c->sums.count; i++)
        if (c->sums.items[i].d[0] == d) return &c->sums.items[i];
    return NULL;
}

static void take_sums(Cores *c, const Product &p) {
    const int count = p.of_lane[0].n / 2;
    if (Sums *s = sums_at(c, p.of_lane[0].d)) {
        if (s->count != count) broken(p.site, "has wgmma add to sums of another shape, in flight");
        return;
    }
    c->sums.add(Sums());
    Sums *s = &c->sums.items[c->sums.count - 1];
    s->count = count;
    for (int l = 0; l < LANES; l++) {
        s->d[l] = p.of_lane[l].d;
        memcpy(s->at[l], s->d[l], (size_t)count * sizeof(float));
        memset(s->d[l], 0xff, (size_t)count * sizeof(float));
    }
}

static void issue(Warp *w, int warp, Cores *c) {
    Product p;
    for (int l = 0; l < LANES; l++) {
        p.of_lane[l] = *reinterpret_cast<const CudaWgmma *>(w->value[l]);
        if (p.of_lane[l].a) memcpy(p.a[l], p.of_lane[l].a, sizeof p.a[l]);
    }
    p.group = c->committed, p.file = now.thread->file, p.line = now.thread->line;
    p.site = p.of_lane[0].site;
    const CudaWgmma &x = p.of_lane[0];
    if (now.threads < (warp / WARPS + 1) * WARPS * LANES)
        broken(p.site, "calls wgmma in a warpgroup of %d threads; it takes all %d",
               now.threads - warp / WARPS * WARPS * LANES, WARPS * LANES);
    if (!c->fenced) broken(p.site, "begins a group of wgmma with no wgmma_fence() before it");
    if (!x.a) need_operand(p, x.operand_a, x.major_a, WARPS * WARP_ROWS);
    need_operand(p, x.operand_b, x.major_b, x.n);
    need_agreement(p, warp, c);
    find_range(&p, 0, x.operand_a, x.major_a, warp % WARPS * WARP_ROWS, x.a ? 0 : WARP_ROWS);
    find_range(&p, 1, x.operand_b, x.major_b, 0, x.n);
    look(p, warp, c->waits);
    take_sums(c, p);
    c->products.add(p);
    wgmma_in_flight++;
    if (!now.counting) return;
    count_tensor(2 * WARP_ROWS * x.n * (K_BYTES / x.bytes), 8 * x.bytes);
    const int64_t passes_a = x.a ? 0 : WARP_ROWS * K_BYTES / 128, passes_b = x.n * K_BYTES / 128;
    count_passes(passes_a + (warp % WARPS == 0 ? passes_b : 0));
    tape_product(warp, WARP_ROWS * x.n * 32, passes_a + (warp % WARPS == 0 ? passes_b : 0), p.line);
}

// ---- wait ----

// Row and column of a lane's i-th sum.
struct Place {
    int row, column;
};
static Place place_d(int lane, int i) {
    return {lane / 4 + i / 2 % 2 * 8, i / 4 * 8 + lane % 4 * 2 + i % 2};
}

static float left[WARP_ROWS][MOST_K], right[MOST_K][MOST_N];

// The i-th number, where a register has two or four, the lowest bits first.
static inline float number(const CudaWgmma &x, const float *values, const void *numbers, int i) {
    uint16_t code;
    if (x.bytes == 1) return values[static_cast<const uint8_t *>(numbers)[i]];
    memcpy(&code, static_cast<const char *>(numbers) + 2 * i, sizeof code);
    return values[code];
}

static void read_left(const Product &p, int warp) {
    const CudaWgmma &x = p.of_lane[0];
    const float *values = values_of(x.widen);
    const int row0 = warp % WARPS * WARP_ROWS, each = 4 / x.bytes;  // numbers per register
    for (int l = 0; l < LANES && x.a; l++)
        for (int i = 0; i < 4 * each; i++)
            left[l / 4 + i / each % 2 * 8][l % 4 * each + i % each + i / each / 2 * 4 * each] =
                number(x, values, p.a[l], i);
    if (x.a) return;
    each_chunk(x.operand_a, x.major_a, x.bytes, row0, WARP_ROWS, [&](const char *chunk, int row, int k) {
        for (int i = 0; i < 16 / x.bytes; i++)
            *(x.major_a == K_MAJOR ? &left[row - row0][k + i] : &left[row - row0 + i][k]) =
                number(x, values, chunk, i);
    });
}

static void read_right(const CudaWgmma &x) {
    const float *values = values_of(x.widen);
    each_chunk(x.operand_b, x.major_b, x.bytes, 0, x.n, [&](const char *chunk, int column, int k) {
        for (int i = 0; i < 16 / x.bytes; i++)
            *(x.major_b == K_MAJOR ? &right[k + i][column] : &right[k][column + i]) =
                number(x, values, chunk, i);
    });
}

// Not in the header: code that is compiled with a kernel would be counted as its work.
float cuda_widen_e4m3(uint16_t code) { return f32_from_e4m3((uint8_t)code); }

// sum += 32 products of 8-bit numbers, in as many bits.
static void multiply_8_bits(float (*sum)[MOST_N], int n) {
    for (int row = 0; row < WARP_ROWS; row++)
        for (int column = 0; column < n; column++) {
            CodeProduct products[MOST_K];
            for (int k = 0; k < MOST_K; k++)
                products[k] = code_product(left[row][k], E4M3, right[k][column], E4M3);
            sum[row][column] = (float)sum_in_bits(sum[row][column], products, MOST_K, BITS_OF_8_BIT_SUM);
        }
}

static void multiply(const Product &p, int warp, Sums *s) {
    static float sum[WARP_ROWS][MOST_N];
    const CudaWgmma &x = p.of_lane[0];
    read_left(p, warp);
    read_right(x);
    for (int l = 0; l < LANES; l++)
        for (int i = 0; i < s->count; i++) {
            const Place d = place_d(l, i);
            sum[d.row][d.column] = x.add ? s->at[l][i] : 0;
        }
    if (x.bytes == 1) multiply_8_bits(sum, x.n);
    for (int row = 0; row < WARP_ROWS && x.bytes == 2; row++)
        for (int k = 0; k < K_BYTES / 2; k++)
            for (int column = 0; column < x.n; column++)
                sum[row][column] += left[row][k] * right[k][column];
    for (int l = 0; l < LANES; l++)
        for (int i = 0; i < s->count; i++) {
            const Place d = place_d(l, i);
            s->at[l][i] = sum[d.row][d.column];
        }
}

static void need_untouched(const Product &p, const Sums *s) {
    for (int l = 0; l < LANES; l++) {
        const CudaWgmma &x = p.of_lane[l];
        if (x.a && memcmp(x.a, p.a[l], sizeof p.a[l]) != 0)
            broken(p.site, "changes the registers of A before it has waited for this wgmma");
        for (int i = 0; i < s->count; i++) {
            uint32_t bits;
            memcpy(&bits, &s->d[l][i], sizeof bits);
            if (bits != 0xffffffff)
                broken(p.site, "changes the registers of D before it has waited for this wgmma");
        }
    }
}

static void give_sums(Cores *c) {
    size_t kept = 0;
    for (size_t i = 0; i < c->sums.count; i++) {
        Sums *s = &c->sums.items[i];
        bool in_flight = false;
        for (size_t j = 0; j < c->products.count; j++)
            in_flight |= c->products.items[j].of_lane[0].d == s->d[0];
        if (!in_flight)
            for (int l = 0; l < LANES; l++) memcpy(s->d[l], s->at[l], (size_t)s->count * sizeof(float));
        else c->sums.items[kept++] = *s;
    }
    c->sums.count = kept;
}

static void wait(Warp *w, int warp, Cores *c, uint32_t pending) {
    size_t done = 0, count = c->products.count;
    if (count && c->products.items[count - 1].group == c->committed)
        broken(c->products.items[count - 1].site,
               "waits with this wgmma in no group: wgmma_commit() is missing");
    for (; done < count && c->products.items[done].group + pending < c->committed; done++) {
        const Product &p = c->products.items[done];
        Sums *s = sums_at(c, p.of_lane[0].d);
        need_untouched(p, s);
        look(p, warp, c->waits);
        multiply(p, warp, s);
    }
    c->products.count -= done;
    memmove(static_cast<void *>(c->products.items), c->products.items + done,
            c->products.count * sizeof(Product));
    wgmma_in_flight -= (int)done;
    give_sums(c);
    clocks_know_tensor_cores(w, ++c->waits);
}

// ---- registers ----

// "setmaxnreg": registers that a warpgroup gives up go to a pool of its block, and a warpgroup that takes
// some waits until there are enough. Here nothing waits: the sum at the end tells whether one would wait
// for ever.
enum { ALL_REGISTERS = 65536, MOST_REGISTERS = 256, LEAST_REGISTERS = 24, REGISTERS_AT_ONCE = 8 };

namespace {
struct Registers {  // of each of a warp's threads
    uint32_t block;
    int count, line;  // line: where it was last changed
    const char *file;
};
}  // namespace
static Registers registers[MAX_WARPS];
static uint32_t registers_moved;  // the block_start of the last block that moves any

// If a multiprocessor has one block.
static int registers_at_launch(void) {
    const int fit = ALL_REGISTERS / now.threads / REGISTERS_AT_ONCE * REGISTERS_AT_ONCE;
    return fit < MOST_REGISTERS ? fit : MOST_REGISTERS;
}

static Registers *registers_of(int warp) {
    Registers *r = &registers[warp];
    if (r->block != now.block_start) *r = {now.block_start, registers_at_launch(), 0, NULL};
    return r;
}

static void move_registers(int warp, int count, bool take) {
    Registers *r = registers_of(warp);
    const Thread *t = now.thread;
    if (count < LEAST_REGISTERS || count > MOST_REGISTERS || count % REGISTERS_AT_ONCE)
        broken(NULL, "asks for %d registers (%s:%d); possible are multiples of %d from %d to %d", count,
               t->file, t->line, (int)REGISTERS_AT_ONCE, (int)LEAST_REGISTERS, (int)MOST_REGISTERS);
    if (take ? count < r->count : count > r->count)
        broken(NULL, "%s registers so that it has %d (%s:%d), and has %d", take ? "takes" : "gives back",
               count, t->file, t->line, r->count);
    *r = {now.block_start, count, t->line, t->file};
    registers_moved = now.block_start;
}

static void need_registers(void) {
    if (registers_moved != now.block_start) return;
    Thread *me = now.thread;
    int all = 0, taker = 0, count = 0;
    for (; count * LANES < now.threads; count++) {
        const Registers *r = registers_of(count), *first = registers_of(count / WARPS * WARPS);
        now.thread = &threads[count * LANES];
        if (r->count != first->count)
            broken(NULL, "leaves the kernel with %d registers, and warp %d of its warpgroup with %d",
                   r->count, count / WARPS * WARPS, first->count);
        all += r->count;
        if (r->count > registers_of(taker)->count) taker = count;
    }
    now.thread = &threads[taker * LANES];
    if (all > registers_at_launch() * count)
        broken(NULL,
               "waits for ever in registers_take (%s:%d): the block's warps want %d registers a lane, and "
               "have %d",
               registers_of(taker)->file, registers_of(taker)->line, all, registers_at_launch() * count);
    now.thread = me;
}

void wgmma_meet(Warp *w, int op) {
    const int warp = (int)(w - warps);
    const uint64_t value = w->value[now.thread->lane];
    if (op == WARP_REGISTERS) return move_registers(warp, (int)(value >> 1), value & 1);
    Cores *c = cores_of(warp);
    if (op == WARP_WGMMA) return issue(w, warp, c);
    if (op == WARP_WGMMA_WAIT) {
        tape_finish(warp, (uint32_t)value);
        wait(w, warp, c, (uint32_t)value);
    }
    if (op == WARP_WGMMA_COMMIT) c->committed++, tape_commit(warp);
    c->fenced = op == WARP_WGMMA_FENCE;
}

void wgmma_leave(bool last) {
    const int warp = now.thread->warp;
    const Cores *c = cores_of(warp);
    if (c->products.count)
        broken(c->products.items[0].site, "leaves the kernel with this wgmma in flight: a wait is missing");
    if (c->issued < issues_of(warp)->count) {
        const Issue &next = issues_of(warp)->items[c->issued];
        broken(NULL, "leaves the kernel without the wgmma (%s:%d) of the warps beside it", next.file,
               next.line);
    }
    if (last) need_registers();
}

// ---- what kernels call ----

static uint64_t together(CudaWarpOp op, uint64_t value, const char *file, int line) {
    const int lanes = now.threads - now.thread->warp * LANES;
    if (lanes < LANES)
        broken(NULL, "calls wgmma (%s:%d) in a warp of %d lanes; it takes all %d", file, line, lanes,
               (int)LANES);
    return cuda_warp_op(op, ~0u, value, 0, LANES, file, line);
}

void cuda_wgmma(CudaWgmma *product, const char *file, int line) {
    product->site = __builtin_return_address(0);
    together(WARP_WGMMA, (uint64_t)product, file, line);
}
void cuda_wgmma_fence(const char *file, int line) { together(WARP_WGMMA_FENCE, 0, file, line); }
void cuda_wgmma_commit(const char *file, int line) { together(WARP_WGMMA_COMMIT, 0, file, line); }
void cuda_wgmma_wait(uint32_t pending, const char *file, int line) {
    together(WARP_WGMMA_WAIT, pending, file, line);
}
void cuda_registers(int count, bool take, const char *file, int line) {
    together(WARP_REGISTERS, (uint64_t)count << 1 | take, file, line);
}
