// Norm, gated activation, and rope with the write of keys and values to the cache.

#include "common.h"
#include "pool.h"

// Rows of an elementwise loop that make one item.
static long item_rows(long rows, long width) { return max_long(1, min_long(rows, ITEM_ELEMENTS / width)); }
static long item_count(long rows, long width) { return (rows + item_rows(rows, width) - 1) / item_rows(rows, width); }

// ---- norm ----------------------------------------------------------------------------------------------------------

typedef struct {
    const void *x;
    void *residual;  // null: none
    const void *weight;
    void *out;  // may be x if there is a residual
    long rows, width;
    float eps;
    int bf16;
} NormArgs;

INLINE void norm_row(const NormArgs *a, long row, int bf16) {
    long width = a->width;
    const void *x = at(a->x, row * width, bf16);
    void *out = (void *)at(a->out, row * width, bf16);
    v16 squares = {};
    if (a->residual) {
        void *stream = (void *)at(a->residual, row * width, bf16);
        for (long i = 0; i < width; i += 16) store16(stream, i, load16(x, i, bf16) + load16(stream, i, bf16), bf16);
        x = stream;
    }
    for (long i = 0; i < width; i += 16) {
        v16 v = load16(x, i, bf16);
        squares += v * v;
    }
    v16 scale = splat(1.0f / sqrtf(sum16(squares) / width + a->eps));
    for (long i = 0; i < width; i += 16) store16(out, i, load16(x, i, bf16) * scale * load16(a->weight, i, bf16), bf16);
}

static void norm_item(const void *args, long item) {
    const NormArgs *a = args;
    long step = item_rows(a->rows, a->width);
    for (long row = item * step; row < min_long(a->rows, (item + 1) * step); row++) {
        if (a->bf16) norm_row(a, row, 1);
        else norm_row(a, row, 0);
    }
}

// out = rms_norm(residual += x), or out = rms_norm(x) where residual is null.
void fused_add_rms_norm(const NormArgs *a) { parallel(norm_item, a, item_count(a->rows, a->width)); }

// ---- gated activation ----------------------------------------------------------------------------------------------

typedef struct {
    const void *gate_up;  // [rows, 2 * width]
    void *out;            // [rows, width]
    long rows, width;
    int bf16;
} SiluArgs;

INLINE void silu_row(const SiluArgs *a, long row, int bf16) {
    const void *gate_up = at(a->gate_up, row * 2 * a->width, bf16);
    void *out = (void *)at(a->out, row * a->width, bf16);
    for (long i = 0; i < a->width; i += 16) {
        v16 gate = load16(gate_up, i, bf16), up = load16(gate_up, a->width + i, bf16);
        store16(out, i, gate / (1.0f + vexp(-gate)) * up, bf16);
    }
}

static void silu_item(const void *args, long item) {
    const SiluArgs *a = args;
    long step = item_rows(a->rows, a->width);
    for (long row = item * step; row < min_long(a->rows, (item + 1) * step); row++) {
        if (a->bf16) silu_row(a, row, 1);
        else silu_row(a, row, 0);
    }
}

void silu_and_mul(const SiluArgs *a) { parallel(silu_item, a, item_count(a->rows, a->width)); }

// ---- rope and KV write ---------------------------------------------------------------------------------------------

#define MAX_HEAD_DIM 512

typedef struct {
    void *q, *k, *v;       // [T, heads, D], rows `stride` elements apart; q is rotated in place
    const float *cos_sin;  // [P, D]
    const int64_t *positions, *slots;
    void *kv_layer;              // [N, 2, K, S, D]
    const void *q_norm, *k_norm;  // null: no norm
    long stride, tokens, heads, kv_heads, head_dim, block_size;
    float eps;
    int bf16;
} RopeArgs;

INLINE void rope_head(const void *from, void *to, const float *cos_sin, const void *norm, long d, float eps, int bf16) {
    float x[MAX_HEAD_DIM], y[MAX_HEAD_DIM];
    for (long i = 0; i < d; i += 16) *(v16 *)(x + i) = load16(from, i, bf16);
    if (norm) {
        v16 squares = {};
        for (long i = 0; i < d; i += 16) squares += *(v16 *)(x + i) * *(v16 *)(x + i);
        v16 scale = splat(1.0f / sqrtf(sum16(squares) / d + eps));
        for (long i = 0; i < d; i += 16) *(v16 *)(x + i) *= scale * load16(norm, i, bf16);
    }
    long half = d / 2;
    for (long i = 0; i < half; i++) {
        y[i] = x[i] * cos_sin[i] - x[half + i] * cos_sin[half + i];
        y[half + i] = x[half + i] * cos_sin[i] + x[i] * cos_sin[half + i];
    }
    for (long i = 0; i < d; i += 16) store16(to, i, *(v16 *)(y + i), bf16);
}

INLINE void rope_token(const RopeArgs *a, long t, int bf16) {
    long d = a->head_dim, slot = a->slots[t], block = slot / a->block_size, offset = slot % a->block_size;
    const float *cos_sin = a->cos_sin + a->positions[t] * d;
    for (long h = 0; h < a->heads; h++) {
        void *q = (void *)at(a->q, t * a->stride + h * d, bf16);
        rope_head(q, q, cos_sin, a->q_norm, d, a->eps, bf16);
    }
    for (long h = 0; h < a->kv_heads; h++) {
        long key = ((block * 2 * a->kv_heads + h) * a->block_size + offset) * d;
        long value = key + a->kv_heads * a->block_size * d;
        const void *k = at(a->k, t * a->stride + h * d, bf16), *v = at(a->v, t * a->stride + h * d, bf16);
        rope_head(k, (void *)at(a->kv_layer, key, bf16), cos_sin, a->k_norm, d, a->eps, bf16);
        memcpy((void *)at(a->kv_layer, value, bf16), v, d * (bf16 ? 2 : 4));
    }
}

static void rope_item(const void *args, long item) {
    const RopeArgs *a = args;
    long step = item_rows(a->tokens, a->stride);
    for (long t = item * step; t < min_long(a->tokens, (item + 1) * step); t++) {
        if (a->bf16) rope_token(a, t, 1);
        else rope_token(a, t, 0);
    }
}

void rope_kv_write(const RopeArgs *a) { parallel(rope_item, a, item_count(a->tokens, a->stride)); }
