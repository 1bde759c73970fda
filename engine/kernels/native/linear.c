// out[M, N] = x[M, K] @ weight[N, K]^T + bias, for any M: decode is bound by reading the weights once, prefill by arithmetic.
//
// Weights are packed in panels of 32 outputs (two vectors), in the order in which they are read: float32 [N/32][K][32],
// bfloat16 [N/32][K/2][32][2] (what VDPBF16PS takes), zeros at the end to make N a multiple of 64. x is packed likewise, in
// tiles of MR <= 14 rows: [K][MR] or [K/2][MR][2]. A tile times NR vectors has its MR * NR sums in registers (32 of them
// with AVX-512). Each sum runs over K in order, whatever M is: a row's result never depends on its neighbours.

#include "common.h"
#include "pool.h"

#ifdef __AVX512F__

#define MAX_ROWS 14
#define BLOCK_BYTES (192 << 10)  // of weights that stay in the second-level cache while the row tiles pass

typedef struct {
    const void *x, *weight;
    const float *bias;  // null: none
    void *out;
    long rows, outputs, inputs;
    int bf16, out_bf16;
    int gated;  // weights alternate, 16 gates and 16 ups: out[M, N/2] = silu(gate) * up
} LinearArgs;

typedef struct {
    const i32 *weight;
    i32 *packed;
    long outputs, inputs;
    int bf16;
} PackArgs;

static void pack_item(const void *args, long panel) {
    const PackArgs *a = args;
    long units = a->bf16 ? a->inputs / 2 : a->inputs;
    for (long k = 0; k < units; k++)
        for (long n = 0; n < 32; n++)
            a->packed[(panel * units + k) * 32 + n] = panel * 32 + n < a->outputs ? a->weight[(panel * 32 + n) * units + k] : 0;
}

void pack_weight(const PackArgs *a) { parallel(pack_item, a, (a->outputs + 63) / 64 * 2); }

// Both kinds of x are moved in units of 4 bytes, `units` a row.
static void pack_rows(const i32 *restrict x, i32 *restrict to, long rows, long units) {
    for (long k = 0; k < units; k++)
        for (long m = 0; m < rows; m++) to[k * rows + m] = x[m * units + k];
}

// `ahead`: where the weights of the next step are; `stride` bytes of it are asked for per unit.
INLINE void tile(const int MR, const int NR, const LinearArgs *a, const i32 *x, long row, long panel, const char *ahead, long stride, int bf16) {
    long units = bf16 ? a->inputs / 2 : a->inputs;
    const float *w = (const float *)a->weight + panel * units * 32;
    v16 acc[MAX_ROWS][4];
#pragma GCC unroll 14
    for (int m = 0; m < MR; m++)
#pragma GCC unroll 4
        for (int n = 0; n < NR; n++) acc[m][n] = (v16){};
    for (long k = 0; k < units; k++, x += MR, w += 32, ahead += stride) {
        v16 right[4];
#pragma GCC unroll 4
        for (int n = 0; n < NR; n++) right[n] = *(const v16 *)(w + n / 2 * units * 32 + n % 2 * 16);
        __builtin_prefetch(ahead, 0, 2);
        __builtin_prefetch(ahead + stride / 2, 0, 2);
        if (NR == 4) {
            __builtin_prefetch(ahead + units * 128, 0, 2);
            __builtin_prefetch(ahead + units * 128 + stride / 2, 0, 2);
        }
#pragma GCC unroll 14
        for (int m = 0; m < MR; m++)
#pragma GCC unroll 4
            for (int n = 0; n < NR; n++) {
#ifdef __AVX512BF16__
                if (bf16) {
                    __m512bh left = (__m512bh)_mm512_set1_epi32(x[m]);
                    acc[m][n] = (v16)_mm512_dpbf16_ps((__m512)acc[m][n], left, (__m512bh)right[n]);
                    continue;
                }
#endif
                acc[m][n] += ((const float *)x)[m] * right[n];
            }
    }
#pragma GCC unroll 14
    for (int m = 0; m < MR; m++)
#pragma GCC unroll 2
        for (int n = 0; n < NR; n += 2) {
            long column = panel * 32 + n * 16;
            if (column >= a->outputs) continue;
            v16 left = acc[m][n], right = acc[m][n + 1];
            if (a->bias) left += *(const v16 *)(a->bias + column);
            if (a->bias && column + 16 < a->outputs) right += *(const v16 *)(a->bias + column + 16);
            if (a->gated) {
                store16(a->out, (row + m) * (a->outputs / 2) + column / 2, left / (1.0f + vexp(-left)) * right, a->out_bf16);
                continue;
            }
            store16(a->out, (row + m) * a->outputs + column, left, a->out_bf16);
            if (column + 16 < a->outputs) store16(a->out, (row + m) * a->outputs + column + 16, right, a->out_bf16);
        }
}

