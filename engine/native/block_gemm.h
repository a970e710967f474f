// Products of float32 rows with a weight in blocks (engine/weight_formats/block_weight.py): out = sum over k of
// x[m, k] * w[n, k].
//
// A group of columns of a panel of 32 outputs is unpacked to float32 into a buffer of the first cache, and then
// multiplied with all rows; so many rows cost one unpacking, and one row the reading of its codes. An element of the
// result is one chain of fused multiply-adds over k from first to last, as in gemm.h with the unpacked weight in
// float32: the bits are the same. Between groups the sums lie in memory, which changes none; those of more rows than a
// thread has room for are computed one part after the other, each with an unpacking of its own.
//
// In a panel codes lie column after column: of eight bits 32 bytes; of four 16 bytes, whose low halves are the first 16
// outputs and whose high ones are the others. Codes of five and six bits are so many columns of four, each with the
// higher bits of its 32 outputs behind it; those of two bits are such higher bits alone, and those of three are two and
// one. Scales and what else groups have follow group after group, 32 side by side.
#pragma once

#include <algorithm>

#include "gemm.h"

// As in block_weight.py, whose codes of four bits with offsets are the last here.
enum Code { UINT4, UINT8, E2M1, E4M3, UINT2, UINT3, UINT5, UINT6, IQ4, UINT4_OFFSET };
enum ScaleType { SCALE_FLOAT, SCALE_BF16, SCALE_HALF, SCALE_E4M3, SCALE_E8M0, SCALE_WHOLE, SCALE_PAIRED };

struct Blocks {
    long n, k, group, span;  // span: columns that share a factor
    long groups, spans;      // of a row
    int32_t code, scale_type, zero;
    const uint8_t *codes, *zeros;  // zeros: null where `zero` is that of all groups
    const void *scales, *offsets;  // offsets: null where there are none, or where they are paired with the scales
    const void *factors;           // or null: of E2M1 float32; else float16, of scales that are whole numbers
    const uint16_t *offset_factors;  // float16, or null
};

inline i32x16 widened_at(const uint8_t *codes) { return widened(*(const u8x16 *)codes); }

// Two bits of exponent and one of mantissa; without an exponent, mantissa / 2.
inline f32x16 e2m1(i32x16 bits) {
    const i32x16 size = bits & 7;
    const f32x16 small = floats(size) * splat(0.5f);
    const i32x16 normal = (size << 22) + (126 << 23);
    return (f32x16)(chosen_by(size < 2, (i32x16)small, normal) | (bits & 8) << 28);
}

// ggml's codebook of four bits (kvalues_iq4nl); of a code's bits the lowest four count.
inline f32x16 iq4(i32x16 codes) {
#if defined(__AVX512F__)
    const f32x16 values = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    return (f32x16)_mm512_permutexvar_ps((__m512i)codes, (__m512)values);
#elif defined(__AVX2__)
    const __m256i values = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113));
    __m256i halves[2];
    memcpy(halves, &codes, sizeof(codes));
    for (__m256i &half : halves) {
        const __m256i found = _mm256_shuffle_epi8(values, _mm256_and_si256(half, _mm256_set1_epi32(15)));
        half = _mm256_srai_epi32(_mm256_slli_epi32(found, 24), 24);
    }
    memcpy(&codes, halves, sizeof(codes));
    return floats(codes);
#else
    static const float values[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
    f32x16 out;
    for (int i = 0; i < LANES; i++) out[i] = values[codes[i] & 15];
    return out;
#endif
}

template <int CODE> inline f32x16 value_of(i32x16 codes) {
    if constexpr (CODE == E4M3) return e4m3(codes);
    if constexpr (CODE == E2M1) return e2m1(codes);
    if constexpr (CODE == IQ4) return iq4(codes);
    return floats(codes);
}

// Float16, denormal numbers included; infinities and what is no number are refused when a weight is read.
inline f32x16 half_values(const uint16_t *p) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#else
    const i32x16 bits = widened(*(const u16x16 *)p), size = bits & 0x7fff;
    const f32x16 small = floats(size) * splat(0x1p-24f);
    const i32x16 normal = (size << 13) + (112 << 23);
    return (f32x16)(chosen_by(size < 0x400, (i32x16)small, normal) | (bits & 0x8000) << 16);
#endif
}

