// Vectors of sixteen lanes: floats, and whole numbers with and without a sign.
//
// They are the compiler's own vectors of 64 bytes, whose operators work lane by lane, where there are registers of that
// size or no vectors that we know. GCC keeps such vectors in memory on a processor whose registers are half as wide
// (AVX2), and takes what is done to them apart; so there each is two of 32 bytes, with the operators that are used.
#pragma once

#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX2__) && !defined(__AVX512F__)
#define IN_HALVES
#endif

constexpr int LANES = 16;

typedef uint16_t u16x16 __attribute__((vector_size(32), aligned(2), may_alias));
typedef uint8_t u8x16 __attribute__((vector_size(16), aligned(1), may_alias));

#if defined(IN_HALVES)

typedef float f32x8 __attribute__((vector_size(32)));
typedef int32_t i32x8 __attribute__((vector_size(32)));
typedef uint32_t u32x8 __attribute__((vector_size(32)));

template <typename Half> struct Lane;
template <> struct Lane<f32x8> { typedef float type; };
template <> struct Lane<i32x8> { typedef int32_t type; };
template <> struct Lane<u32x8> { typedef uint32_t type; };

template <typename Half> struct Halves {
    typedef typename Lane<Half>::type Number;
    Half low, high;

    // The same bits as another type.
    template <typename Other> explicit operator Halves<Other>() const { return {(Other)low, (Other)high}; }
    Number operator[](int i) const { return i < 8 ? low[i] : high[i - 8]; }
};
typedef Halves<f32x8> f32x16;
typedef Halves<i32x8> i32x16;
typedef Halves<u32x8> u32x16;

#define FOR_HALVES(op)                                                                                                \
    template <typename H> inline auto operator op(Halves<H> a, Halves<H> b)                                           \
        ->Halves<decltype(a.low op b.low)> {                                                                          \
        return {a.low op b.low, a.high op b.high};                                                                    \
    }                                                                                                                 \
    template <typename H> inline auto operator op(Halves<H> a, typename Lane<H>::type b)                              \
        ->Halves<decltype(a.low op a.low)> {                                                                          \
        return a op Halves<H>{H{} + b, H{} + b};                                                                      \
    }                                                                                                                 \
    template <typename H> inline auto operator op(typename Lane<H>::type a, Halves<H> b)                              \
        ->Halves<decltype(b.low op b.low)> {                                                                          \
        return Halves<H>{H{} + a, H{} + a} op b;                                                                      \
    }
FOR_HALVES(+) FOR_HALVES(-) FOR_HALVES(*) FOR_HALVES(/) FOR_HALVES(&) FOR_HALVES(|)
FOR_HALVES(<) FOR_HALVES(>) FOR_HALVES(>=) FOR_HALVES(==) FOR_HALVES(<<) FOR_HALVES(>>)
#undef FOR_HALVES

template <typename H> inline Halves<H> operator-(Halves<H> a) { return {-a.low, -a.high}; }
template <typename H, typename B> inline Halves<H> &operator+=(Halves<H> &a, B b) { return a = a + b; }
template <typename H, typename B> inline Halves<H> &operator-=(Halves<H> &a, B b) { return a = a - b; }
template <typename H, typename B> inline Halves<H> &operator*=(Halves<H> &a, B b) { return a = a * b; }

template <typename H> inline Halves<H> chosen_by(i32x16 mask, Halves<H> a, Halves<H> b) {
    return {mask.low ? a.low : b.low, mask.high ? a.high : b.high};
}

inline f32x16 fma(f32x16 a, f32x16 b, f32x16 c) {
#if defined(__FMA__)
    return {(f32x8)_mm256_fmadd_ps((__m256)a.low, (__m256)b.low, (__m256)c.low),
            (f32x8)_mm256_fmadd_ps((__m256)a.high, (__m256)b.high, (__m256)c.high)};
#else
    return a * b + c;
#endif
}

inline f32x16 load(const float *p) { return {(f32x8)_mm256_loadu_ps(p), (f32x8)_mm256_loadu_ps(p + 8)}; }
inline void store(float *p, f32x16 x) {
    _mm256_storeu_ps(p, (__m256)x.low);
    _mm256_storeu_ps(p + 8, (__m256)x.high);
}

inline f32x16 floats(i32x16 x) {
    return {(f32x8)_mm256_cvtepi32_ps((__m256i)x.low), (f32x8)_mm256_cvtepi32_ps((__m256i)x.high)};
}

