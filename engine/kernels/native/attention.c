// Attention over the paged KV cache. No key or value is copied or gathered: rows are read where they lie.
//
// Decode (one query): per KV head, its G query heads with 64 keys at a time, online softmax (Milakov and Gimelshein
// 2018). Contexts are split at multiples of SPLIT tokens, whatever the batch; the parts are merged at the end.
// Prefill: tiles of 64 rows (tokens x the G heads of one KV head, folded), one row a vector lane: scores are kept
// transposed [token][row], so that maxima, sums and masks need no work across lanes. bfloat16 is multiplied in pairs by
// VDPBF16PS where the processor has it; weights are rounded to bfloat16 for that, as torch does.

#include "common.h"
#include "pool.h"

#define SPLIT 1024
#define CHUNK 64
#define ROWS 64
#define VECTORS (ROWS / 16)
#define MAX_GROUP 16
#define MAX_HEAD_DIM 256
#define MAX_CONTEXT (1 << 20)

#ifdef __AVX512BF16__
#define PAIRS 1
INLINE v16 dot_pair(v16 sum, v16 a, uint32_t b) {
    return (v16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)_mm512_set1_epi32(b));
}
INLINE v16 dot_pairs(v16 sum, v16 a, v16 b) { return (v16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b); }
#else  // never called
#define PAIRS 0
INLINE v16 dot_pair(v16 sum, v16 a, uint32_t b) { return sum + a * (float)b; }
INLINE v16 dot_pairs(v16 sum, v16 a, v16 b) { return sum + a * b; }
#endif

typedef struct {
    const void *q;  // [T, H, D], rows `stride` elements apart
    const void *kv_layer;  // [N, 2, K, S, D]
    const int32_t *block_table, *cu_seqlens, *seq_lens;
    void *out;  // [T, H, D] contiguous
    long stride, requests, max_blocks, heads, kv_heads, head_dim, block_size, window;  // window 0: none
    float scale;
    int bf16;
} AttentionArgs;

typedef struct {
    int request, head, first, count;  // decode: part `first` of `count`; prefill: `count` tokens from token `first`
    long scratch;                     // decode: where this part's sums go, in floats
} Work;

// Where the keys of the tokens [start, end) of a request are; a value is `value_offset` behind its key.
INLINE void find_keys(const AttentionArgs *a, int request, long head, long start, long end, const char **keys, int bf16) {
    long row_bytes = a->head_dim * (bf16 ? 2 : 4);
    for (long t = start; t < end;) {
        long block = a->block_table[request * a->max_blocks + t / a->block_size], offset = t % a->block_size;
        const char *key = (const char *)a->kv_layer + ((block * 2 * a->kv_heads + head) * a->block_size + offset) * row_bytes;
        for (long stop = min_long(end, t + a->block_size - offset); t < stop; t++, key += row_bytes) *keys++ = key;
    }
}
INLINE long value_offset(const AttentionArgs *a, int bf16) { return a->kv_heads * a->block_size * a->head_dim * (bf16 ? 2 : 4); }

// Ask for a row that is needed soon: blocks lie anywhere, the processor cannot guess the next one.
INLINE void fetch(const char *row, long d, int bf16) {
    for (long i = 0; i < d * (bf16 ? 2 : 4); i += 64) __builtin_prefetch(row + i);
}

// ---- decode --------------------------------------------------------------------------------------------------------

#define IN_PAIRS(d) (PAIRS && bf16 && (d) % 32 == 0)  // a vector of pairs is 32 elements

