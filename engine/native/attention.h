// Attention over paged keys and values, with an online softmax over blocks of absolute positions.
//
// A work item is one tile (neighbouring queries of one sequence) and one key-value head; its *rows* are the tile's
// queries times the query heads that share the head. The keys of a block are laid out with positions side by side and
// read by all rows, so pages are read once a tile and nothing is gathered in advance.
//
// A row's result depends on its own position alone. Its score with a key is one chain over the head's dimensions; its
// sum of values one chain over positions, block after block; what it shares with the other rows of its tile is data,
// never an order. A block that a row doesn't see adds zeros to a sum and scales it by one, which changes no bit.
// Positions after a tile's last query are not read.
//
// Quantised keys and values are codes with a scale an entry (engine/attention/kv_quantization.py). Codes are exact as
// float and as bf16, so they take the keys' and values' places; a key's scale multiplies its score, a value's scale its
// weight.
#pragma once

#include <algorithm>

#include "buffer.h"
#include "chains.h"
#include "threads.h"

constexpr int BLOCK = 64;
constexpr int ROW_GROUP = 12;
constexpr int TILE_ROWS = 96;
constexpr float HIDDEN = -1e30f;

// What a sequence brings to a step.
struct Sequence {
    const int32_t *pages;  // of the positions from first_page * page_tokens on
    long first_page, start, row, count;
};

struct AttentionShape {
    long heads, kv_heads, dim, page_tokens;
    long value_dim;  // values may be the first part of what keys are, in the same place
    long table_width;
    float scale, softcap;  // softcap 0: none
    long window;  // positions that a query sees, its own included; 0: all

    // The number of a position's entry among all keys (or values): pages, positions and heads follow each other.
    long entry(const Sequence &seq, long position, long kv_head) const {
        const uint32_t at = (uint32_t)position, size = (uint32_t)page_tokens;
        const long page = seq.pages[at / size - seq.first_page];
        return (page * page_tokens + at % size) * kv_heads + kv_head;
    }
};

enum Stored { AS_QUERIES, FLOAT8, INT8 };

// Keys and values of all pages. Scales [entries], of codes alone: else null.
struct Pages {
    const void *keys, *values;
    const bf16 *key_scales, *value_scales;
    int32_t stored;
};

struct Tile {
    int sequence;
    long first, count;  // queries, counted from the sequence's first of this step
};

// Words of queries and keys, as scores are computed from them: some elements from p on, and zeros.
template <typename T> struct WordsOf {
    template <typename S> static f32x16 take(const S *p, int count) { return load_some(p, count); }
};

#if defined(PAIRED_SCORES)
template <> struct WordsOf<bf16> {
    static f32x16 take(const bf16 *p, int count) {
        f32x16 out = {};
        if (count >= 2 * LANES) return load((const float *)p);
        if (count > 0) memcpy(&out, p, count * sizeof(bf16));
        return out;
    }
    template <typename S> static f32x16 take(const S *p, int count) {
        bf16 both[2 * LANES];
        store(both, load_some(p, count));
        store(both + LANES, load_some(p + LANES, count - LANES));
        return load((const float *)both);
    }
};
#endif

template <int H> inline void exchange_all(f32x16 *rows) {
    for (int i = 0; i < LANES; i++)
        if (!(i & H)) exchange<H>(rows[i], rows[i + H]);
}

inline void transpose(f32x16 *rows) {
    exchange_all<8>(rows);
    exchange_all<4>(rows);
    exchange_all<2>(rows);
    exchange_all<1>(rows);
}

// One thread's room. Words: floats that hold `pack` elements.
struct Room {
    Buffer<float> queries, keys, values, scores, sums;
    Buffer<float> highest, total;
    float key_scales[BLOCK], value_scales[BLOCK];

    void size(long rows, long words, long wide) {
        rows = std::max(rows, (long)TILE_ROWS);
        queries.resize(rows * words);
        keys.resize(words * BLOCK);
        values.resize(BLOCK * wide);
        scores.resize(rows * BLOCK);
        sums.resize(rows * wide);
        highest.resize(rows);
        total.resize(rows);
    }
};

