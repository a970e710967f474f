// Sixteen float32 lanes, and the element types that are loaded into them and rounded out of them.
//
// Everything here is by lane, so that a value never depends on where in memory it lies: tails are copied into a padded
// buffer and go through the very same lanes. Contraction is off; where a fused multiply-add is meant, it is written.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

// Whether bfloat16 is multiplied by the instruction that adds two products at a time. Its order of additions is its
// own: COMMON_ORDER asks for the one that all processors have in common.
#if defined(__AVX512BF16__) && !defined(COMMON_ORDER)
#define PAIRED_SCORES
#if !defined(__AMX_BF16__)
#define PAIR_DOTS
#endif
#endif

typedef float f32x16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t i32x16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t u32x16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t u16x16 __attribute__((vector_size(32), aligned(2), may_alias));
typedef uint8_t u8x16 __attribute__((vector_size(16), aligned(1), may_alias));

constexpr int LANES = 16;

inline f32x16 splat(float x) { return x - f32x16{}; }

// The same for bits that needn't be a number's.
inline f32x16 splat_bits(float x) {
    int32_t bits;
    memcpy(&bits, &x, 4);
    return (f32x16)(bits - i32x16{});
}

inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__) || defined(__aarch64__)
    f32x16 out;
    for (int i = 0; i < LANES; i++) out[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return out;
#else
    return a * b + c;
#endif
}

struct bf16 {
    uint16_t bits;
};

inline float value_of(bf16 x) {
    const uint32_t bits = (uint32_t)x.bits << 16;
    float out;
    memcpy(&out, &bits, 4);
    return out;
}

inline f32x16 load(const float *p) { return *(const f32x16 *)p; }

inline f32x16 load(const bf16 *p) {
    return (f32x16)(__builtin_convertvector(*(const u16x16 *)p, u32x16) << 16);
}

// By instruction where there is one: GCC takes a vector that comes from memory apart, byte by byte.
inline i32x16 widened(u8x16 codes) {
#if defined(__AVX512F__)
    return (i32x16)_mm512_cvtepu8_epi32((__m128i)codes);
#elif defined(__AVX2__)
    const __m128i all = (__m128i)codes;
    const __m256i halves[2] = {_mm256_cvtepu8_epi32(all), _mm256_cvtepu8_epi32(_mm_unpackhi_epi64(all, all))};
    i32x16 out;
    memcpy(&out, halves, sizeof(out));
    return out;
#else
    return __builtin_convertvector(codes, i32x16);
#endif
}

// Four bits of exponent and three of mantissa, moved to where float32 has them; without an exponent, mantissa * 2^-9.
// (Moved alone, these would be denormal numbers of float32, with which processors compute very slowly.)
inline f32x16 e4m3(i32x16 bits) {
    const i32x16 size = bits & 0x7f;
    const f32x16 small = __builtin_convertvector(size, f32x16) * splat(0x1p-9f);
    const i32x16 normal = (size << 20) + (120 << 23);
    return (f32x16)((size < 8 ? (i32x16)small : normal) | (bits & 0x80) << 24);
}

// Codes of quantised keys and values.
struct float8 {
    uint8_t bits;
};

struct int8 {
    uint8_t bits;
};

inline f32x16 load(const float8 *p) { return e4m3(widened(*(const u8x16 *)p)); }

inline f32x16 load(const int8 *p) { return __builtin_convertvector(widened(*(const u8x16 *)p) << 24 >> 24, f32x16); }

inline void store(float *p, f32x16 x) { *(f32x16 *)p = x; }

// To the nearest, ties to even, as torch rounds.
inline u16x16 round_to_bf16(f32x16 x) {
    u32x16 bits = (u32x16)x;
    u32x16 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    rounded = x == x ? rounded : u32x16{} + 0x7fc0u;
    return __builtin_convertvector(rounded, u16x16);
}

inline void store(bf16 *p, f32x16 x) { *(u16x16 *)p = round_to_bf16(x); }

// What is left of a value when it is written as T and read again.
inline f32x16 rounded(f32x16 x, const float *) { return x; }
inline f32x16 rounded(f32x16 x, const bf16 *) {
    return (f32x16)(__builtin_convertvector(round_to_bf16(x), u32x16) << 16);
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

// A vector of integers from a macro of the lane; constant, so that shuffles by it are single instructions.
#define EACH_LANE(f)                                                                                                  \
    (i32x16) { f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7), f(8), f(9), f(10), f(11), f(12), f(13), f(14), f(15) }

// Lanes of a and b, side by side, that a macro of the lane chooses.
#if defined(__clang__)
#define CHOSEN(a, b, f)                                                                                               \
    __builtin_shufflevector(a, b, f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7), f(8), f(9), f(10), f(11), f(12),    \
                            f(13), f(14), f(15))
#else
#define CHOSEN(a, b, f) __builtin_shuffle(a, b, EACH_LANE(f))
#endif

template <int WIDTH> inline f32x16 rotated(f32x16 x) {
#define AHEAD(i) ((i + WIDTH) % LANES)
    return CHOSEN(x, x, AHEAD);
#undef AHEAD
}

// Lane with lane half the width away, down to one: a fixed order of additions.
inline float sum_of(f32x16 x) {
    x += rotated<8>(x);
    x += rotated<4>(x);
    x += rotated<2>(x);
    x += rotated<1>(x);
    return x[0];
}

inline f32x16 larger(f32x16 a, f32x16 b) { return a > b ? a : b; }

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
    f32x16 bounded = x > high ? high : x;
    bounded = bounded < low ? low : bounded;
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
    out = x < low ? f32x16{} : out;
    return x == x ? out : x;
}