INLINE v16 fold(v16 a, v16 b, u16x low, u16x high) {
    return __builtin_shuffle(a, b, (i16x)low) + __builtin_shuffle(a, b, (i16x)high);
}
// Lane i: the sum of v[i]. v is overwritten.
INLINE v16 sum_each(v16 *v) {
#define FOLD(n, low, high) \
    for (int i = 0; i < n; i++) v[i] = fold(v[2 * i], v[2 * i + 1], low, high)
    FOLD(8, ((u16x){0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23}),
         ((u16x){8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31}));
    FOLD(4, ((u16x){0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27}),
         ((u16x){4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31}));
    FOLD(2, ((u16x){0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29}),
         ((u16x){2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31}));
    FOLD(1, ((u16x){0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30}),
         ((u16x){1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31}));
    return v[0];
}

// Scores of G heads with n keys; up to the next multiple of 16 they are those of the last key.
INLINE void decode_scores(const int G, const float *q, float scale, const char **keys, const char **next, long n, float (*scores)[CHUNK], long d, int bf16) {
    for (long t = 0; t < n; t += 16) {
        v16 dots[4][16];
        for (long i = 0; i < 16; i++) {
            const char *key = keys[min_long(t + i, n - 1)];
            fetch(next[t + i], d, bf16);
            v16 dot[4] = {};
            if (IN_PAIRS(d)) {
                for (long j = 0; j < d; j += 32) {
                    v16 k = *(const v16 *)(key + 2 * j);
#pragma GCC unroll 4
                    for (int g = 0; g < G; g++) dot[g] = dot_pairs(dot[g], k, *(v16 *)((char *)q + 2 * (g * d + j)));
                }
            } else {
                for (long j = 0; j < d; j += 16) {
                    v16 k = load16(key, j, bf16);
#pragma GCC unroll 4
                    for (int g = 0; g < G; g++) dot[g] += k * *(v16 *)(q + g * d + j);
                }
            }
#pragma GCC unroll 4
            for (int g = 0; g < G; g++) dots[g][i] = dot[g];
        }
#pragma GCC unroll 4
        for (int g = 0; g < G; g++) *(v16 *)(scores[g] + t) = sum_each(dots[g]) * scale;
    }
}

// sums of G heads += scores x values, for C x 16 columns from column j on
INLINE void decode_values(const int G, const int C, float *sums, const char **keys, const char **next, long offset, long n, float (*scores)[CHUNK], long d, long j, int bf16) {
    v16 acc[4][2];
#pragma GCC unroll 4
    for (int g = 0; g < G; g++)
#pragma GCC unroll 2
        for (int c = 0; c < C; c++) acc[g][c] = *(v16 *)(sums + g * (d + 2) + j + 16 * c);
    for (long t = 0; t < n; t++) {
        if (j == 0) fetch(next[t] + offset, d, bf16);
#pragma GCC unroll 2
        for (int c = 0; c < C; c++) {
            v16 value = load16(keys[t] + offset, j + 16 * c, bf16);
#pragma GCC unroll 4
            for (int g = 0; g < G; g++) acc[g][c] += scores[g][t] * value;
        }
    }
#pragma GCC unroll 4
    for (int g = 0; g < G; g++)
#pragma GCC unroll 2
        for (int c = 0; c < C; c++) *(v16 *)(sums + g * (d + 2) + j + 16 * c) = acc[g][c];
}

// Fold a chunk into the sums of G <= 4 heads.
INLINE void decode_chunk(const int G, const float *q, float scale, float *sums, const char **keys, const char **next, long offset, long n, long d, int bf16) {
    float scores[4][CHUNK];
    decode_scores(G, q, scale, keys, next, n, scores, d, bf16);
    for (int g = 0; g < G; g++) {
        float *sum = sums + g * (d + 2), best = sum[d];
        for (long t = 0; t < n; t++) best = scores[g][t] > best ? scores[g][t] : best;
        for (long t = n; t < (n + 15) / 16 * 16; t++) scores[g][t] = -INFINITY;
        v16 total = {}, fade = vexp(splat(sum[d] - best));
        for (long t = 0; t < n; t += 16) total += *(v16 *)(scores[g] + t) = vexp(*(v16 *)(scores[g] + t) - best);
        for (long j = 0; j < d; j += 16) *(v16 *)(sum + j) *= fade;
        sum[d] = best;
        sum[d + 1] = sum[d + 1] * fade[0] + sum16(total);
    }
    long j = 0;
    for (; j + 32 <= d; j += 32) decode_values(G, 2, sums, keys, next, offset, n, scores, d, j, bf16);
    if (j < d) decode_values(G, 1, sums, keys, next, offset, n, scores, d, j, bf16);
}

