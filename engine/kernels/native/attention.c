// Attention over the paged KV cache.
//
// Decode (one query): per KV head, the dot products of its G query heads with each key, 64 tokens at a time, online
// softmax (Milakov and Gimelshein 2018). Contexts are split at multiples of SPLIT tokens, the parts merged at the end.
// Prefill: tiles of 64 rows (tokens x the G heads of one KV head, folded), one row a vector lane: scores are kept
// transposed [token][row], so that maxima, sums and masks need no work across lanes.

#include "common.h"
#include "pool.h"

#define SPLIT 1024
#define CHUNK 64
#define ROWS 64
#define MAX_GROUP 16
#define MAX_HEAD_DIM 256

typedef struct {
    const void *q;  // [T, H, D], rows `stride` elements apart
    const void *kv_layer;
    const int32_t *block_table, *cu_seqlens, *seq_lens;
    void *out;  // [T, H, D] contiguous
    long stride, requests, max_blocks, heads, kv_heads, head_dim, block_size, window;  // window 0: none
    float scale;
    int bf16;
} AttentionArgs;

typedef struct {
    int request, first, count;  // decode: part `first` of `count`; prefill: `count` tokens from token `first`
    long scratch;               // decode with several parts: where the first part's sums go, in floats
} Work;

INLINE const void *kv_row(const AttentionArgs *a, int request, long head, long token, int value, int bf16) {
    long block = a->block_table[request * a->max_blocks + token / a->block_size];
    long row = ((block * 2 + value) * a->kv_heads + head) * a->block_size + token % a->block_size;
    return at(a->kv_layer, row * a->head_dim, bf16);
}

// One part of one request's one KV head. sums: G x (D weighted values, maximum, sum of weights).
INLINE void decode_part(const AttentionArgs *a, const Work *w, long head, float *sums, int bf16) {
    long d = a->head_dim, group = a->heads / a->kv_heads, len = a->seq_lens[w->request];
    long begin = max_long((long)w->first * SPLIT, a->window ? len - a->window : 0);
    long end = min_long((long)(w->first + 1) * SPLIT, len), width = d + 2;
    float q[MAX_GROUP * MAX_HEAD_DIM], scores[MAX_GROUP][CHUNK];
    for (long g = 0; g < group; g++) {
        const void *from = at(a->q, a->cu_seqlens[w->request] * a->stride + (head * group + g) * d, bf16);
        for (long i = 0; i < d; i += 16) *(v16 *)(q + g * d + i) = load16(from, i, bf16) * a->scale;
        memset(sums + g * width, 0, width * sizeof(float));
        sums[g * width + d] = -INFINITY;
    }
    for (long start = begin; start < end; start += CHUNK) {
        long n = min_long(CHUNK, end - start);
        for (long t = 0; t < n; t++) {
            const void *key = kv_row(a, w->request, head, start + t, 0, bf16);
            for (long g = 0; g < group; g++) {
                v16 dot = {};
                for (long i = 0; i < d; i += 16) dot += load16(key, i, bf16) * *(v16 *)(q + g * d + i);
                scores[g][t] = sum16(dot);
            }
        }
        for (long g = 0; g < group; g++) {
            float *sum = sums + g * width, best = sum[d];
            for (long t = n; t < CHUNK; t++) scores[g][t] = -INFINITY;
            for (long t = 0; t < n; t++) best = scores[g][t] > best ? scores[g][t] : best;
            float fade = expf(sum[d] - best);
            v16 total = {};
            for (long t = 0; t < CHUNK; t += 16) total += *(v16 *)(scores[g] + t) = vexp(*(v16 *)(scores[g] + t) - best);
            for (long i = 0; i < d; i += 16) *(v16 *)(sum + i) *= fade;
            sum[d] = best;
            sum[d + 1] = sum[d + 1] * fade + sum16(total);
        }
        for (long t = 0; t < n; t++) {
            const void *value = kv_row(a, w->request, head, start + t, 1, bf16);
            for (long i = 0; i < d; i += 16) {
                v16 v = load16(value, i, bf16);
                for (long g = 0; g < group; g++) *(v16 *)(sums + g * width + i) += scores[g][t] * v;
            }
        }
    }
}

