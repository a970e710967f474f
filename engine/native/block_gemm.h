// Products of rows with a weight in blocks (engine/weight_formats/block_weight.py): out = sum over k of x[m, k] * w[n, k].
//
// A group of columns of a panel of 32 outputs is unpacked to float32 into a buffer of the first cache, and then
// multiplied with all rows; so many rows cost one unpacking, and one row the reading of its codes. An element of the
// result is one chain of fused multiply-adds over k from first to last, as in gemm.h with the unpacked weight in
// float32: the bits are the same. Between groups the sums lie in memory, which changes none.
//
// In a panel codes lie k after k: 32 of eight bits, or 16 bytes whose low halves are the first 16 outputs and whose
// high ones are the others. Scales and zeros follow group after group, 32 side by side.
#pragma once

#include <algorithm>

#include "gemm.h"

enum Code { UINT4, UINT8, E2M1, E4M3 };
enum ScaleType { SCALE_FLOAT, SCALE_BF16, SCALE_HALF, SCALE_E4M3, SCALE_E8M0 };

typedef uint8_t u8x16 __attribute__((vector_size(16), aligned(1), may_alias));

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

struct Blocks {
    long n, k, group;
    int32_t code, scale_type, zero;
    const uint8_t *codes, *zeros;  // zeros: null where `zero` is that of all groups
    const void *scales;
    const float *factors;  // whole panels, or null; of E2M1 alone
};

inline f32x16 whole_numbers(u8x16 codes) { return __builtin_convertvector(widened(codes), f32x16); }

// Four bits of exponent and three of mantissa, moved to where float32 has them; without an exponent, mantissa * 2^-9.
// (Moved alone, these would be denormal numbers of float32, with which processors compute very slowly.)
inline f32x16 e4m3(u8x16 codes) {
    const i32x16 bits = widened(codes), size = bits & 0x7f;
    const f32x16 small = __builtin_convertvector(size, f32x16) * splat(0x1p-9f);
    const i32x16 normal = (size << 20) + (120 << 23);
    return (f32x16)((size < 8 ? (i32x16)small : normal) | (bits & 0x80) << 24);
}

// Two bits of exponent and one of mantissa; without an exponent, mantissa / 2.
inline f32x16 e2m1(u8x16 codes) {
    const i32x16 bits = widened(codes), size = bits & 7;
    const f32x16 small = __builtin_convertvector(size, f32x16) * splat(0.5f);
    const i32x16 normal = (size << 22) + (126 << 23);
    return (f32x16)((size < 2 ? (i32x16)small : normal) | (bits & 8) << 28);
}

template <int CODE> inline f32x16 value_of(u8x16 codes) {
    if constexpr (CODE == E4M3) return e4m3(codes);
    if constexpr (CODE == E2M1) return e2m1(codes);
    return whole_numbers(codes);
}

// Float16, denormal numbers included; infinities and what is no number are refused when a weight is read.
inline f32x16 half_values(const uint16_t *p) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#else
    const i32x16 bits = __builtin_convertvector(*(const u16x16 *)p, i32x16), size = bits & 0x7fff;
    const f32x16 small = __builtin_convertvector(size, f32x16) * splat(0x1p-24f);
    const i32x16 normal = (size << 13) + (112 << 23);
    return (f32x16)((size < 0x400 ? (i32x16)small : normal) | (bits & 0x8000) << 16);
#endif
}

// Sixteen scales.
inline f32x16 scale_values(const Blocks &b, long at) {
    switch (b.scale_type) {
    case SCALE_FLOAT: return load((const float *)b.scales + at);
    case SCALE_BF16: return load((const bf16 *)b.scales + at);
    case SCALE_HALF: return half_values((const uint16_t *)b.scales + at);
    case SCALE_E4M3: return e4m3(*(const u8x16 *)((const uint8_t *)b.scales + at));
    }
    const i32x16 exponent = widened(*(const u8x16 *)((const uint8_t *)b.scales + at));
    return (f32x16)(exponent == 0 ? i32x16{} + (1 << 22) : exponent << 23);  // 2^-127 is a denormal number.
}

// What the outputs of a panel have for one group.
struct GroupValues {
    f32x16 scale[2], zero[2], factor[2];
};

inline GroupValues group_values(const Blocks &b, long panel, long group) {
    const long groups = (b.k + b.group - 1) / b.group;
    GroupValues g;
    for (int half = 0; half < 2; half++) {
        g.scale[half] = scale_values(b, (panel * groups + group) * PANEL + half * LANES);
        g.zero[half] = splat((float)b.zero);
        if (b.zeros) {
            const uint8_t *zeros = b.zeros + (panel * groups + group) * PANEL + half * LANES;
            g.zero[half] = whole_numbers(*(const u8x16 *)zeros);
        }
        g.factor[half] = b.factors ? load(b.factors + panel * PANEL + half * LANES) : splat(1.0f);
    }
    return g;
}

