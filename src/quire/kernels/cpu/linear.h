// Linear maps over packed weights: what a call is, and how the weights lie. quire/kernels/linear/cpu_linear.py has the same structure,
// quire/weights/panels.py the same layouts in PyTorch.
//
// A panel is 32 outputs. In it the weights lie input by input, so that a panel is read from its first to its last byte:
//
//   FLOAT32   [panels][I][32] float32
//   BFLOAT16  [panels][I / 2][32][2] bfloat16: pairs of inputs, which is what AVX512-BF16 multiplies
//   INT8      [panels][I / 4][2][64] bytes, sign and magnitude; a value is code * scale
//   INT4      [panels][I / 8][2][16] words of 32 bits; a value is (code - 8) * scale
//
// The 64 bytes of INT8 are four inputs of 16 outputs: input 2p + s of output o at byte 16 * ((2o + s) / 8) + 8p + (2o + s) % 8,
// which spreads to two vectors of bfloat16 pairs. A word of INT4 is eight inputs of one output: input 2p + s from bit 16s + 4p on.
// Scales: [panels][I / group][32] bfloat16.

#pragma once

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <type_traits>

#include "common.h"

namespace {

constexpr int PANEL = 32;
constexpr int MOST_RANGES = 32;
// What comes so many bytes later is fetched before it is needed.
constexpr int AHEAD = 4096;
enum Form { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, INT4 = 3 };

}  // namespace

extern "C" {

struct Linear {
    const void* weights;
    const bfloat16* scales;  // null without groups
    const float* bias;       // [outputs], or null
    Parallel parallel;
    int64_t inputs, outputs, group, form;
    int64_t is_bfloat16;  // x and y
    int64_t level;        // at most quire_linear_level()
};

struct LinearCall {
    const Linear* map;
    const void* x;
    void* y;
    int64_t rows, x_stride;
    int64_t tile_rows, parts;  // rows and parts of the panels that make an item
    int64_t items;
    // A thread takes the items of a range one after the other, which are neighbours in memory, and then those that are left of
    // other ranges. So it is right for any number of threads, also for fewer than were asked for.
    int64_t ranges;
    std::atomic<int64_t> taken[MOST_RANGES];
    int64_t done;
    std::atomic<int> failed;  // a thread had no memory
};

// What every thread of a parallel region runs over a call; ``thread``: which of them it is.
typedef void (*Multiply)(LinearCall* call, int64_t thread);

// Plan y = x W^T + bias; y is [rows, outputs].
Multiply quire_begin_linear(LinearCall* call, const Linear* map, void* y, const void* x, int64_t x_stride, int64_t rows, int64_t threads);

}

namespace {

// A thread's way through the items of a call.
struct Turn {
    LinearCall& call;
    int64_t range, left;
    Turn(LinearCall& of, int64_t thread) : call(of), range(thread % of.ranges), left(of.ranges) {}
    // The next item; -1 behind the last.
    int64_t next() {
        for (; left; left--, range = (range + 1) % call.ranges) {
            const int64_t first = call.items * range / call.ranges, end = call.items * (range + 1) / call.ranges;
            if (call.taken[range].load() < end - first) {
                const int64_t item = first + call.taken[range].fetch_add(1);
                if (item < end) return item;
            }
        }
        return -1;
    }
};

INLINE int64_t panel_bytes(const Linear& map) {
    const int64_t bytes[4] = {4 * PANEL, 2 * PANEL, PANEL, PANEL / 2};
    return map.inputs * bytes[map.form];
}

// A thread's memory for sums, widened rows and weights, kept for its next call.
struct Room {
    float* place = nullptr;
    int64_t size = 0;
    ~Room() { std::free(place); }
    float* of(int64_t floats) {
        if (size < floats) {
            std::free(place);
            place = (float*)std::aligned_alloc(64, (floats * sizeof(float) + 63) / 64 * 64);
            size = place ? floats : 0;
        }
        return place;
    }
};

}  // namespace
