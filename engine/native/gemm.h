// Products of rows with a packed weight: out[m, n] = sum over k of x[m, k] * w[n, k], rounded once. Of float32; and of
// bfloat16 where it is multiplied by pairs (vector.h), else tile_gemm.h does that.
//
// Each element of the result is one chain of multiply-adds over k from first to last, in a lane of its own. The chain
// is the same however many rows are computed together and whichever thread does it, so rows are exact by construction.
// With few rows the time is that of reading the weight once from memory, so it is packed in the order of reading:
// panels of 32 outputs; in a panel, k after k (for bf16: pairs of k), 32 outputs side by side.
#pragma once

#include <algorithm>

#include "buffer.h"
#include "threads.h"
#include "vector.h"

constexpr int PANEL = 2 * LANES;
constexpr int MOST_ROWS = 14;

// What is multiplied at once: one k in float32; two neighbours in bf16, which hardware adds up in one instruction.
template <typename T> struct Step;

template <> struct Step<float> {
    static constexpr int depth = 1;
    typedef f32x16 Packed;
    static inline Packed broadcast(const float *x) { return splat(*x); }
    static inline f32x16 dot(f32x16 acc, Packed x, const float *w) { return fma(x, load(w), acc); }
};

#if defined(PAIR_DOTS)
template <> struct Step<bf16> {
    static constexpr int depth = 2;
    typedef __m512bh Packed;
    static inline Packed broadcast(const bf16 *x) {
        int32_t pair;
        memcpy(&pair, x, 4);
        return (__m512bh)_mm512_set1_epi32(pair);
    }
    static inline f32x16 dot(f32x16 acc, Packed x, const bf16 *w) {
        return (f32x16)_mm512_dpbf16_ps((__m512)acc, x, (__m512bh)_mm512_loadu_si512(w));
    }
};
#endif

// ROWS rows against one panel. Row r, step k begins at x[r * row_stride + k * step_stride].
template <typename T, int ROWS>
inline void panel_product(const T *x, long row_stride, long step_stride, const T *w, long steps, const float *bias,
                          T *out, long out_stride, int width) {
    constexpr long wide = PANEL * Step<T>::depth;
    f32x16 low[ROWS], high[ROWS];
    for (int r = 0; r < ROWS; r++) low[r] = high[r] = f32x16{};
    for (long k = 0; k < steps; k++) {
        // About 4 KiB ahead: far enough to hide memory, and across the pages that the hardware stops at.
#pragma GCC unroll 14
        for (int r = 0; r < ROWS; r++) {
            auto factor = Step<T>::broadcast(x + r * row_stride + k * step_stride);
            low[r] = Step<T>::dot(low[r], factor, w + k * wide);
            high[r] = Step<T>::dot(high[r], factor, w + k * wide + wide / 2);
        }
    }
    for (int r = 0; r < ROWS; r++) {
        f32x16 left = low[r], right = high[r];
        if (bias) {
            left += load(bias);
            right += load(bias + LANES);
        }
        store_some(out + r * out_stride, left, std::min(width, LANES));
        if (width > LANES) store_some(out + r * out_stride + LANES, right, width - LANES);
    }
}

template <typename T>
inline void panel_rows(int rows, const T *x, long row_stride, long step_stride, const T *w, long steps,
                       const float *bias, T *out, long out_stride, int width) {
#define ROWS_CASE(n)                                                                                                  \
    case n: return panel_product<T, n>(x, row_stride, step_stride, w, steps, bias, out, out_stride, width);
    switch (rows) {
        ROWS_CASE(1) ROWS_CASE(2) ROWS_CASE(3) ROWS_CASE(4) ROWS_CASE(5) ROWS_CASE(6)
        ROWS_CASE(7) ROWS_CASE(8) ROWS_CASE(9) ROWS_CASE(10) ROWS_CASE(11) ROWS_CASE(12) ROWS_CASE(13) ROWS_CASE(14)
    }
#undef ROWS_CASE
}

// Elements of a packed weight [n, k].
template <typename T> long packed_elements(long n, long k) {
    constexpr long depth = Step<T>::depth;
    return (n + PANEL - 1) / PANEL * PANEL * ((k + depth - 1) / depth * depth);
}

template <typename T> void pack(const T *weight, T *packed, long n, long k) {
    constexpr long depth = Step<T>::depth;
    const long steps = (k + depth - 1) / depth, panels = (n + PANEL - 1) / PANEL;
    each(panels, 1, [&](long panel) {
        T *at = packed + panel * steps * PANEL * depth;
        for (long s = 0; s < steps; s++)
            for (long column = 0; column < PANEL; column++)
                for (long d = 0; d < depth; d++, at++) {
                    const long row = panel * PANEL + column, inner = s * depth + d;
                    *at = row < n && inner < k ? weight[row * k + inner] : T{};
                }
    });
}

// x [m, k] with rows x_stride apart; out [m, n] with rows out_stride apart. bias: whole panels of float32, or null.
template <typename T>
void product(const T *x, long x_stride, const T *packed, const float *bias, T *out, long out_stride, long m, long n,
             long k) {
    constexpr long depth = Step<T>::depth;
    const long steps = (k + depth - 1) / depth, panels = (n + PANEL - 1) / PANEL;
    const long blocks = (m + MOST_ROWS - 1) / MOST_ROWS;
    // A block's rows in the order of reading, where they are read many times or end in the middle of a step.
    const bool direct = blocks == 1 && k % depth == 0;
    static thread_local Buffer<T> kept;
    if (!direct) kept.resize(blocks * steps * MOST_ROWS * depth);
    T *rows = kept.data();
    const long block_size = steps * MOST_ROWS * depth;
    const long chunk = std::max(1L, std::min(panels / 16, 65536 / (steps * PANEL * depth * (long)sizeof(T)) + 1));
    if (!direct)
        each(m, MOST_ROWS, [&](long row) {
            const T *from = x + row * x_stride;
            T *to = rows + row / MOST_ROWS * block_size + row % MOST_ROWS * depth;
            for (long s = 0; s < k / depth; s++)
                memcpy((void *)(to + s * MOST_ROWS * depth), (const void *)(from + s * depth), depth * sizeof(T));
            if (k % depth) {
                to[(steps - 1) * MOST_ROWS * depth] = from[k - 1];
                to[(steps - 1) * MOST_ROWS * depth + 1] = T{};
            }
        });
    each(panels, chunk, [&](long panel) {
        const T *w = packed + panel * steps * PANEL * depth;
        const float *panel_bias = bias ? bias + panel * PANEL : nullptr;
        const int width = (int)std::min((long)PANEL, n - panel * PANEL);
        T *to = out + panel * PANEL;
        if (direct) {
            panel_rows<T>((int)m, x, x_stride, depth, w, steps, panel_bias, to, out_stride, width);
            return;
        }
        for (long block = 0; block < blocks; block++) {
            const int count = (int)std::min((long)MOST_ROWS, m - block * MOST_ROWS);
            panel_rows<T>(count, rows + block * block_size, depth, MOST_ROWS * depth, w, steps, panel_bias,
                          to + block * MOST_ROWS * out_stride, out_stride, width);
        }
    });
}