// Keys of a block, stored as S, as [words][BLOCK], values as [BLOCK][wide] floats; zeros before `skipped` and from
// position `end` on.
template <typename T, typename S>
void take_block(const AttentionShape &a, const Sequence &seq, const Pages &pages, long kv_head, long begin,
                long skipped, long end, long words, long wide, Room &room) {
    const S *k_pages = (const S *)pages.keys, *v_pages = (const S *)pages.values;
    const long filled = std::min((long)BLOCK, end - begin);
    constexpr int pack = Words<T>::pack;
    const S *rows[BLOCK];
    long offsets[BLOCK];
    for (long n = skipped; n < filled; n++) {
        const long entry = a.entry(seq, begin + n, kv_head);
        offsets[n] = entry * a.dim;
        rows[n] = k_pages + offsets[n];
        if (!pages.key_scales) continue;
        room.key_scales[n] = value_of(pages.key_scales[entry]);
        room.value_scales[n] = value_of(pages.value_scales[entry]);
    }
    for (long n = 0; n < BLOCK; n++)
        if (n < skipped || n >= filled) room.key_scales[n] = room.value_scales[n] = 0.0f;
    // A head's rows lie far apart, which no hardware foresees.
    for (long at = begin + BLOCK; at < std::min(begin + 2 * BLOCK, end); at++) {
        const long next = a.entry(seq, at, kv_head) * a.dim;
        for (long d = 0; d < a.dim; d += 64 / sizeof(S)) __builtin_prefetch(k_pages + next + d, 0, 2);
        if (v_pages == k_pages) continue;
        for (long d = 0; d < a.value_dim; d += 64 / sizeof(S)) __builtin_prefetch(v_pages + next + d, 0, 2);
    }
    for (long group = 0; group < filled; group += LANES)
        for (long word = 0; word < words; word += LANES) {
            f32x16 square[LANES];
            for (int n = 0; n < LANES; n++)
                square[n] = group + n >= skipped && group + n < filled
                                ? WordsOf<T>::take(rows[group + n] + word * pack, (int)(a.dim - word * pack))
                                : f32x16{};
            transpose(square);
            for (int i = 0; i < LANES; i++) store(room.keys.data() + (word + i) * BLOCK + group, square[i]);
        }
    for (long n = 0; n < filled; n++)
        for (long d = 0; d < wide; d += LANES) {
            f32x16 value = {};
            if (n >= skipped && n < filled) value = load_some(v_pages + offsets[n] + d, (int)(a.value_dim - d));
            store(room.values.data() + n * wide + d, value);
        }
}

// Scores to weights, in place; the row's maximum, total and sums brought along. Sees [from, to) of the block. Scales of
// the block's keys and values, or null.
inline void soften(const AttentionShape &a, float *s, const float *key_scales, const float *value_scales, long from,
                   long to, float &highest, float &total, float *sums, long wide) {
    f32x16 value[BLOCK / LANES], top = splat(HIDDEN);
#define SAME(i) i
    const i32x16 lane = EACH_LANE(SAME);
#undef SAME
    for (int c = 0; c < BLOCK / LANES; c++) {
        value[c] = load(s + c * LANES) * a.scale;
        if (key_scales) value[c] *= load(key_scales + c * LANES);
        if (a.softcap != 0.0f) {
            // tanh(x) = 1 - 2 / (exp(2x) + 1)
            f32x16 grown = exp_of(value[c] * (2.0f / a.softcap));
            value[c] = (1.0f - 2.0f / (grown + 1.0f)) * a.softcap;
        }
        const i32x16 at = lane + c * LANES;
        value[c] = chosen_by((at >= (int)from) & (at < (int)to), value[c], splat(HIDDEN));
        top = larger(value[c], top);
    }
    const float now = std::max(highest, max_of(top));
    f32x16 added = {};
    for (int c = 0; c < BLOCK / LANES; c++) {
        const i32x16 at = lane + c * LANES;
        f32x16 weight = exp_of(value[c] - now);
        weight = chosen_by((at >= (int)from) & (at < (int)to), weight, f32x16{});
        added += weight;
        store(s + c * LANES, value_scales ? weight * load(value_scales + c * LANES) : weight);
    }
    if (now != highest) {
        const float kept = exp_of(splat(highest - now))[0];
        total *= kept;
        for (long d = 0; d < wide; d += LANES) store(sums + d, load(sums + d) * kept);
        highest = now;
    }
    total += sum_of(added);
}

