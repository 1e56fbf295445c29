// Weights in the layouts of linear.h: what a call is. The work is in linear_pack_body.h, one file for each kind of processors.

#pragma once

#include <cmath>

#include "linear.h"

namespace {

struct PackCall {
    const void* weight;
    int64_t stride;  // elements from output to output
    int64_t inputs, outputs, group, form;
    uint8_t* to;
    bfloat16* scales;
    std::atomic<int64_t> next_panel;
};

}  // namespace

struct PackKernels {
    void (*pack_floats)(void*);  // a PackCall
    void (*pack_bfloats)(void*);
    bool (*only_upper_halves)(const float* from, int64_t count);
};

// Null where this compiler does not make them.
extern const PackKernels quire_pack_portable, quire_pack_avx2, quire_pack_avx512;