template <int CODE> constexpr bool two_a_byte() { return CODE == UINT4 || CODE == E2M1; }
template <int CODE> constexpr long column_bytes() { return two_a_byte<CODE>() ? PANEL / 2 : PANEL; }

// One column of a panel.
template <int CODE>
inline void unpack_column(const uint8_t *codes, const GroupValues &g, f32x16 &left, f32x16 &right) {
    const u8x16 packed = *(const u8x16 *)codes;
    if constexpr (two_a_byte<CODE>()) {
        left = value_of<CODE>(packed & 15);
        right = value_of<CODE>(packed >> 4);
    } else {
        left = value_of<CODE>(packed);
        right = value_of<CODE>(*(const u8x16 *)(codes + LANES));
    }
    if constexpr (CODE == UINT4 || CODE == UINT8) {
        left -= g.zero[0];
        right -= g.zero[1];
    }
    left *= g.scale[0];
    right *= g.scale[1];
    if constexpr (CODE == E2M1) {
        left *= g.factor[0];
        right *= g.factor[1];
    }
}

// Columns [first, last) of a panel, all of one group, into `to` [last - first, 32].
template <int CODE>
void unpack_group(const Blocks &b, long panel, long group, long first, long last, float *to) {
    const GroupValues g = group_values(b, panel, group);
    const uint8_t *codes = b.codes + (panel * b.k + first) * column_bytes<CODE>();
    for (long j = first; j < last; j++, codes += column_bytes<CODE>(), to += PANEL) {
        f32x16 left, right;
        unpack_column<CODE>(codes, g, left, right);
        store(to, left);
        store(to + LANES, right);
    }
}

// The sums of few rows and two panels, unpacked in registers: x [k, ROWS], sums [ROWS, 2 * 32].
template <int CODE, int ROWS> void pair_sums(const Blocks &b, const float *x, long panel, float *sums) {
    f32x16 sum[ROWS][4];
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < 4; i++) sum[r][i] = f32x16{};
    const uint8_t *one = b.codes + panel * b.k * column_bytes<CODE>();
    // The last panel may be alone: then it is computed twice.
    const long other = (panel + 1) * PANEL < b.n ? panel + 1 : panel;
    const uint8_t *two = b.codes + other * b.k * column_bytes<CODE>();
    for (long first = 0, group = 0; first < b.k; first += b.group, group++) {
        const GroupValues of_one = group_values(b, panel, group), of_two = group_values(b, other, group);
        const long last = std::min(first + b.group, b.k);
        for (long j = first; j < last; j++) {
            f32x16 w[4];
            unpack_column<CODE>(one, of_one, w[0], w[1]);
            unpack_column<CODE>(two, of_two, w[2], w[3]);
            one += column_bytes<CODE>();
            two += column_bytes<CODE>();
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; r++) {
                const f32x16 factor = splat(x[j * ROWS + r]);
#pragma GCC unroll 4
                for (int i = 0; i < 4; i++) sum[r][i] = fma(factor, w[i], sum[r][i]);
            }
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < 4; i++) store(sums + r * 2 * PANEL + i * LANES, sum[r][i]);
}

template <int CODE> struct Kind {
    static constexpr int code = CODE;
};

// Calls `body` with the code as a constant.
template <typename Body> void for_code(int code, const Body &body) {
    switch (code) {
    case UINT4: return body(Kind<UINT4>{});
    case UINT8: return body(Kind<UINT8>{});
    case E2M1: return body(Kind<E2M1>{});
    default: return body(Kind<E4M3>{});
    }
}

// Adds `steps` columns to the sums of ROWS rows; row r, column j begins at x[r * row_stride + j * step_stride].
template <int ROWS>
inline void add_columns(const float *x, long row_stride, long step_stride, const float *w, long steps, float *sums) {
    f32x16 low[ROWS], high[ROWS];
    for (int r = 0; r < ROWS; r++) {
        low[r] = load(sums + r * PANEL);
        high[r] = load(sums + r * PANEL + LANES);
    }
    for (long j = 0; j < steps; j++) {
        const f32x16 left = load(w + j * PANEL), right = load(w + j * PANEL + LANES);
#pragma GCC unroll 14
        for (int r = 0; r < ROWS; r++) {
            const f32x16 factor = splat(x[r * row_stride + j * step_stride]);
            low[r] = fma(factor, left, low[r]);
            high[r] = fma(factor, right, high[r]);
        }
    }
    for (int r = 0; r < ROWS; r++) {
        store(sums + r * PANEL, low[r]);
        store(sums + r * PANEL + LANES, high[r]);
    }
}

inline void add_rows(int rows, const float *x, long row_stride, long step_stride, const float *w, long steps,
                     float *sums) {
#define ROWS_CASE(n)                                                                                                  \
    case n: return add_columns<n>(x, row_stride, step_stride, w, steps, sums);
    switch (rows) {
        ROWS_CASE(1) ROWS_CASE(2) ROWS_CASE(3) ROWS_CASE(4) ROWS_CASE(5) ROWS_CASE(6)
        ROWS_CASE(7) ROWS_CASE(8) ROWS_CASE(9) ROWS_CASE(10) ROWS_CASE(11) ROWS_CASE(12) ROWS_CASE(13) ROWS_CASE(14)
    }
#undef ROWS_CASE
}

