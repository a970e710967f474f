// Sixteen float32 lanes, and the element types that are loaded into them and rounded out of them.
//
// Everything here is by lane, so that a value never depends on where in memory it lies: tails are copied into a padded
// buffer and go through the very same lanes. Contraction is off; where a fused multiply-add is meant, it is written.
#pragma once

#include <cmath>

#include "lanes.h"

// Whether bfloat16 is multiplied by the instruction that adds two products at a time. Its order of additions is its
// own: COMMON_ORDER asks for the one that all processors have in common.
#if defined(__AVX512BF16__) && !defined(COMMON_ORDER)
#define PAIRED_SCORES
#if !defined(__AMX_BF16__)
#define PAIR_DOTS
#endif
#endif

struct bf16 {
    uint16_t bits;
};

inline float value_of(bf16 x) {
    const uint32_t bits = (uint32_t)x.bits << 16;
    float out;
    memcpy(&out, &bits, 4);
    return out;
}

inline f32x16 load(const bf16 *p) { return (f32x16)(widened(*(const u16x16 *)p) << 16); }

// Four bits of exponent and three of mantissa, moved to where float32 has them; without an exponent, mantissa * 2^-9.
// (Moved alone, these would be denormal numbers of float32, with which processors compute very slowly.)
inline f32x16 e4m3(i32x16 bits) {
    const i32x16 size = bits & 0x7f;
    const f32x16 small = floats(size) * splat(0x1p-9f);
    const i32x16 normal = (size << 20) + (120 << 23);
    return (f32x16)(chosen_by(size < 8, (i32x16)small, normal) | (bits & 0x80) << 24);
}

// Codes of quantised keys and values.
struct float8 {
    uint8_t bits;
};

struct int8 {
    uint8_t bits;
};

inline f32x16 load(const float8 *p) { return e4m3(widened(*(const u8x16 *)p)); }

inline f32x16 load(const int8 *p) { return floats(widened(*(const u8x16 *)p) << 24 >> 24); }

// To the nearest, ties to even, as torch rounds.
inline u16x16 round_to_bf16(f32x16 x) {
    u32x16 bits = (u32x16)x;
    u32x16 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return narrowed(chosen_by(x == x, rounded, u32x16{} + 0x7fc0u));
}

inline void store(bf16 *p, f32x16 x) { *(u16x16 *)p = round_to_bf16(x); }

// What is left of a value when it is written as T and read again.
inline f32x16 rounded(f32x16 x, const float *) { return x; }
inline f32x16 rounded(f32x16 x, const bf16 *) {
    return (f32x16)(widened(round_to_bf16(x)) << 16);
}

template <typename T> inline f32x16 load_some(const T *p, int count) {
    if (count >= LANES) return load(p);
    T padded[LANES] = {};
    if (count > 0) memcpy(padded, p, count * sizeof(T));
    return load(padded);
}

template <typename T> inline void store_some(T *p, f32x16 x, int count) {
    if (count >= LANES) return store(p, x);
    T padded[LANES];
    store(padded, x);
    memcpy(p, padded, count * sizeof(T));
}

// Has `bytes` fetched from memory that are read some steps later: processors don't look beyond a page of it.
inline void fetch_ahead(const void *reading, long bytes) {
    constexpr long AHEAD = 4096;
    for (long at = 0; at < bytes; at += 64) __builtin_prefetch((const char *)reading + AHEAD + at);
}

// Lane with lane half the width away, down to one: a fixed order of additions.
inline float sum_of(f32x16 x) {
    x += rotated<8>(x);
    x += rotated<4>(x);
    x += rotated<2>(x);
    x += rotated<1>(x);
    return x[0];
}

inline f32x16 larger(f32x16 a, f32x16 b) { return chosen_by(a > b, a, b); }

inline float max_of(f32x16 x) {
    x = larger(x, rotated<8>(x));
    x = larger(x, rotated<4>(x));
    x = larger(x, rotated<2>(x));
    x = larger(x, rotated<1>(x));
    return x[0];
}

// exp within two units in the last place; 0 below -87, the largest power that fits above 88.
inline f32x16 exp_of(f32x16 x) {
    const f32x16 low = splat(-87.0f), high = splat(88.0f);
    f32x16 bounded = chosen_by(x > high, high, x);
    bounded = chosen_by(bounded < low, low, bounded);
    // Adding and taking away 1.5 * 2^23 rounds to the nearest integer.
    const f32x16 magic = splat(12582912.0f);
    f32x16 shifted = fma(bounded, splat(1.44269504088896341f), magic);
    f32x16 whole = shifted - magic;
    f32x16 r = fma(whole, splat(-0.693359375f), bounded);
    r = fma(whole, splat(2.12194440e-4f), r);
    f32x16 y = splat(1.9875691500e-4f);
    y = fma(y, r, splat(1.3981999507e-3f));
    y = fma(y, r, splat(8.3334519073e-3f));
    y = fma(y, r, splat(4.1665795894e-2f));
    y = fma(y, r, splat(1.6666665459e-1f));
    y = fma(y, r, splat(5.0000001201e-1f));
    y = fma(y, r * r, r + 1.0f);
    i32x16 power = ((i32x16)shifted - (i32x16)magic) << 23;
    f32x16 out = (f32x16)((i32x16)y + power);
    out = chosen_by(x < low, f32x16{}, out);
    return chosen_by(x == x, out, x);
}
