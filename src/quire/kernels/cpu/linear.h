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
// BLOCKS keeps codes and scales of files: GGUF's, and 8-bit floats (F8_E4M3). Maps that share a matrix may differ in kind: each is a
// part, of whole panels but for the last. A group is 32 inputs: its codes, the high bits of these, its scales. BLOCK_SHAPES has their
// sizes. Kinds with units have eight groups behind a head. NVFP4 has one head at the beginning of a panel.
//
//   codes      words of 32 bits, [4][32] of 4 bits or [2][32] of 2 bits; [32][32] bytes, input by input: of Q8_0 in two's complement,
//              of F8_E4M3 the floats themselves
//   high bits  words, [32] of one bit or [2][32] of two
//              Words j of B bits have inputs 32j / B on: input 2p + s of them from bit 16s + Bp on.
//   scales     [32] float16, of kinds with minima [2][32], the second added; MXFP4 [32] bytes, of 2^(byte - 128); F8_E4M3
//              [32] float32; NVFP4 [2][32] floats of 8 bits, of 16 inputs each. With units: Q4_K, Q5_K [32] bytes of scales and [32]
//              of minima; IQ4_XS [32] signed bytes; Q3_K, Q6_K [2][32] of them, of 16 inputs each; Q2_K [2][32] bytes of both, the
//              minimum in the upper half
//   head       [32] float16, which the scales are multiples of; of kinds with minima the same of these, which are subtracted, behind it;
//              of NVFP4 [2][32] float32 of 20 bits: a scale's products with both are exact, and their sum is the scale

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
// In the order of KINDS in quire/weights/block_panels.py.
enum Kind { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4, NVFP4, F8_E4M3 };

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
    int64_t rows, x_stride, y_stride;
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

// Plan y = x W^T + bias; y is [rows, outputs], one row behind the other unless ``y_stride`` is set before the call runs.
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

constexpr int BLOCK_GROUP = 32;

// How a kind of blocks lies in a panel, and what its codes stand for.
struct BlockShape {
    int low, high;     // bits of a code in words, and above
    int scale, units;  // bytes of a group's scales for an output; float16 numbers of a head for an output
    bool has_minima, is_halved;  // is_halved: a scale is of 16 inputs
    int offset;                  // is subtracted from a code
    int row = 0;                 // bytes of a head of all inputs for an output
    // Bytes of a number among a group's scales.
    constexpr int scale_bytes() const { return units || row || scale == 1 ? 1 : scale == 4 && !has_minima ? 4 : 2; }
    constexpr int64_t codes_size() const { return PANEL * BLOCK_GROUP / 8 * low; }
    constexpr int64_t high_size() const { return PANEL * BLOCK_GROUP / 8 * high; }
    constexpr int64_t group_size() const { return codes_size() + high_size() + PANEL * scale; }
    constexpr int64_t head_size() const { return 2 * PANEL * units; }
    constexpr int64_t head(int64_t group) const { return units ? group / 8 * (head_size() + 8 * group_size()) : 0; }
    constexpr int64_t group(int64_t group) const { return PANEL * row + group * group_size() + (units ? (group / 8 + 1) * head_size() : 0); }
    constexpr int64_t panel_size(int64_t inputs) const {
        return PANEL * row + inputs / BLOCK_GROUP * group_size() + inputs / (8 * BLOCK_GROUP) * head_size();
    }
};

constexpr BlockShape BLOCK_SHAPES[] = {
    {4, 0, 2, 0, false, false, 8},   // Q4_0
    {4, 0, 4, 0, true, false, 0},    // Q4_1
    {4, 1, 2, 0, false, false, 16},  // Q5_0
    {4, 1, 4, 0, true, false, 0},    // Q5_1
    {8, 0, 2, 0, false, false, 0},   // Q8_0
    {2, 0, 2, 2, true, true, 0},     // Q2_K
    {2, 1, 2, 1, false, true, 4},    // Q3_K
    {4, 0, 2, 2, true, false, 0},    // Q4_K
    {4, 1, 2, 2, true, false, 0},    // Q5_K
    {4, 2, 2, 1, false, true, 32},   // Q6_K
    {4, 0, 2, 0, false, false, 0},   // IQ4_NL
    {4, 0, 1, 1, false, false, 0},   // IQ4_XS
    {4, 0, 1, 0, false, false, 0},   // MXFP4
    {4, 0, 2, 0, false, true, 0, 8},  // NVFP4
    {8, 0, 4, 0, false, false, 0},   // F8_E4M3
};
// A float of 8 bits is read as a float16 of the same bits, which is so many times smaller; scales are as much larger.
constexpr float F8_FACTOR = 256;

