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
//
// BLOCKS keeps codes and scales of GGUF files. Maps that share a matrix may differ in kind: each is a part, of whole panels but for
// the last. A group is 32 inputs: its codes, its high bits, its scales. Kinds with a K have eight groups behind a head.
//
//   codes      [4][32] words of 32 bits: input 8j + i of an output from bit 4i of word j on; Q8_0 [32][32] bytes, two's complement
//   high bits  Q5_0, Q5_K: [32] words, input i at bit i; Q6_K: [2][32] words, input 16j + i from bit 2i of word j on
//   scales     [32] float16; Q4_K, Q5_K: [32] bytes of scales and [32] of minima; Q6_K: [2][32] signed bytes, of 16 inputs each
//   head       [32] float16, which the scales are multiples of; Q4_K, Q5_K: the same of the minima behind it

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
enum Form { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2, INT4 = 3, BLOCKS = 4 };
enum Kind { Q4_0 = 0, Q5_0 = 1, Q8_0 = 2, Q4_K = 3, Q5_K = 4, Q6_K = 5 };

}  // namespace

extern "C" {

// Panels of one kind.
struct BlockPart {
    int64_t first_panel, kind, start;  // start: byte of the first panel
};

struct Linear {
    const void* weights;
    const bfloat16* scales;  // null without groups
    const float* bias;       // [outputs], or null
    Parallel parallel;
    int64_t inputs, outputs, group, form;
    int64_t is_bfloat16;  // x and y
    int64_t level;        // at most quire_linear_level()
    const BlockPart* block_parts;
    int64_t num_block_parts;
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

// Not of BLOCKS.
INLINE int64_t panel_bytes(const Linear& map) {
    const int64_t bytes[4] = {4 * PANEL, 2 * PANEL, PANEL, PANEL / 2};
    return map.inputs * bytes[map.form];
}

// Bytes of a group's codes and high bits, of the group, and of the head before eight groups.
template <int KIND>
struct Layout {
    static constexpr bool HAS_HEAD = KIND >= Q4_K, HAS_MINIMA = KIND == Q4_K || KIND == Q5_K;
    static constexpr int64_t CODES = KIND == Q8_0 ? 1024 : 512, HIGH = KIND == Q5_0 || KIND == Q5_K ? 128 : KIND == Q6_K ? 256 : 0;
    static constexpr int64_t GROUP = CODES + HIGH + 64, HEAD = HAS_MINIMA ? 128 : HAS_HEAD ? 64 : 0;
    static __attribute__((always_inline)) const uint8_t* head(const uint8_t* panel, int64_t group) { return panel + group / 8 * (HEAD + 8 * GROUP); }
    static __attribute__((always_inline)) const uint8_t* group(const uint8_t* panel, int64_t group) {
        return HAS_HEAD ? head(panel, group) + HEAD + group % 8 * GROUP : panel + group * GROUP;
    }
};

constexpr int BLOCK_GROUP = 32;

template <int KIND>
INLINE int64_t block_panel_bytes(int64_t inputs) {
    return inputs / BLOCK_GROUP * Layout<KIND>::GROUP + inputs / (8 * BLOCK_GROUP) * Layout<KIND>::HEAD;
}

INLINE const BlockPart& block_part(const Linear& map, int64_t panel) {
    const BlockPart* part = map.block_parts + map.num_block_parts - 1;
    while (part->first_panel > panel) part--;
    return *part;
}

INLINE const uint8_t* panel_place(const Linear& map, int64_t panel) {
    if (map.form != BLOCKS) return (const uint8_t*)map.weights + panel * panel_bytes(map);
    const BlockPart& part = block_part(map, panel);
    const int64_t bytes[6] = {block_panel_bytes<Q4_0>(map.inputs), block_panel_bytes<Q5_0>(map.inputs), block_panel_bytes<Q8_0>(map.inputs),
                              block_panel_bytes<Q4_K>(map.inputs), block_panel_bytes<Q5_K>(map.inputs), block_panel_bytes<Q6_K>(map.inputs)};
    return (const uint8_t*)map.weights + part.start + (panel - part.first_panel) * bytes[part.kind];
}

INLINE float half_one(const uint8_t* from) {
    const uint32_t half = loaded<uint16_t>(from), size = (half & 0x7fff) << 13;
    const uint32_t usual = size + (112u << 23), raised = size + (113u << 23);
    const float found = size < 1u << 23 ? loaded<float>(&raised) - 0x1p-14f : loaded<float>(&usual);
    return half & 0x8000 ? -found : found;
}

template <int KIND>
INLINE float block_value_of(const uint8_t* panel, int64_t input, int64_t output) {
    using L = Layout<KIND>;
    const int64_t group = input / BLOCK_GROUP, i = input % BLOCK_GROUP;
    const uint8_t *codes = L::group(panel, group), *high = codes + L::CODES, *scales = high + L::HIGH, *head = L::head(panel, group);
    if (KIND == Q8_0) return (float)(int8_t)codes[i * PANEL + output] * half_one(scales + 2 * output);
    int code = loaded<uint32_t>(codes + 4 * (i / 8 * PANEL + output)) >> 4 * (i % 8) & 15;
    if (KIND == Q6_K)
        code += (loaded<uint32_t>(high + 4 * (i / 16 * PANEL + output)) >> 2 * (i % 16) & 3) * 16 - 32;
    else if (L::HIGH)
        code += (loaded<uint32_t>(high + 4 * output) >> i & 1) * 16;
    if (!L::HAS_HEAD) return (float)(code - (KIND == Q4_0 ? 8 : 16)) * half_one(scales + 2 * output);
    const float unit = half_one(head + 2 * output);
    if (!L::HAS_MINIMA) return (float)code * (unit * (float)(int8_t)scales[i / 16 * PANEL + output]);
    return (float)code * (unit * (float)scales[output]) - half_one(head + 2 * PANEL + 2 * output) * (float)scales[PANEL + output];
}

// A weight of BLOCKS in a panel.
INLINE float block_value(int64_t kind, const uint8_t* panel, int64_t input, int64_t output) {
    switch (kind) {
        case Q4_0: return block_value_of<Q4_0>(panel, input, output);
        case Q5_0: return block_value_of<Q5_0>(panel, input, output);
        case Q8_0: return block_value_of<Q8_0>(panel, input, output);
        case Q4_K: return block_value_of<Q4_K>(panel, input, output);
        case Q5_K: return block_value_of<Q5_K>(panel, input, output);
        default: return block_value_of<Q6_K>(panel, input, output);
    }
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