// One part of one request's one KV head. sums: G x (D weighted values, maximum, sum of weights).
INLINE void decode_part(const AttentionArgs *a, const Work *w, float *sums, int bf16) {
    long head = w->head, d = a->head_dim, group = a->heads / a->kv_heads, len = a->seq_lens[w->request];
    long begin = max_long((long)w->first * SPLIT, a->window ? len - a->window : 0);
    long end = min_long((long)(w->first + 1) * SPLIT, len);
    float q[MAX_GROUP * MAX_HEAD_DIM];
    const char *chunks[2][CHUNK], **keys = chunks[0], **next = chunks[1];
    for (long g = 0; g < group; g++) {
        const void *from = at(a->q, a->cu_seqlens[w->request] * a->stride + (head * group + g) * d, bf16);
        if (IN_PAIRS(d)) memcpy((char *)q + 2 * g * d, from, 2 * d);
        else for (long j = 0; j < d; j += 16) *(v16 *)(q + g * d + j) = load16(from, j, bf16);
        memset(sums + g * (d + 2), 0, (d + 2) * sizeof(float));
        sums[g * (d + 2) + d] = -1e30f;
    }
    long n = min_long(CHUNK - begin % CHUNK, end - begin);
    find_keys(a, w->request, head, begin, begin + n, keys, bf16);
    for (long t = 0; t < n; t++) {
        fetch(keys[t], d, bf16);
        fetch(keys[t] + value_offset(a, bf16), d, bf16);
    }
    for (long start = begin, next_n; start < end; start += n, n = next_n) {
        next_n = min_long(CHUNK, end - start - n);
        find_keys(a, w->request, head, start + n, start + n + next_n, next, bf16);
        for (long t = next_n; t < CHUNK; t++) next[t] = keys[0];  // nothing more to fetch
        for (long g = 0; g < group; g += 4) {
            float *to = sums + g * (d + 2);
            const float *group_q = at(q, g * d, IN_PAIRS(d));
            switch (min_long(4, group - g)) {
            case 1: decode_chunk(1, group_q, a->scale, to, keys, next, value_offset(a, bf16), n, d, bf16); break;
            case 2: decode_chunk(2, group_q, a->scale, to, keys, next, value_offset(a, bf16), n, d, bf16); break;
            case 3: decode_chunk(3, group_q, a->scale, to, keys, next, value_offset(a, bf16), n, d, bf16); break;
            case 4: decode_chunk(4, group_q, a->scale, to, keys, next, value_offset(a, bf16), n, d, bf16); break;
            }
        }
        const char **swap = keys;
        keys = next;
        next = swap;
    }
}

// Weighted mean of the parts' sums, into the output.
INLINE void decode_merge(const AttentionArgs *a, const Work *w, const float *sums, int bf16) {
    long head = w->head, d = a->head_dim, group = a->heads / a->kv_heads;
    float weights[MAX_CONTEXT / SPLIT];
    for (long g = 0; g < group; g++) {
        float best = -1e30f, total = 0;
        const float *part = sums + g * (d + 2);
        long step = group * (d + 2);
        for (int p = 0; p < w->count; p++) best = part[p * step + d] > best ? part[p * step + d] : best;
        for (int p = 0; p < w->count; p++) {
            weights[p] = vexp(splat(part[p * step + d] - best))[0];
            total += weights[p] * part[p * step + d + 1];
        }
        void *to = (void *)at(a->out, (a->cu_seqlens[w->request] * a->heads + head * group + g) * d, bf16);
        for (long j = 0; j < d; j += 16) {
            v16 mean = {};
            for (int p = 0; p < w->count; p++) mean += *(v16 *)(part + p * step + j) * weights[p];
            store16(to, j, mean / total, bf16);
        }
    }
}

