// Sums of some rows and 32 columns side by side, each one chain of multiply-adds: what products and attention spend
// their time in. An element's chain is the same however many rows are computed together.
#pragma once

#include "vector.h"

constexpr int PANEL = 2 * LANES;
constexpr long WORD = 4;  // bytes

// What is multiplied at once, a word: a float; or two neighbouring bf16, which an instruction adds up.
template <typename T> struct Words {
    static constexpr int pack = 1;
    static f32x16 dot(f32x16 a, f32x16 b, f32x16 sum) { return fma(a, b, sum); }
};

#if defined(PAIRED_SCORES)
template <> struct Words<bf16> {
    static constexpr int pack = 2;
    static f32x16 dot(f32x16 a, f32x16 b, f32x16 sum) {
        return (f32x16)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512)a, (__m512bh)(__m512)b);
    }
};
#endif

// Words a[row][k] and b[k][column], with how many bytes rows and steps of a and steps of b lie apart. (Of distances in
// words GCC compiles a loop for the distance of one, too, and keeps sums in memory in both.)
struct Factors {
    const void *a;
    long a_row, a_step;
    const float *b;
    long b_step, depth;
};

// As many sums as registers hold: rows, and vectors of columns.
#if defined(__AVX512F__)
constexpr int SUM_ROWS = 12, SUM_VECTORS = 2;
#else
constexpr int SUM_ROWS = 6, SUM_VECTORS = 1;
#endif

template <typename W, int ROWS>
inline void some_chains(const Factors &by, bool fresh, float *sums, long sums_row) {
    f32x16 sum[ROWS][SUM_VECTORS];
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
        for (int i = 0; i < SUM_VECTORS; i++) sum[r][i] = fresh ? f32x16{} : load(sums + r * sums_row + i * LANES);
    const char *a = (const char *)by.a, *b = (const char *)by.b;
    for (long k = 0; k < by.depth; k++, a += by.a_step, b += by.b_step) {
        f32x16 columns[SUM_VECTORS];
#pragma GCC unroll 2
        for (int i = 0; i < SUM_VECTORS; i++) columns[i] = load((const float *)b + i * LANES);
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) {
            const f32x16 factor = splat_word(a + r * by.a_row);
#pragma GCC unroll 2
            for (int i = 0; i < SUM_VECTORS; i++) sum[r][i] = W::dot(factor, columns[i], sum[r][i]);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 2
        for (int i = 0; i < SUM_VECTORS; i++) store(sums + r * sums_row + i * LANES, sum[r][i]);
}

// sums[row][0..32) = (what is there, or 0 where they are fresh) + sum over k of a[row][k] * b[k][0..32).
template <typename W> void chains(long rows, const Factors &by, bool fresh, float *sums, long sums_row) {
    for (long row = 0; row < rows; row += SUM_ROWS)
        for (int column = 0; column < PANEL; column += SUM_VECTORS * LANES) {
            Factors some = by;
            some.a = (const char *)by.a + row * by.a_row;
            some.b = by.b + column;
            float *to = sums + row * sums_row + column;
            switch (rows - row) {
            case 1: some_chains<W, 1>(some, fresh, to, sums_row); break;
            case 2: some_chains<W, 2>(some, fresh, to, sums_row); break;
            case 3: some_chains<W, 3>(some, fresh, to, sums_row); break;
            case 4: some_chains<W, 4>(some, fresh, to, sums_row); break;
            case 5: some_chains<W, 5>(some, fresh, to, sums_row); break;
#if defined(__AVX512F__)
            case 6: some_chains<W, 6>(some, fresh, to, sums_row); break;
            case 7: some_chains<W, 7>(some, fresh, to, sums_row); break;
            case 8: some_chains<W, 8>(some, fresh, to, sums_row); break;
            case 9: some_chains<W, 9>(some, fresh, to, sums_row); break;
            case 10: some_chains<W, 10>(some, fresh, to, sums_row); break;
            case 11: some_chains<W, 11>(some, fresh, to, sums_row); break;
#endif
            default: some_chains<W, SUM_ROWS>(some, fresh, to, sums_row); break;
            }
        }
}
