// cuda_on_cpu_tensor.cc: what a warp does collectively with fragments of matrices, from the PTX ISA:
// "Matrix Fragments for mma.m16n8k16 with floating point type" and "ldmatrix". Sums are f32, one product
// after another; a tensor core may add in another order, and round less carefully.
#include "cuda_on_cpu_inside.h"

// mma needs a full warp.
static void need_warp(const char *what, const char *file, int line) {
    if (now.threads - now.thread->warp * LANES < LANES)
        broken(NULL, "calls %s (%s:%d) in a warp of %d lanes; it takes all %d", what, file, line,
               now.threads - now.thread->warp * LANES, (int)LANES);
}

// ---- ex2.approx.ftz.f32 ----

// Off by a relative 2^-22, up or down depending on the bits of x.
extern "C" float cuda_power_of_2(float x) {
    const double off = cuda_bits<uint32_t>(x) * 0x9e3779b9 >> 31 ? 0x1.7p-23 : -0x1.7p-23;
    const float y = (float)(exp2((double)x) * (x == 0 ? 1 : 1 + off));
    return y < 0x1p-126f ? 0 : y;
}

// ---- ldmatrix ----

// What a lane contributes, one row of 8 numbers, and where it gets its part of four matrices.
struct LaneRow {
    uint16_t row[8];
    uint32_t *to;
};

static const LaneRow *row_of(const Warp *w, int lane) {
    return reinterpret_cast<const LaneRow *>(w->value[lane]);
}

// Lanes 8 m to 8 m + 7 contribute the rows of matrix m. Of each matrix, lane l gets elements 2 (l % 4) and
// 2 (l % 4) + 1 of row l / 4; or, transposed, of column l / 4.
void exchange_rows(Warp *w, bool transposed) {
    for (int lane = 0; lane < LANES; lane++)
        for (int m = 0; m < 4; m++) {
            const int pair = lane % 4 * 2, other = lane / 4;
            uint32_t low, high;
            if (transposed)
                low = row_of(w, 8 * m + pair)->row[other], high = row_of(w, 8 * m + pair + 1)->row[other];
            else low = row_of(w, 8 * m + other)->row[pair], high = row_of(w, 8 * m + other)->row[pair + 1];
            row_of(w, lane)->to[m] = low | high << 16;
        }
}

void cuda_ldmatrix(uint32_t *to, const void *row, bool transposed, const char *file, int line) {
    const void *site = __builtin_return_address(0);
    need_warp("ldmatrix", file, line);
    memory_need_shared("ldmatrix reads", row, site);
    memory_access(LOAD, row, 16, site);
    LaneRow mine;
    memcpy(mine.row, row, sizeof mine.row);
    mine.to = to;
    cuda_warp_op(WARP_LDMATRIX, ~0u, (uint64_t)&mine, transposed, LANES, file, line);
}

// ---- mma ----

enum { M = 16, N = 8, K = 16 };

struct LaneMma {
    float *d;
    const uint32_t *a, *b;
    float (*widen)(uint16_t);
};

// Where the i-th number of a lane's fragment is in its matrix.
struct Place {
    int row, column;
};
static Place place_a(int lane, int i) {
    return {lane / 4 + i / 2 % 2 * 8, lane % 4 * 2 + i % 2 + i / 4 * 8};
}
static Place place_b(int lane, int i) { return {lane % 4 * 2 + i % 2 + i / 2 * 8, lane / 4}; }
static Place place_d(int lane, int i) { return {lane / 4 + i / 2 * 8, lane % 4 * 2 + i % 2}; }

const float *values_of(float (*widen)(uint16_t)) {
    struct Values {
        float (*widen)(uint16_t);
        float of_code[1 << 16];
    };
    static Values formats[4];
    Values *v = formats;
    while (v->widen && v->widen != widen) v++;
    if (!v->widen)
        for (int code = 0; code < 1 << 16; code++) v->of_code[code] = widen((uint16_t)code);
    v->widen = widen;
    return v->of_code;
}

// The i-th 16-bit number; there are two in a register, the lower half first.
static uint16_t number(const uint32_t *registers, int i) {
    return (uint16_t)(registers[i / 2] >> i % 2 * 16);
}

void multiply_fragments(Warp *w) {
    float a[M][K], b[K][N];
    for (int lane = 0; lane < LANES; lane++) {
        const LaneMma *x = reinterpret_cast<const LaneMma *>(w->value[lane]);
        const float *values = values_of(x->widen);
        for (int i = 0; i < 8; i++) {
            const Place p = place_a(lane, i);
            a[p.row][p.column] = values[number(x->a, i)];
        }
        for (int i = 0; i < 4; i++) {
            const Place p = place_b(lane, i);
            b[p.row][p.column] = values[number(x->b, i)];
        }
    }
    float d[M][N];
    for (int lane = 0; lane < LANES; lane++)
        for (int i = 0; i < 4; i++) {
            const Place p = place_d(lane, i);
            d[p.row][p.column] = reinterpret_cast<const LaneMma *>(w->value[lane])->d[i];
        }
    for (int row = 0; row < M; row++)
        for (int k = 0; k < K; k++)
            for (int column = 0; column < N; column++) d[row][column] += a[row][k] * b[k][column];
    for (int lane = 0; lane < LANES; lane++)
        for (int i = 0; i < 4; i++) {
            const Place p = place_d(lane, i);
            reinterpret_cast<const LaneMma *>(w->value[lane])->d[i] = d[p.row][p.column];
        }
    if (now.counting) count_tensor(2 * M * N * K, 16);
}

void cuda_mma(float *d, const uint32_t *a, const uint32_t *b, float (*widen)(uint16_t), const char *file,
              int line) {
    need_warp("mma", file, line);
    const LaneMma mine = {d, a, b, widen};
    cuda_warp_op(WARP_MMA, ~0u, (uint64_t)&mine, 0, LANES, file, line);
}