// Sixteen scales, or offsets, of which the first is number `at`.
inline f32x16 scale_values(int type, const void *scales, long at) {
    const uint8_t *bytes = (const uint8_t *)scales + at;
    switch (type) {
    case SCALE_FLOAT: return load((const float *)scales + at);
    case SCALE_BF16: return load((const bf16 *)scales + at);
    case SCALE_HALF: return half_values((const uint16_t *)scales + at);
    case SCALE_E4M3: return e4m3(widened_at(bytes));
    case SCALE_WHOLE: return floats(widened_at(bytes) << 24 >> 24);
    case SCALE_PAIRED: return floats(widened_at(bytes) & 15);
    }
    const i32x16 exponent = widened_at(bytes);
    return (f32x16)chosen_by(exponent == 0, i32x16{} + (1 << 22), exponent << 23);  // 2^-127 is a denormal number.
}

// Whether an unpacked value is one fused multiply-add, of a code with its scale and an offset. Their product must be
// exact then: scales are float16's, or whole numbers of eight bits times one. A zero is an offset, too.
template <int CODE> constexpr bool fused() {
    return CODE == UINT2 || CODE == UINT3 || CODE == UINT5 || CODE == UINT6 || CODE == UINT4_OFFSET;
}

// What the outputs of a panel have for one group.
struct GroupValues {
    f32x16 scale[2], zero[2], factor[2];  // zero: of codes that are fused, what is added
};

template <int CODE> inline GroupValues group_values(const Blocks &b, long panel, long group) {
    const bool spans = b.factors || b.offset_factors;  // Divisions take as long as the rest.
    const long span = spans ? group * b.group / b.span : 0;
    GroupValues g;
    for (int half = 0; half < 2; half++) {
        const long at = (panel * b.groups + group) * PANEL + half * LANES;
        const long factor_at = (panel * b.spans + span) * PANEL + half * LANES;
        g.scale[half] = scale_values(b.scale_type, b.scales, at);
        if constexpr (CODE == E2M1)
            g.factor[half] = b.factors ? load((const float *)b.factors + factor_at) : splat(1.0f);
        else if (b.factors)
            g.scale[half] *= half_values((const uint16_t *)b.factors + factor_at);
        if constexpr (fused<CODE>()) {
            g.zero[half] = g.scale[half] * splat((float)-b.zero);
            if (b.offsets) g.zero[half] = scale_values(b.scale_type, b.offsets, at);
            if (b.scale_type == SCALE_PAIRED) g.zero[half] = floats(widened_at((const uint8_t *)b.scales + at) >> 4);
            if (b.offset_factors) g.zero[half] *= half_values(b.offset_factors + factor_at);
        } else
            g.zero[half] = b.zeros ? floats(widened_at(b.zeros + at)) : splat((float)b.zero);
    }
    return g;
}

// Bits of a code that lie in bytes of 32 outputs, and those above them.
template <int CODE> constexpr int low_bits() {
    return CODE == UINT2 || CODE == UINT3 ? 0 : CODE == UINT8 || CODE == E4M3 ? 8 : 4;
}
template <int CODE> constexpr int middle_bits() { return CODE == UINT2 || CODE == UINT3 || CODE == UINT6 ? 2 : 0; }
template <int CODE> constexpr int top_bits() { return CODE == UINT3 || CODE == UINT5 ? 1 : 0; }
template <int CODE> constexpr int code_bits() { return low_bits<CODE>() + middle_bits<CODE>() + top_bits<CODE>(); }
template <int CODE> constexpr long column_bytes() { return code_bits<CODE>() * PANEL / 8; }

// `codes` with bits [SHIFT, SHIFT + WIDTH) from a word in which those of 16 outputs lie one above the other, from bit
// FIRST on.
template <int WIDTH, int SHIFT, int FIRST> inline i32x16 with_bits(i32x16 codes, const uint8_t *word) {
    int32_t bits;
    memcpy(&bits, word, 4);
#define TURN(i) ((FIRST + WIDTH * i + 32 - SHIFT) % 32)
    constexpr int32_t mask = ((1 << WIDTH) - 1) << SHIFT;
    const i32x16 turns = EACH_LANE(TURN);
#if defined(__AVX512F__)
    return codes | ((i32x16)_mm512_rorv_epi32(_mm512_set1_epi32(bits), (__m512i)turns) & mask);
#else
    const u32x16 all = (u32x16)(bits - i32x16{});
    const u32x16 turned = all >> (u32x16)turns | all << ((32 - (u32x16)turns) & 31);
    return codes | ((i32x16)turned & mask);
#endif
#undef TURN
}