INLINE void tiles(int rows, int wide, const LinearArgs *a, const i32 *x, long row, long panel, const char *ahead, long stride, int bf16) {
#define TILE(MR, NR) \
    case MR: tile(MR, NR, a, x, row, panel, ahead, stride, bf16); break;
    if (wide == 2) switch (rows) { TILE(1, 4) TILE(2, 4) TILE(3, 4) TILE(4, 4) TILE(5, 4) TILE(6, 4) }
    else switch (rows) { TILE(7, 2) TILE(8, 2) TILE(9, 2) TILE(10, 2) TILE(11, 2) TILE(12, 2) TILE(13, 2) TILE(14, 2) }
}

typedef struct {
    const LinearArgs *linear;
    i32 *x;  // packed
    long units, panels, row_tiles, wide, per_block, ahead;
} Plan;

static long first_row(const Plan *plan, long tile) { return tile * plan->linear->rows / plan->row_tiles; }

static void pack_rows_item(const void *args, long t) {
    const Plan *plan = args;
    long row = first_row(plan, t);
    pack_rows((const i32 *)plan->linear->x + row * plan->units, plan->x + row * plan->units, first_row(plan, t + 1) - row, plan->units);
}

// All rows times some panels.
static void linear_item(const void *args, long block) {
    const Plan *plan = args;
    const LinearArgs *a = plan->linear;
    long first = block * plan->per_block, last = min_long(first + plan->per_block, plan->panels);
    for (long t = 0; t < plan->row_tiles; t++) {
        long row = first_row(plan, t), rows = first_row(plan, t + 1) - row;
        for (long p = first; p < last; p += plan->wide) {
            // What this thread will most likely read next, a share of it in each of the first two row tiles.
            long after = p + plan->wide < last ? p + plan->wide : (block + plan->ahead) * plan->per_block;
            const char *ahead = (const char *)a->weight + (after < plan->panels ? after : p) * plan->units * 128;
            long stride = plan->row_tiles == 2 ? 64 : t ? 0 : 128;
            if (plan->row_tiles == 2) ahead += t * plan->units * 64;
            if (a->bf16) tiles(rows, plan->wide, a, plan->x + row * plan->units, row, p, ahead, stride, 1);
            else tiles(rows, plan->wide, a, plan->x + row * plan->units, row, p, ahead, stride, 0);
        }
    }
}

// Returns 0, or -1 if there is no memory.
int linear(const LinearArgs *a) {
    Plan plan = {.linear = a, .x = (i32 *)a->x, .units = a->bf16 ? a->inputs / 2 : a->inputs};
    plan.panels = (a->outputs + 63) / 64 * 2;
    plan.row_tiles = (a->rows + MAX_ROWS - 1) / MAX_ROWS;
    plan.wide = plan.per_block = a->rows <= 6 ? 2 : 1;
    plan.ahead = get_threads();
    if (plan.row_tiles > 2) {  // as large as the cache holds, but enough for every thread to have several
        long share = (plan.panels + 4 * plan.ahead - 1) / (4 * plan.ahead);
        plan.per_block = max_long(1, min_long(BLOCK_BYTES / (plan.units * 128), share));
    }
    if (a->rows > 1) {
        plan.x = malloc(a->rows * plan.units * 4);
        if (!plan.x) return -1;
        parallel(pack_rows_item, &plan, plan.row_tiles);
    }
    parallel(linear_item, &plan, (plan.panels + plan.per_block - 1) / plan.per_block);
    if (a->rows > 1) free(plan.x);
    return 0;
}

#else  // no registers for it: the caller takes oneDNN

int linear(const void *a) { return a != 0; }
void pack_weight(const void *a) { (void)a; }

#endif

// Which dtypes `linear` multiplies on this processor: bit 0 float32, bit 1 bfloat16.
int linear_dtypes(void) {
#if defined __AVX512BF16__
    return 3;
#elif defined __AVX512F__
    return 1;
#else
    return 0;
#endif
}