constexpr long MOST_COLUMNS = 128;  // of float32 that are unpacked at once: 16 KiB
constexpr long FEW_ROWS = 4;

template <typename T>
inline void put_sums(const float *sums, const Blocks &b, long panel, const float *bias, T *out, long row) {
    const int width = (int)std::min((long)PANEL, b.n - panel * PANEL);
    f32x16 left = load(sums), right = load(sums + LANES);
    if (bias) {
        left += load(bias + panel * PANEL);
        right += load(bias + panel * PANEL + LANES);
    }
    T *to = out + row * b.n + panel * PANEL;
    store_some(to, left, std::min(width, LANES));
    if (width > LANES) store_some(to + LANES, right, width - LANES);
}

// x [m, k] with rows x_stride apart; out [m, n] contiguous. bias: whole panels of float32, or null.
template <typename T>
void block_product(const Blocks &b, const T *x, long x_stride, const float *bias, T *out, long m) {
    if (!m) return;
    const long panels = (b.n + PANEL - 1) / PANEL, blocks = (m + MOST_ROWS - 1) / MOST_ROWS;
    static thread_local Buffer<float> kept;
    kept.resize(std::max(1L, blocks * MOST_ROWS * b.k));
    float *rows = kept.data();
    // The rows of a block side by side, column after column; two and three as four, of which those left are zero.
    const bool few = m <= FEW_ROWS;
    const long together = m == 1 ? 1 : FEW_ROWS;
    if (few) memset((void *)rows, 0, together * b.k * sizeof(float));
    each(m, MOST_ROWS, [&](long row) {
        const long block = row / MOST_ROWS * MOST_ROWS;
        const long beside = few ? together : std::min((long)MOST_ROWS, m - block);
        const T *from = x + row * x_stride;
        float *to = rows + block * b.k + row - block;
        for (long j = 0; j < b.k; j += LANES) {
            const int count = (int)std::min((long)LANES, b.k - j);
            float values[LANES];
            store(values, load_some(from + j, count));
            for (int i = 0; i < count; i++) to[(j + i) * beside] = values[i];
        }
    });
    const long chunk = std::max(1L, std::min(panels / 16, 65536 / (b.k * PANEL) + 1));
    for_code(b.code, [&](auto kind) {
        constexpr int CODE = decltype(kind)::code;
        if (few) {
            each((panels + 1) / 2, chunk, [&](long pair) {
                float sums[FEW_ROWS * 2 * PANEL];
                if (m == 1)
                    pair_sums<CODE, 1>(b, rows, 2 * pair, sums);
                else
                    pair_sums<CODE, FEW_ROWS>(b, rows, 2 * pair, sums);
                for (long row = 0; row < m; row++)
                    for (long half = 0; half < 2 && 2 * pair + half < panels; half++)
                        put_sums(sums + (2 * row + half) * PANEL, b, 2 * pair + half, bias, out, row);
            });
            return;
        }
        each(panels, chunk, [&](long panel) {
            static thread_local Buffer<float> sums, unpacked;
            sums.resize(blocks * MOST_ROWS * PANEL);
            unpacked.resize(MOST_COLUMNS * PANEL);
            memset(sums.data(), 0, blocks * MOST_ROWS * PANEL * sizeof(float));
            for (long first = 0; first < b.k;) {
                const long group = first / b.group;
                const long last = std::min({first + MOST_COLUMNS, (group + 1) * b.group, b.k});
                unpack_group<CODE>(b, panel, group, first, last, unpacked.data());
                for (long block = 0; block < blocks; block++) {
                    const int count = (int)std::min((long)MOST_ROWS, m - block * MOST_ROWS);
                    add_rows(count, rows + block * MOST_ROWS * b.k + first * count, 1, count, unpacked.data(),
                             last - first, sums.data() + block * MOST_ROWS * PANEL);
                }
                first = last;
            }
            for (long row = 0; row < m; row++) put_sums(sums.data() + row * PANEL, b, panel, bias, out, row);
        });
    });
}

// Codes [n, k], one a byte, in the order of reading; behind the last row are zeros.
inline void pack_blocks(const uint8_t *codes, uint8_t *packed, long n, long k, bool halves) {
    const long panels = (n + PANEL - 1) / PANEL, width = halves ? PANEL / 2 : PANEL;
    each(panels, 1, [&](long panel) {
        uint8_t *at = packed + panel * k * width;
        for (long j = 0; j < k; j++)
            for (long i = 0; i < width; i++, at++) {
                const long row = panel * PANEL + i;
                *at = row < n ? codes[row * k + j] : 0;
                if (halves && row + LANES < n) *at |= (uint8_t)(codes[(row + LANES) * k + j] << 4);
            }
    });
}