// ---- prefill -------------------------------------------------------------------------------------------------------

typedef struct {
    v16 q[MAX_HEAD_DIM][VECTORS];  // as pairs: the first D/2 of them
    v16 out[MAX_HEAD_DIM][VECTORS];
    v16 scores[CHUNK][VECTORS];
    v16 weight_pairs[CHUNK / 2][VECTORS];
    u16x value_pairs[CHUNK / 2][MAX_HEAD_DIM / 16];
    const char *keys[CHUNK];
} Tile;

// Four vectors at once. Kept in registers: the compiler would rather load them from memory again at every use.
#ifdef __AVX512F__
#define KEEP4(a, b, c, d) __asm__("" : "+v"(a), "+v"(b), "+v"(c), "+v"(d))
#else
#define KEEP4(a, b, c, d) (void)0
#endif
#define ADD4(acc, a, b, c, d, x) (acc[0] += a * (x), acc[1] += b * (x), acc[2] += c * (x), acc[3] += d * (x))
#define DOT4(acc, a, b, c, d, x) \
    (acc[0] = dot_pair(acc[0], a, x), acc[1] = dot_pair(acc[1], b, x), acc[2] = dot_pair(acc[2], c, x), acc[3] = dot_pair(acc[3], d, x))

INLINE float element(const char *row, long i, int bf16) {
    if (!bf16) return ((const float *)row)[i];
    union { uint32_t bits; float value; } x = {(uint32_t)((const uint16_t *)row)[i] << 16};
    return x.value;
}

// scores[t][row] = keys[t] . q[row], for t < n, a multiple of 4
INLINE void prefill_scores(Tile *s, long n, long d, int bf16) {
    for (long t = 0; t < n; t += 4) {
        v16 acc[4][VECTORS] = {};
        const char **keys = s->keys + t;
        for (long i = 0; i < (PAIRS && bf16 ? d / 2 : d); i++) {
            v16 q0 = s->q[i][0], q1 = s->q[i][1], q2 = s->q[i][2], q3 = s->q[i][3];
            KEEP4(q0, q1, q2, q3);
#pragma GCC unroll 4
            for (int m = 0; m < 4; m++) {
                if (PAIRS && bf16) DOT4(acc[m], q0, q1, q2, q3, ((const u32 *)keys[m])[i]);
                else ADD4(acc[m], q0, q1, q2, q3, element(keys[m], i, bf16));
            }
        }
#pragma GCC unroll 4
        for (int m = 0; m < 4; m++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) s->scores[t + m][v] = acc[m][v];
    }
}

// out[i][row] += sum over t of values[t][i] * scores[t][row]
INLINE void prefill_values(Tile *s, long n, long d, long offset, int bf16) {
    if (PAIRS && bf16) {
        for (long t = 0; t < n; t += 2) {
            const uint16_t *first = (const uint16_t *)(s->keys[t] + offset), *second = (const uint16_t *)(s->keys[t + 1] + offset);
            for (long i = 0; i < d / 16; i++)
                s->value_pairs[t / 2][i] = __builtin_convertvector(((const h16x *)first)[i], u16x) |
                                           __builtin_convertvector(((const h16x *)second)[i], u16x) << 16;
            for (int v = 0; v < VECTORS; v++)
                s->weight_pairs[t / 2][v] = (v16)(round_bf16(s->scores[t][v]) | round_bf16(s->scores[t + 1][v]) << 16);
        }
    }
    for (long i = 0; i < d; i += 4) {
        v16 acc[4][VECTORS];
#pragma GCC unroll 4
        for (int m = 0; m < 4; m++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) acc[m][v] = s->out[i + m][v];
        for (long t = 0; t < (PAIRS && bf16 ? n / 2 : n); t++) {
            const v16 *weights = PAIRS && bf16 ? s->weight_pairs[t] : s->scores[t];
            v16 w0 = weights[0], w1 = weights[1], w2 = weights[2], w3 = weights[3];
            KEEP4(w0, w1, w2, w3);
#pragma GCC unroll 4
            for (int m = 0; m < 4; m++) {
                if (PAIRS && bf16) DOT4(acc[m], w0, w1, w2, w3, ((const u32 *)s->value_pairs[t])[i + m]);
                else ADD4(acc[m], w0, w1, w2, w3, element(s->keys[t] + offset, i + m, bf16));
            }
        }
#pragma GCC unroll 4
        for (int m = 0; m < 4; m++)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) s->out[i + m][v] = acc[m][v];
    }
}