// Weighted mean of `count` parts' sums, into the output.
INLINE void decode_merge(const AttentionArgs *a, const Work *w, long head, const float *sums, int count, int bf16) {
    long d = a->head_dim, group = a->heads / a->kv_heads, width = d + 2;
    for (long g = 0; g < group; g++) {
        float best = -INFINITY, total = 0, weights[1 + (1 << 20) / SPLIT];
        for (int p = 0; p < count; p++) best = fmaxf(best, sums[(p * group + g) * width + d]);
        for (int p = 0; p < count; p++) {
            weights[p] = expf(sums[(p * group + g) * width + d] - best);
            total += weights[p] * sums[(p * group + g) * width + d + 1];
        }
        void *to = (void *)at(a->out, (a->cu_seqlens[w->request] * a->heads + head * group + g) * d, bf16);
        for (long i = 0; i < d; i += 16) {
            v16 mean = {};
            for (int p = 0; p < count; p++) mean += *(v16 *)(sums + (p * group + g) * width + i) * weights[p];
            store16(to, i, mean / total, bf16);
        }
    }
}

typedef struct {
    float q[MAX_HEAD_DIM][ROWS], out[MAX_HEAD_DIM][ROWS], scores[CHUNK][ROWS];
    float keys[CHUNK][MAX_HEAD_DIM], values[CHUNK][MAX_HEAD_DIM];
} Tile;

// c[i][row] (+)= sum over j of a[i * step_i + j * step_j] * b[j][row], for the 64 rows and i of `rows_i`, a multiple of 4.
INLINE void lanes_product(float (*c)[ROWS], const float *a, long step_i, long step_j, float (*b)[ROWS], long count_i, long count_j, int add) {
    for (long i = 0; i < count_i; i += 4) {
        v16 acc[4][4];
#pragma GCC unroll 4
        for (int m = 0; m < 4; m++)
#pragma GCC unroll 4
            for (int n = 0; n < 4; n++) acc[m][n] = add ? *(v16 *)(c[i + m] + 16 * n) : (v16){};
        const float *from = a + i * step_i;
        for (long j = 0; j < count_j; j++, from += step_j) {
#pragma GCC unroll 4
            for (int n = 0; n < 4; n++) {
                v16 right = *(v16 *)(b[j] + 16 * n);
#pragma GCC unroll 4
                for (int m = 0; m < 4; m++) acc[m][n] += from[m * step_i] * right;
            }
        }
#pragma GCC unroll 4
        for (int m = 0; m < 4; m++)
#pragma GCC unroll 4
            for (int n = 0; n < 4; n++) *(v16 *)(c[i + m] + 16 * n) = acc[m][n];
    }
}

INLINE void prefill_tile(const AttentionArgs *a, const Work *w, long head, Tile *s, int bf16) {
    long d = a->head_dim, group = a->heads / a->kv_heads, q_start = a->cu_seqlens[w->request] + w->first;
    long q_end = a->cu_seqlens[w->request + 1], len = a->seq_lens[w->request];
    long first = len - (q_end - q_start), last = first + w->count - 1;  // positions of the tile's tokens
    i16x position[4];  // of each row
    v16 best[4], total[4];
    for (long i = 0; i < d; i++) memset(s->q[i], 0, sizeof s->q[i]);
    memset(s->out, 0, d * sizeof s->out[0]);
    for (long r = 0; r < ROWS; r++) {
        long t = min_long(r / group, w->count - 1);  // unused rows repeat the last token: finite, then dropped
        ((int32_t *)position)[r] = first + t;
        if (r / group >= w->count) continue;
        const void *from = at(a->q, (q_start + t) * a->stride + (head * group + r % group) * d, bf16);
        for (long i = 0; i < d; i += 16) {
            v16 x = load16(from, i, bf16) * a->scale;
            for (int j = 0; j < 16; j++) s->q[i + j][r] = x[j];
        }
    }
    for (int n = 0; n < 4; n++) best[n] = splat(-1e30f), total[n] = splat(0);

    long begin = a->window ? max_long(0, first - a->window + 1) / CHUNK * CHUNK : 0;
    for (long start = begin; start <= last; start += CHUNK) {
        long n_tokens = min_long(CHUNK, last + 1 - start), padded = (n_tokens + 3) / 4 * 4;
        for (long t = 0; t < padded; t++) {
            if (t >= n_tokens) {
                memset(s->keys[t], 0, d * sizeof(float));
                memset(s->values[t], 0, d * sizeof(float));
                continue;
            }
            const void *key = kv_row(a, w->request, head, start + t, 0, bf16);
            const void *value = kv_row(a, w->request, head, start + t, 1, bf16);
            for (long i = 0; i < d; i += 16) {
                *(v16 *)(s->keys[t] + i) = load16(key, i, bf16);
                *(v16 *)(s->values[t] + i) = load16(value, i, bf16);
            }
        }
        lanes_product(s->scores, s->keys[0], MAX_HEAD_DIM, 1, s->q, padded, d, 0);
        int masked = start + CHUNK > first || a->window;
        for (int n = 0; n < 4; n++) {
            v16 top = best[n];
            for (long t = 0; t < padded; t++) {
                v16 *score = (v16 *)(s->scores[t] + 16 * n);
                if (masked) {
                    i16x token = (i16x){} + (int)(start + t), hidden = token > position[n];
                    if (a->window) hidden |= token <= position[n] - (int)a->window;
                    *score = choose(hidden, splat(-INFINITY), *score);
                }
                top = vmax(top, *score);
            }
            v16 fade = vexp(best[n] - top), sum = {};
            for (long t = 0; t < padded; t++) {
                v16 *score = (v16 *)(s->scores[t] + 16 * n);
                sum += *score = vexp(*score - top);
            }
            total[n] = total[n] * fade + sum;
            best[n] = top;
            for (long i = 0; i < d; i++) *(v16 *)(s->out[i] + 16 * n) *= fade;
        }
        lanes_product(s->out, s->values[0], 1, MAX_HEAD_DIM, s->scores, d, padded, 1);
    }
    for (int n = 0; n < 4; n++)
        for (long i = 0; i < d; i++) *(v16 *)(s->out[i] + 16 * n) /= total[n];
    for (long r = 0; r < w->count * group; r++) {
        void *to = (void *)at(a->out, ((q_start + r / group) * a->heads + head * group + r % group) * d, bf16);
        for (long i = 0; i < d; i += 16) {
            v16 x;
            for (int j = 0; j < 16; j++) x[j] = s->out[i + j][r];
            store16(to, i, x, bf16);
        }
    }
}