// By instruction: GCC takes a vector that comes from memory apart, byte by byte.
inline i32x16 widened(u8x16 x) {
    const __m128i all = (__m128i)x;
    return {(i32x8)_mm256_cvtepu8_epi32(all), (i32x8)_mm256_cvtepu8_epi32(_mm_unpackhi_epi64(all, all))};
}
inline i32x16 widened(u16x16 x) {
    const __m256i all = (__m256i)x;
    return {(i32x8)_mm256_cvtepu16_epi32(_mm256_castsi256_si128(all)),
            (i32x8)_mm256_cvtepu16_epi32(_mm256_extracti128_si256(all, 1))};
}
// Of numbers below 2^16.
inline u16x16 narrowed(u32x16 x) {
    const __m256i both = _mm256_packus_epi32((__m256i)x.low, (__m256i)x.high);
    return (u16x16)_mm256_permute4x64_epi64(both, 0xd8);
}

// A vector of integers from a macro of the lane; constant, so that shuffles by it are single instructions.
#define EACH_LANE(f)                                                                                                  \
    (i32x16) {                                                                                                        \
        {f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7)}, { f(8), f(9), f(10), f(11), f(12), f(13), f(14), f(15) }     \
    }

#if defined(__clang__)
#define CHOSEN_8(a, b, f) __builtin_shufflevector(a, b, f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7))
#else
#define CHOSEN_8(a, b, f) __builtin_shuffle(a, b, (i32x8){f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7)})
#endif

// Lane i is lane i + WIDTH, and behind the last one is the first.
template <int WIDTH> inline f32x16 rotated(f32x16 x) {
    if constexpr (WIDTH == 8) return {x.high, x.low};
#define AHEAD(i) (i + WIDTH % 8)
    return {CHOSEN_8(x.low, x.high, AHEAD), CHOSEN_8(x.high, x.low, AHEAD)};
#undef AHEAD
}

// In each 2 * H lanes, the second half of a and the first one of b change places.
template <int H> inline void exchange(f32x16 &a, f32x16 &b) {
    if constexpr (H == 8) {
        const f32x8 kept = a.high;
        a.high = b.low;
        b.low = kept;
        return;
    }
#define LOW(i) (i & H % 8 ? 8 + i - H : i)
#define HIGH(i) (i & H % 8 ? 8 + i : (i + H) % 8)
    const f32x16 first = {CHOSEN_8(a.low, b.low, LOW), CHOSEN_8(a.high, b.high, LOW)};
    b = {CHOSEN_8(a.low, b.low, HIGH), CHOSEN_8(a.high, b.high, HIGH)};
    a = first;
#undef LOW
#undef HIGH
}
#undef CHOSEN_8

#else

typedef float f32x16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t i32x16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint32_t u32x16 __attribute__((vector_size(64), aligned(4), may_alias));

template <typename V> inline V chosen_by(i32x16 mask, V a, V b) { return mask ? a : b; }

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

inline f32x16 load(const float *p) { return *(const f32x16 *)p; }
inline void store(float *p, f32x16 x) { *(f32x16 *)p = x; }

inline f32x16 floats(i32x16 x) { return __builtin_convertvector(x, f32x16); }

// By instruction where there is one: GCC takes a vector that comes from memory apart, byte by byte.
inline i32x16 widened(u8x16 x) {
#if defined(__AVX512F__)
    return (i32x16)_mm512_cvtepu8_epi32((__m128i)x);
#else
    return __builtin_convertvector(x, i32x16);
#endif
}
inline i32x16 widened(u16x16 x) { return __builtin_convertvector(x, i32x16); }
// Of numbers below 2^16.
inline u16x16 narrowed(u32x16 x) { return __builtin_convertvector(x, u16x16); }

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

// Lane i is lane i + WIDTH, and behind the last one is the first.
template <int WIDTH> inline f32x16 rotated(f32x16 x) {
#define AHEAD(i) ((i + WIDTH) % LANES)
    return CHOSEN(x, x, AHEAD);
#undef AHEAD
}

// In each 2 * H lanes, the second half of a and the first one of b change places.
template <int H> inline void exchange(f32x16 &a, f32x16 &b) {
#define LOW(i) (i & H ? LANES + i - H : i)
#define HIGH(i) (i & H ? LANES + i : i + H)
    const f32x16 first = CHOSEN(a, b, LOW);
    b = CHOSEN(a, b, HIGH);
    a = first;
#undef LOW
#undef HIGH
}
#undef CHOSEN

#endif

inline f32x16 splat(float x) { return x - f32x16{}; }

// A word of memory in all lanes, whatever it holds.
inline f32x16 splat_word(const void *p) {
    int32_t bits;
    memcpy(&bits, p, 4);
    return (f32x16)(bits - i32x16{});
}

// Sixteen words of memory, whatever they hold.
inline i32x16 load_words(const void *p) { return (i32x16)load((const float *)p); }