INLINE void prefill_tile(const AttentionArgs *a, const Work *w, Tile *s, int bf16) {
    long head = w->head, d = a->head_dim, group = a->heads / a->kv_heads, q_start = a->cu_seqlens[w->request] + w->first;
    long q_end = a->cu_seqlens[w->request + 1], len = a->seq_lens[w->request];
    long first = len - (q_end - q_start), last = first + w->count - 1;  // positions of the tile's tokens
    i16x position[VECTORS];                                            // of each row
    v16 best[VECTORS], total[VECTORS];
    memset(s->out, 0, d * sizeof s->out[0]);
    for (long r = 0; r < ROWS; r++) {  // unused rows repeat the last token's: finite, then dropped
        long t = min_long(r / group, w->count - 1);
        ((int32_t *)position)[r] = first + t;
        const char *from = at(a->q, (q_start + t) * a->stride + (head * group + r % group) * d, bf16);
        if (PAIRS && bf16)
            for (long i = 0; i < d / 2; i++) ((u32 *)s->q[i])[r] = ((const u32 *)from)[i];
        else
            for (long i = 0; i < d; i++) ((float *)s->q[i])[r] = element(from, i, bf16);
    }
    for (int v = 0; v < VECTORS; v++) best[v] = splat(-1e30f), total[v] = splat(0);

    long begin = a->window ? max_long(0, first - a->window + 1) / CHUNK * CHUNK : 0;
    for (long start = begin; start <= last; start += CHUNK) {
        long n = min_long(CHUNK, last + 1 - start), padded = (n + 3) / 4 * 4;
        find_keys(a, w->request, head, start, start + n, s->keys, bf16);
        for (long t = n; t < padded; t++) s->keys[t] = s->keys[n - 1];  // masked: beyond every row's position
        prefill_scores(s, padded, d, bf16);
        int masked = start + CHUNK > first || a->window;
        for (int v = 0; v < VECTORS; v++) {
            v16 top = best[v];
            for (long t = 0; t < padded; t++) {
                v16 score = s->scores[t][v] * a->scale;
                if (masked) {
                    i16x token = (i16x){} + (int)(start + t), hidden = token > position[v];
                    if (a->window) hidden |= token <= position[v] - (int)a->window;
                    score = choose(hidden, splat(-INFINITY), score);
                }
                s->scores[t][v] = score;
                top = vmax(top, score);
            }
            v16 fade = vexp(best[v] - top), sum = {};
            for (long t = 0; t < padded; t++) sum += s->scores[t][v] = vexp(s->scores[t][v] - top);
            total[v] = total[v] * fade + sum;
            best[v] = top;
            if (sum16(fade) < 16.0f)  // else no row has a new maximum
                for (long i = 0; i < d; i++) s->out[i][v] *= fade;
        }
        prefill_values(s, padded, d, value_offset(a, bf16), bf16);
    }
    for (int v = 0; v < VECTORS; v++)
        for (long i = 0; i < d; i++) s->out[i][v] /= total[v];
    for (long r = 0; r < w->count * group; r++) {
        void *to = (void *)at(a->out, ((q_start + r / group) * a->heads + head * group + r % group) * d, bf16);
        for (long i = 0; i < d; i += 16) {
            v16 x;
            for (int j = 0; j < 16; j++) x[j] = ((float *)s->out[i + j])[r];
            store16(to, i, x, bf16);
        }
    }
}