template <typename T>
void attend_tile(const AttentionShape &a, const Sequence &seq, const Tile &tile, long kv_head, const T *q,
                 const Pages &pages, const float *sinks, T *out) {
    constexpr int pack = Words<T>::pack;
    const long wide = (a.value_dim + PANEL - 1) / PANEL * PANEL;
    const long words = ((a.dim + pack - 1) / pack + LANES - 1) / LANES * LANES;
    const long group = a.heads / a.kv_heads, count = tile.count * group;
    static thread_local Room room;
    room.size(count, words, wide);
    const auto take = pages.stored == FLOAT8 ? take_block<T, float8>
                      : pages.stored == INT8 ? take_block<T, int8>
                                             : take_block<T, T>;
    const float *key_scales = pages.key_scales ? room.key_scales : nullptr;
    const float *value_scales = pages.key_scales ? room.value_scales : nullptr;
    const auto head = [&](long r) {
        return (seq.row + tile.first + r / group) * a.heads + kv_head * group + r % group;
    };
    for (long r = 0; r < count; r++) {
        for (long word = 0; word < words; word += LANES)
            store(room.queries.data() + r * words + word,
                  WordsOf<T>::take(q + head(r) * a.dim + word * pack, (int)(a.dim - word * pack)));
        for (long d = 0; d < wide; d += LANES) store(room.sums.data() + r * wide + d, f32x16{});
        room.highest[r] = sinks ? sinks[kv_head * group + r % group] : HIDDEN;
        room.total[r] = sinks ? 1.0f : 0.0f;
    }
    const long first = seq.start + tile.first, end = first + tile.count;
    const long lowest = a.window ? std::max(0L, first + 1 - a.window) : 0;
    for (long begin = lowest / BLOCK * BLOCK; begin < end; begin += BLOCK) {
        // Before the window nothing may be in the table any more.
        const long skipped = std::max(0L, lowest - begin);
        take(a, seq, pages, kv_head, begin, skipped, end, words, wide, room);
        const long filled = std::min((long)BLOCK, end - begin);
        for (long r = 0; r < count; r += ROW_GROUP) {
            const long rows = std::min((long)ROW_GROUP, count - r);
            if (begin > first + (r + rows - 1) / group) continue;  // None of them sees any of it.
            float *s = room.scores.data() + r * BLOCK;
            for (long n = 0; n < filled; n += PANEL)
                chains<Words<T>>(rows, {room.queries.data() + r * words, words * WORD, WORD, room.keys.data() + n,
                                        BLOCK * WORD, words}, true, s + n, BLOCK);
            for (long i = r; i < r + rows; i++) {
                const long position = first + i / group;
                const long from = a.window ? std::max(0L, position + 1 - a.window - begin) : 0;
                const long to = std::min((long)BLOCK, position + 1 - begin);
                soften(a, room.scores.data() + i * BLOCK, key_scales, value_scales, from, to, room.highest[i],
                       room.total[i], room.sums.data() + i * wide, wide);
            }
            for (long d = 0; d < wide; d += PANEL)
                chains<Words<float>>(rows, {s, BLOCK * WORD, WORD, room.values.data() + d, wide * WORD, filled}, false,
                                     room.sums.data() + r * wide + d, wide);
        }
    }
    for (long r = 0; r < count; r++)
        for (long d = 0; d < a.value_dim; d += LANES) {
            const int some = (int)(a.value_dim - d);
            store_some(out + head(r) * a.value_dim + d, load(room.sums.data() + r * wide + d) / room.total[r], some);
        }
}

// q [T, heads, dim], out [T, heads, value_dim]; sequence b has queries offsets[b] to offsets[b + 1], the first at
// position starts[b].
template <typename T>
void attend(const AttentionShape &a, long sequences, const T *q, const Pages &pages, const int32_t *tables,
            const int32_t *first_pages, const int32_t *starts, const int32_t *offsets, const float *sinks, T *out) {
    const long most = std::max(1L, TILE_ROWS / (a.heads / a.kv_heads));
    Buffer<Sequence> all(sequences);
    long count_of_tiles = 0;
    for (long b = 0; b < sequences; b++) count_of_tiles += (offsets[b + 1] - offsets[b] + most - 1) / most;
    Buffer<Tile> tiles(count_of_tiles);
    Tile *last = tiles.data();
    for (long b = 0; b < sequences; b++) {
        const long count = offsets[b + 1] - offsets[b];
        all[b] = {tables + b * a.table_width, first_pages ? first_pages[b] : 0, starts[b], offsets[b], count};
        for (long at = 0; at < count; at += most) *last++ = {(int)b, at, std::min(most, count - at)};
    }
    // Long work first, so that threads end together.
    std::sort(tiles.data(), last, [&](const Tile &x, const Tile &y) {
        return all[x.sequence].start + x.first + x.count > all[y.sequence].start + y.first + y.count;
    });
    const long items = count_of_tiles * a.kv_heads;
    each(items, 1, [&](long item) {
        const Tile &tile = tiles[item / a.kv_heads];
        attend_tile(a, all[tile.sequence], tile, item % a.kv_heads, q, pages, sinks, out);
    });
}