// The codes of one column of a panel.
template <int CODE> inline void column_codes(const uint8_t *codes, i32x16 &left, i32x16 &right) {
    constexpr int low = low_bits<CODE>(), middle = middle_bits<CODE>();
    left = right = i32x16{};
    if constexpr (low == 8) {
        left = widened_at(codes);
        right = widened_at(codes + LANES);
    }
    if constexpr (low == 4) {
        const i32x16 both = widened_at(codes);
        left = both & 15;
        right = both >> 4;
    }
    const uint8_t *rest = codes + low * PANEL / 8;
    if constexpr (middle) {
        left = with_bits<2, low, 0>(left, rest);
        right = with_bits<2, low, 0>(right, rest + 4);
    }
    if constexpr (top_bits<CODE>()) {
        left = with_bits<1, low + middle, 0>(left, rest + middle * PANEL / 8);
        right = with_bits<1, low + middle, 16>(right, rest + middle * PANEL / 8);
    }
}

// The values of one column's codes of 16 outputs.
template <int CODE> inline f32x16 unpacked_values(i32x16 codes, f32x16 scale, f32x16 zero, f32x16 factor) {
    f32x16 value = value_of<CODE>(codes);
    if constexpr (fused<CODE>()) return fma(value, scale, zero);
    if constexpr (CODE == UINT4 || CODE == UINT8) value -= zero;
    value *= scale;
    if constexpr (CODE == E2M1) value *= factor;
    return value;
}

// One column of a panel.
template <int CODE>
inline void unpack_column(const uint8_t *codes, const GroupValues &g, f32x16 &left, f32x16 &right) {
    i32x16 low, high;
    column_codes<CODE>(codes, low, high);
    left = unpacked_values<CODE>(low, g.scale[0], g.zero[0], g.factor[0]);
    right = unpacked_values<CODE>(high, g.scale[1], g.zero[1], g.factor[1]);
}

// Columns [first, last) of a panel, all of one group, into `to` [last - first, 32].
template <int CODE>
__attribute__((noinline)) void unpack_group(const Blocks &b, long panel, long group, long first, long last, float *to) {
    const GroupValues g = group_values<CODE>(b, panel, group);
    const uint8_t *codes = b.codes + (panel * b.k + first) * column_bytes<CODE>();
    for (long j = first; j < last; j++, codes += column_bytes<CODE>(), to += PANEL) {
        f32x16 left, right;
        unpack_column<CODE>(codes, g, left, right);
        store(to, left);
        store(to + LANES, right);
    }
}

// The sums of few rows and two panels, unpacked in registers: x [k, ROWS], sums [ROWS, 2 * 32].
template <int CODE, int ROWS>
__attribute__((noinline)) void pair_sums(const Blocks &b, const float *x, long panel, float *sums) {
    f32x16 sum[ROWS][4];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) sum[r][i] = f32x16{};
    const uint8_t *one = b.codes + panel * b.k * column_bytes<CODE>();
    // The last panel may be alone: then it is computed twice.
    const long other = (panel + 1) * PANEL < b.n ? panel + 1 : panel;
    const uint8_t *two = b.codes + other * b.k * column_bytes<CODE>();
    for (long first = 0, group = 0; first < b.k; first += b.group, group++) {
        const GroupValues of_one = group_values<CODE>(b, panel, group), of_two = group_values<CODE>(b, other, group);
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
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
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
    case UINT2: return body(Kind<UINT2>{});
    case UINT3: return body(Kind<UINT3>{});
    case UINT5: return body(Kind<UINT5>{});
    case UINT6: return body(Kind<UINT6>{});
    case IQ4: return body(Kind<IQ4>{});
    case UINT4_OFFSET: return body(Kind<UINT4_OFFSET>{});
    default: return body(Kind<E4M3>{});
    }
}

constexpr long MOST_COLUMNS = 128;  // of float32 that are unpacked at once: 16 KiB
constexpr long FEW_ROWS = 4;
constexpr long SUM_BLOCKS = 256;  // of MOST_ROWS rows whose sums lie in memory at once: 384 KiB
constexpr long KEPT_BYTES = 4 << 20;  // of a thread's rows of inputs between two products

// A thread's room for the sums of so many rows and the unpacked columns of a panel; one for all codes and dtypes.
static float *thread_room() {
    static thread_local Buffer<float> room;
    room.resize(SUM_BLOCKS * MOST_ROWS * PANEL + MOST_COLUMNS * PANEL);
    return room.data();
}