constexpr float IQ4_NUMBERS[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr float FP4_NUMBERS[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// What a code stands for, before its scale.
constexpr float block_number(int64_t kind, int code) {
    if (kind == IQ4_NL || kind == IQ4_XS) return IQ4_NUMBERS[code];
    return kind == MXFP4 || kind == NVFP4 ? FP4_NUMBERS[code] : (float)(code - BLOCK_SHAPES[kind].offset);
}

INLINE const BlockPart& block_part(const Linear& map, int64_t panel) {
    const BlockPart* part = map.block_parts + map.num_block_parts - 1;
    while (part->first_panel > panel) part--;
    return *part;
}

INLINE const uint8_t* panel_place(const Linear& map, int64_t panel) {
    if (map.form != BLOCKS) return (const uint8_t*)map.weights + panel * panel_bytes(map);
    const BlockPart& part = block_part(map, panel);
    return (const uint8_t*)map.weights + part.start + (panel - part.first_panel) * BLOCK_SHAPES[part.kind].panel_size(map.inputs);
}

INLINE float half_one(const uint8_t* from) {
    const uint32_t half = loaded<uint16_t>(from), size = (half & 0x7fff) << 13;
    const uint32_t usual = size + (112u << 23), raised = size + (113u << 23);
    const float found = size < 1u << 23 ? loaded<float>(&raised) - 0x1p-14f : loaded<float>(&usual);
    return half & 0x8000 ? -found : found;
}

// A float of 8 bits, divided by F8_FACTOR.
INLINE float float8_one(uint8_t byte) {
    const uint16_t half = (uint16_t)((byte & 0x80) << 8 | (byte & 0x7f) << 7);
    return half_one((const uint8_t*)&half);
}

// 2^(byte - 128)
INLINE float power_one(uint32_t byte) {
    const uint32_t bits = byte < 2 ? 0x200000u << byte : (byte - 1) << 23;
    return loaded<float>(&bits);
}

// A weight of BLOCKS in a panel.
INLINE float block_value(int64_t kind, const uint8_t* panel, int64_t input, int64_t output) {
    const BlockShape& shape = BLOCK_SHAPES[kind];
    const int64_t group = input / BLOCK_GROUP, i = input % BLOCK_GROUP;
    const uint8_t *codes = panel + shape.group(group), *high = codes + shape.codes_size(), *scales = high + shape.high_size();
    const uint8_t* head = panel + shape.head(group) + 2 * output;
    const auto bits = [&](const uint8_t* words, int width) {
        const int64_t each = 32 / width;
        return (int)(loaded<uint32_t>(words + 4 * (i / each * PANEL + output)) >> (i % 2 * 16 + i % each / 2 * width) & ((1u << width) - 1));
    };
    float value;
    if (kind == F8_E4M3) return float8_one(codes[i * PANEL + output]) * (loaded<float>(scales + 4 * output) * F8_FACTOR);
    if (kind == Q8_0)
        value = (float)(int8_t)codes[i * PANEL + output];
    else
        value = block_number(kind, bits(codes, shape.low) | (shape.high ? bits(high, shape.high) << shape.low : 0));
    if (kind == MXFP4) return value * power_one(scales[output]);
    if (kind == NVFP4) {
        const float scale = float8_one(scales[i / 16 * PANEL + output]) * F8_FACTOR;
        return value * (scale * loaded<float>(panel + 4 * output) + scale * loaded<float>(panel + 4 * (PANEL + output)));
    }
    if (!shape.units) {
        value *= half_one(scales + 2 * output);
        return shape.has_minima ? value + half_one(scales + 2 * PANEL + 2 * output) : value;
    }
    const uint8_t scale = scales[(shape.is_halved ? i / 16 * PANEL : 0) + output];
    const float unit = half_one(head), minima = shape.has_minima ? half_one(head + 2 * PANEL) : 0;
    if (!shape.has_minima) return value * (unit * (float)(int8_t)scale);
    if (kind == Q2_K) return value * (unit * (float)(scale & 15)) - minima * (float)(scale >> 4);
    return value * (unit * (float)scale) - minima * (float)scales[PANEL + output];
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