typedef struct {
    const AttentionArgs *attention;
    Work *work;
    float *sums;
} Plan;

static int is_decode(const AttentionArgs *a, long request) { return a->cu_seqlens[request + 1] - a->cu_seqlens[request] == 1; }
static long part_floats(const AttentionArgs *a) { return a->heads / a->kv_heads * (a->head_dim + 2); }

// An item is one piece of work of one KV head.
static void attention_item(const void *args, long item) {
    const Plan *plan = args;
    const AttentionArgs *a = plan->attention;
    const Work *w = plan->work + item / a->kv_heads;
    long head = item % a->kv_heads;
    if (is_decode(a, w->request)) {
        float *sums = plan->sums + w->scratch + (head * w->count + w->first) * part_floats(a);
        if (a->bf16) decode_part(a, w, head, sums, 1);
        else decode_part(a, w, head, sums, 0);
        if (w->count > 1) return;
        if (a->bf16) decode_merge(a, w, head, sums, 1, 1);
        else decode_merge(a, w, head, sums, 1, 0);
        return;
    }
    Tile tile;
    if (a->bf16) prefill_tile(a, w, head, &tile, 1);
    else prefill_tile(a, w, head, &tile, 0);
}

// Returns 0, or -1 if there is no memory.
int paged_attention(const AttentionArgs *a) {
    long tile_tokens = ROWS / (a->heads / a->kv_heads), items = 0, floats = 0;
    for (long b = 0; b < a->requests; b++) {
        long n = a->cu_seqlens[b + 1] - a->cu_seqlens[b], parts = (a->seq_lens[b] + SPLIT - 1) / SPLIT;
        items += n == 1 ? parts : (n + tile_tokens - 1) / tile_tokens;
        floats += n == 1 ? parts * a->kv_heads * part_floats(a) : 0;
    }
    Plan plan = {a, malloc(items * sizeof(Work)), malloc((floats + 1) * sizeof(float))};
    if (!plan.work || !plan.sums) {
        free(plan.work);
        free(plan.sums);
        return -1;
    }
    Work *next = plan.work;
    floats = 0;
    for (long b = 0; b < a->requests; b++) {
        long n = a->cu_seqlens[b + 1] - a->cu_seqlens[b], parts = (a->seq_lens[b] + SPLIT - 1) / SPLIT;
        if (n == 1) {
            for (long p = 0; p < parts; p++) *next++ = (Work){b, p, parts, floats};
            floats += parts * a->kv_heads * part_floats(a);
        } else {  // later tiles see more tokens: first, so that the threads end together
            for (long t = (n - 1) / tile_tokens * tile_tokens; t >= 0; t -= tile_tokens)
                *next++ = (Work){b, t, min_long(tile_tokens, n - t), 0};
        }
    }
    parallel(attention_item, &plan, items * a->kv_heads);
    for (const Work *w = plan.work; w < next; w++) {
        if (w->first || w->count < 2 || !is_decode(a, w->request)) continue;
        for (long head = 0; head < a->kv_heads; head++) {
            const float *sums = plan.sums + w->scratch + head * w->count * part_floats(a);
            if (a->bf16) decode_merge(a, w, head, sums, w->count, 1);
            else decode_merge(a, w, head, sums, w->count, 0);
        }
    }
    free(plan.work);
    free(plan.sums);
    return 0;
}
