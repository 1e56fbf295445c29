// What stands before and behind the blocks of a model: rows of tokens, the last norm, the map to logits.
//
// Letters: as in block.h.

#pragma once

#include "block.h"

namespace {

// Rows are rounded to T, also after their factor.
template <typename T, typename S>
struct Embed {
    Rows rows;
    S* out;
    const int64_t* tokens;
    const T* table;
    const Linear* map;  // without a table
    float scale;
};

template <typename T, typename S>
INLINE void run_row(const Embed<T, S>& work, int64_t row) {
    const int64_t width = work.map->inputs, token = work.tokens[row], start = token / PANEL * PANEL * width, column = token % PANEL;
    S* to = work.out + row * width;
    const auto place = [&](int64_t i, float value) {
        T rounded;
        put_one(&rounded, value);
        put_one(to + i, wide_one(&rounded));
    };
    if (work.table) {
        if constexpr (std::is_same<T, S>::value)
            copy(to, work.table + token * width, width);
        else
            for (int64_t i = 0; i < width; i++) put_one(to + i, wide_one(work.table + token * width + i));
    } else if (work.map->form == BLOCKS) {
        const uint8_t* panel = panel_place(*work.map, token / PANEL);
        const int64_t kind = block_part(*work.map, token / PANEL).kind;
        for (int64_t i = 0; i < width; i++) place(i, block_value(kind, panel, i, column));
    } else if (work.map->form == FLOAT32)
        for (int64_t i = 0; i < width; i++) place(i, ((const float*)work.map->weights)[start + i * PANEL + column]);
    else
        for (int64_t i = 0; i < width; i++)
            place(i, wide_one((const bfloat16*)work.map->weights + start + i / 2 * 2 * PANEL + 2 * column + i % 2));
    for (int64_t i = 0; work.scale != 1.f && i < width; i++) place(i, wide_one(to + i) * work.scale);
}

// Logits of a piece of a row that are looked at together.
constexpr int64_t LOOKED_AT = 4096;

// Logits in float32, scaled and capped, and the first maximum of each piece: NaN if one of them is no number.
template <typename T>
struct Logits {
    Rows rows;  // pieces
    float* out;
    const T* x;  // may be ``out``
    int64_t width, pieces;
    float* most;
    int32_t* place;
    float scale, cap;  // 0: no cap
};

template <typename T>
INLINE Lanes end_of(const Logits<T>& work, Lanes value) {
    value = value * work.scale;
    return work.cap != 0.f ? capped(value, work.cap) : value;
}

template <typename T>
INLINE void run_row(const Logits<T>& work, int64_t item) {
    const int64_t first = item % work.pieces * LOOKED_AT, count = work.width - first < LOOKED_AT ? work.width - first : LOOKED_AT;
    const T* x = work.x + item / work.pieces * work.width + first;
    float* out = work.out + item / work.pieces * work.width + first;
    Lanes most = Lanes{} - std::numeric_limits<float>::infinity();
    Ints at = {}, here = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    Bits none = {};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES, here += LANES) {
        const Lanes value = end_of(work, wide(x + i));
        put(out + i, value);
        none |= no_number(value);
        const Bits more = negative(most - value + 0.f);  // + 0: the zeros are equal
        most = chosen(more, value, most), at = chosen(more, here, at);
    }
    float best = -std::numeric_limits<float>::infinity();
    int32_t place = 0;
    uint32_t bad = 0;
    for (int j = 0; j < LANES; j++) {
        bad |= none[j];
        if (most[j] > best || (most[j] == best && at[j] < place)) best = most[j], place = at[j];
    }
    for (; i < count; i++) {
        out[i] = lane(end_of(work, wide_one(x + i) - Lanes{}), 0);
        bad |= out[i] != out[i];
        if (out[i] > best) best = out[i], place = (int32_t)i;
    }
    work.most[item] = bad ? std::numeric_limits<float>::quiet_NaN() : best;
    work.place[item] = (int32_t)first + place;
}

// What stands before and behind the blocks.
template <typename T, typename W, typename S>
struct Edges {
    Embed<T, S> embed;
    Norm<T, W, S> norm;
    LinearCall head;
    Multiply run;
    Logits<T> logits;

    static int64_t pieces(const Ends& ends) { return (ends.head->outputs + LOOKED_AT - 1) / LOOKED_AT; }

    static int64_t floats(const Ends& ends, int64_t rows) {
        const int64_t numbers = ends.head->inputs + (sizeof(T) < sizeof(float) ? ends.head->outputs : 0);
        return rows * 2 * pieces(ends) + rows * (ends.head->inputs * sizeof(S) + numbers * sizeof(T)) / sizeof(float) + 1;
    }

    Edges(const Ends& ends, float* room, float* out, const int64_t* tokens, int64_t rows, int64_t threads)
        : Edges(ends, room, (S*)(room + 2 * rows * pieces(ends)), ends.head->inputs, out, tokens, rows, threads) {}

    Edges(const Ends& ends, float* most, S* x, int64_t width, float* out, const int64_t* tokens, int64_t rows, int64_t threads)
        : Edges(ends, most, x, (T*)(x + rows * width), width, out, tokens, rows, threads) {}

    Edges(const Ends& ends, float* most, S* x, T* normed, int64_t width, float* out, const int64_t* tokens, int64_t rows, int64_t threads)
        : embed{{rows, piece_of(width)}, x, tokens, (const T*)ends.table, ends.rows, (float)ends.embedding_scale},
          norm{{rows, piece_of(width)}, normed, x, width, (const W*)ends.norm, width, (float)ends.eps},
          logits{{rows * pieces(ends), 1}, out, sizeof(T) < sizeof(float) ? normed + rows * width : (const T*)out, ends.head->outputs,
                 pieces(ends), most, (int32_t*)(most + rows * pieces(ends)), (float)ends.logit_scale, (float)ends.softcap} {
        run = quire_begin_linear(&head, ends.head, (void*)logits.x, norm.out, width, rows, threads);
    }

    void end(Worker& worker) {
        do_rows(norm, worker);
        worker.expect(nullptr);
        if (multiply(head, run, worker)) do_rows(logits, worker);
    }

    // Where the first maximum of each row is; -1 if it is not finite.
    void find(int64_t* first, int64_t rows) const {
        for (int64_t row = 0; row < rows; row++) {
            float best = -std::numeric_limits<float>::infinity();
            first[row] = -1;
            for (int64_t item = row * logits.pieces; item < (row + 1) * logits.pieces; item++)
                if (!(logits.most[item] <= best)) {
                    best = logits.most[item], first[row] = logits.place[item];
                    if (!std::isfinite(best)) {
                        first[row] = -1;
                        break;
                    }
                }
        }
    }
};

}  // namespace