// ---- both ----------------------------------------------------------------------------------------------------------

typedef struct {
    const AttentionArgs *attention;
    Work *work;
    float *sums;
} Plan;

static int is_decode(const AttentionArgs *a, long request) { return a->cu_seqlens[request + 1] - a->cu_seqlens[request] == 1; }
static long part_count(const AttentionArgs *a, long request) { return (a->seq_lens[request] + SPLIT - 1) / SPLIT; }
static long part_floats(const AttentionArgs *a) { return a->heads / a->kv_heads * (a->head_dim + 2); }

static void attention_item(const void *args, long item) {
    const Plan *plan = args;
    const AttentionArgs *a = plan->attention;
    const Work *w = plan->work + item;
    if (is_decode(a, w->request)) {
        float *sums = plan->sums + w->scratch;
        if (a->bf16) decode_part(a, w, sums, 1);
        else decode_part(a, w, sums, 0);
        if (w->count > 1) return;
        if (a->bf16) decode_merge(a, w, sums, 1);
        else decode_merge(a, w, sums, 0);
        return;
    }
    Tile tile;
    if (a->bf16) prefill_tile(a, w, &tile, 1);
    else prefill_tile(a, w, &tile, 0);
}

// Returns 0, or -1 if there is no memory.
int paged_attention(const AttentionArgs *a) {
    long tile_tokens = ROWS / (a->heads / a->kv_heads), items = 0, parts = 0, most_parts = 0;
    for (long b = 0; b < a->requests; b++) {
        long n = a->cu_seqlens[b + 1] - a->cu_seqlens[b];
        if (n > 1) {
            items += (n + tile_tokens - 1) / tile_tokens * a->kv_heads;
            continue;
        }
        parts += part_count(a, b) * a->kv_heads;
        most_parts = max_long(most_parts, part_count(a, b));
    }
    Plan plan = {a, malloc((items + parts) * sizeof(Work)), malloc((parts * part_floats(a) + 1) * sizeof(float))};
    if (!plan.work || !plan.sums) {
        free(plan.work);
        free(plan.sums);
        return -1;
    }
    Work *next = plan.work;
    for (long b = 0; b < a->requests; b++) {
        long n = a->cu_seqlens[b + 1] - a->cu_seqlens[b];
        if (n == 1) continue;
        // Later tiles see more tokens: first, so that the threads end together.
        for (long t = (n - 1) / tile_tokens * tile_tokens; t >= 0; t -= tile_tokens)
            for (long head = 0; head < a->kv_heads; head++) *next++ = (Work){b, head, t, min_long(tile_tokens, n - t), 0};
    }
    // Requests innermost: those that share a prefix find its blocks in the cache. A request's parts lie together in `sums`.
    for (long p = 0; p < most_parts; p++)
        for (long head = 0; head < a->kv_heads; head++)
            for (long b = 0, before = 0; b < a->requests; b++) {
                if (!is_decode(a, b)) continue;
                long count = part_count(a, b);
                if (p < count) *next++ = (Work){b, head, p, count, ((before + head * count) + p) * part_floats(a)};
                before += count * a->kv_heads;
            }
    parallel(attention_item, &plan, next - plan.work);
    for (const Work *w = plan.work; w < next; w++) {
        if (w->first || w->count < 2 || !is_decode(a, w->request)) continue;
        if (a->bf16) decode_merge(a, w, plan.sums + w->scratch, 1);
        else decode_merge(a, w, plan.sums + w->scratch, 0);
    }
    free(plan.work);
    free(plan.sums);
    return 0;
}
