// What the native CPU kernels share: vectors of 16 floats, loads and stores of float32 and bfloat16.
//
// The kernels are those that torch has no fast form of on CPUs; their meaning is in reference.py, their caller is
// native_cpu.py, which compiles them on the machine that runs them.
//
// Storage is float32 or bfloat16 (`bf16` = 0 or 1), arithmetic is float32. Every function is written once with `bf16` as
// an argument that is a constant where it is inlined. Vectors are GCC vector extensions of 16 floats: one AVX-512
// register, two of AVX2, four of NEON.
//
// An output's sums run in an order that depends on the shape of its own row only, never on the other rows of the batch.

#pragma once

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX512F__
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))
typedef float v16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t i16x __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t i32 __attribute__((aligned(2), may_alias));
typedef uint32_t u32 __attribute__((aligned(2), may_alias));
typedef uint32_t u16x __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t h16x __attribute__((vector_size(32), aligned(2), may_alias));

#define ITEM_ELEMENTS 8192  // of an elementwise loop that one thread takes at a time

INLINE v16 splat(float x) { return (v16){} + x; }
INLINE v16 load16(const void *p, long i, int bf16) {
    if (!bf16) return *(const v16 *)((const float *)p + i);
    return (v16)(__builtin_convertvector(*(const h16x *)((const uint16_t *)p + i), u16x) << 16);
}
// In the low halves: rounded to nearest, ties to even.
INLINE u16x round_bf16(v16 x) {
    u16x bits = (u16x)x;
    return (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
}
INLINE void store16(void *p, long i, v16 x, int bf16) {
    if (!bf16) {
        *(v16 *)((float *)p + i) = x;
        return;
    }
#ifdef __AVX512BF16__
    *(h16x *)((uint16_t *)p + i) = (h16x)_mm512_cvtneps_pbh((__m512)x);
#else
    *(h16x *)((uint16_t *)p + i) = __builtin_convertvector(round_bf16(x), h16x);
#endif
}
INLINE const void *at(const void *p, long i, int bf16) { return (const char *)p + (bf16 ? 2 : 4) * i; }
INLINE long min_long(long a, long b) { return a < b ? a : b; }
INLINE long max_long(long a, long b) { return a > b ? a : b; }
INLINE v16 choose(i16x mask, v16 yes, v16 no) { return (v16)((mask & (i16x)yes) | (~mask & (i16x)no)); }
#ifdef __AVX512F__
INLINE v16 vmax(v16 a, v16 b) { return (v16)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE v16 vmin(v16 a, v16 b) { return (v16)_mm512_min_ps((__m512)a, (__m512)b); }
#else
INLINE v16 vmax(v16 a, v16 b) { return choose(a > b, a, b); }
INLINE v16 vmin(v16 a, v16 b) { return choose(a < b, a, b); }
#endif
INLINE float sum16(v16 x) {
    float s[8];
    for (int i = 0; i < 8; i++) s[i] = x[i] + x[i + 8];
    return ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
}

// e^x, relative error under 2e-7; -inf and everything below -87.3 give a number that is 0 or denormal-small.
INLINE v16 vexp(v16 x) {
    x = vmin(vmax(x, splat(-87.3f)), splat(88.3f));
    v16 shifted = x * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: the nearest integer lands in the low bits
    v16 n = shifted - 12582912.0f;
    v16 r = x - n * 0.693145752f - n * 1.42860677e-6f;
    v16 p = splat(1.98756915e-4f);
    p = p * r + 1.39819995e-3f;
    p = p * r + 8.33345227e-3f;
    p = p * r + 4.16657962e-2f;
    p = p * r + 1.66666657e-1f;
    p = p * r + 0.5f;
    p = p * r * r + r + 1.0f;
    return (v16)((i16x)p + (((i16x)shifted - 0x4b400000) << 23));
}
