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
#include "chains.h"
#include "threads.h"

constexpr int MOST_ROWS = 12;

// The sums of one row and a panel, with a bias (32 floats) or none.
template <typename T> inline void put_row(const float *sums, long n, long panel, const float *bias, T *out) {
    const int width = (int)std::min((long)PANEL, n - panel * PANEL);
    f32x16 left = load(sums), right = load(sums + LANES);
    if (bias) {
        left += load(bias + panel * PANEL);
        right += load(bias + panel * PANEL + LANES);
    }
    store_some(out + panel * PANEL, left, std::min(width, LANES));
    if (width > LANES) store_some(out + panel * PANEL + LANES, right, width - LANES);
}

// Elements of a packed weight [n, k].
template <typename T> long packed_elements(long n, long k) {
    constexpr long depth = Words<T>::pack;
    return (n + PANEL - 1) / PANEL * PANEL * ((k + depth - 1) / depth * depth);
}

template <typename T> void pack(const T *weight, T *packed, long n, long k) {
    constexpr long depth = Words<T>::pack;
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
    constexpr long depth = Words<T>::pack;
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
        const float *w = (const float *)packed + panel * steps * PANEL;
        float sums[MOST_ROWS * PANEL];
        for (long first = 0; first < m; first += MOST_ROWS) {
            const long count = std::min((long)MOST_ROWS, m - first);
            const T *some = direct ? x : rows + first / MOST_ROWS * block_size;
            const long apart = direct ? x_stride * (long)sizeof(T) : WORD, step = direct ? WORD : MOST_ROWS * WORD;
            chains<Words<T>>(count, {some, apart, step, w, PANEL * WORD, steps}, true, sums, PANEL);
            for (long row = 0; row < count; row++)
                put_row(sums + row * PANEL, n, panel, bias, out + (first + row) * out_stride);
        }
    });
}