// x [m, k] with rows x_stride apart, out [m, n] with rows out_stride apart. bias: whole panels of float32, or null.
inline void block_product(const Blocks &b, const float *x, long x_stride, const float *bias, float *out,
                          long out_stride, long m) {
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
        const float *from = x + row * x_stride;
        float *to = rows + block * b.k + row - block;
        for (long j = 0; j < b.k; j++) to[j * beside] = from[j];
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
                        put_row(sums + (2 * row + half) * PANEL, b.n, 2 * pair + half, bias, out + row * out_stride);
            });
            return;
        }
        each(panels, chunk, [&](long panel) {
            float *sums = thread_room(), *unpacked = sums + SUM_BLOCKS * MOST_ROWS * PANEL;
            for (long begin = 0; begin < blocks; begin += SUM_BLOCKS) {
                const long end = std::min(begin + SUM_BLOCKS, blocks);
                memset(sums, 0, (end - begin) * MOST_ROWS * PANEL * sizeof(float));
                for (long first = 0; first < b.k;) {
                    const long group = first / b.group;
                    const long last = std::min({first + MOST_COLUMNS, (group + 1) * b.group, b.k});
                    unpack_group<CODE>(b, panel, group, first, last, unpacked);
                    for (long block = begin; block < end; block++) {
                        const long count = std::min((long)MOST_ROWS, m - block * MOST_ROWS);
                        const float *some = rows + block * MOST_ROWS * b.k + first * count;
                        const Factors by{some, WORD, count * WORD, unpacked, PANEL * WORD, last - first};
                        chains<Words<float>>(count, by, false, sums + (block - begin) * MOST_ROWS * PANEL, PANEL);
                    }
                    first = last;
                }
                const long first_row = begin * MOST_ROWS, last_row = std::min(end * MOST_ROWS, m);
                for (long row = first_row; row < last_row; row++)
                    put_row(sums + (row - first_row) * PANEL, b.n, panel, bias, out + row * out_stride);
            }
        });
    });
    kept.release(KEPT_BYTES);
}

// Rows of the weight, unpacked: out [count, k]. Each costs the unpacking of its panel. Whether all are rows of it; none
// is read otherwise.
template <typename T> bool block_rows(const Blocks &b, const int64_t *rows, long count, T *out) {
    for (long i = 0; i < count; i++)
        if (rows[i] < 0 || rows[i] >= b.n) return false;
    for_code(b.code, [&](auto kind) {
        constexpr int CODE = decltype(kind)::code;
        each(count, 1, [&](long i) {
            const long panel = rows[i] / PANEL, lane = rows[i] % PANEL;
            float unpacked[LANES * PANEL], values[LANES];
            for (long first = 0; first < b.k;) {
                const long group = first / b.group, last = std::min({first + LANES, (group + 1) * b.group, b.k});
                unpack_group<CODE>(b, panel, group, first, last, unpacked);
                for (long j = 0; j < last - first; j++) values[j] = unpacked[j * PANEL + lane];
                store_some(out + i * b.k + first, load(values), (int)(last - first));
                first = last;
            }
        });
    });
    return true;
}

// Codes [n, k] of so many bits, one a byte, in the order of reading; behind the last row are zeros.
inline void pack_blocks(const uint8_t *codes, uint8_t *packed, long n, long k, int bits) {
    const long panels = (n + PANEL - 1) / PANEL, size = bits * PANEL / 8;
    const int low = bits == 8 ? 8 : bits < 4 ? 0 : 4, middle = bits == 6 || bits < 4 ? 2 : 0;
    memset(packed, 0, panels * k * size);
    each(panels, 1, [&](long panel) {
        uint8_t *at = packed + panel * k * size;
        for (long j = 0; j < k; j++, at += size)
            for (long i = 0; i < std::min((long)PANEL, n - panel * PANEL); i++) {
                const uint8_t code = codes[(panel * PANEL + i) * k + j];
                uint8_t *rest = at + low * PANEL / 8;
                if (low == 8) at[i] = code;
                if (low == 4) at[i % LANES] |= (code & 15) << i / LANES * 4;
                if (middle) rest[i / 4] |= (code >> low & 3) << i % 4 * 2;
                if (bits > low + middle) rest[middle * PANEL / 8 + i / 8] |= (code >> (low + middle) & 1) << i % 8;
            }
    });
}
