// Weights in the layouts of linear.h, from rows of float32 or bfloat16.
#include <cmath>

#include "linear.h"

namespace {

struct PackCall {
    const void* weight;
    int64_t is_bfloat16, stride;  // elements from output to output
    int64_t inputs, outputs, group, form;
    uint8_t* to;
    bfloat16* scales;
    std::atomic<int64_t> next_panel;
};

INLINE bfloat16 nearest(float value) {
    bfloat16 found;
    put_one(&found, value);
    return found;
}

INLINE int64_t byte_of(int output, int input) {
    const int word = 2 * output + input % 2;
    return 16 * (word / 8) + 8 * (input / 2) + word % 8;
}

INLINE float code_of(float value, float scale, float least, float most) {
    const float code = scale == 0 ? 0 : std::nearbyint(value / scale);
    return code < least ? least : code > most ? most : code;
}

INLINE float error_of(const float* values, int64_t count, float scale) {
    float sum = 0;
    for (int64_t i = 0; i < count; i++) {
        const float rest = values[i] - scale * code_of(values[i], scale, -8, 7);
        sum += rest * rest;
    }
    return sum;
}

// INT8: the largest value is code 127. INT4: the largest value is code -8, or the scale is smaller, whichever is nearest to all.
INLINE float scale_of(const float* values, int64_t count, int64_t form) {
    float largest = 0;
    for (int64_t i = 0; i < count; i++)
        if (std::fabs(values[i]) > std::fabs(largest)) largest = values[i];
    const bfloat16 plain = nearest(form == INT8 ? std::fabs(largest) / 127 : largest / -8);
    float best = wide_one(&plain);
    if (form == INT8 || best == 0) return best;
    float least = error_of(values, count, best);
    for (int percent = 95; percent >= 75; percent -= 5) {
        const bfloat16 other = nearest(largest / -8 * percent / 100);
        const float error = error_of(values, count, wide_one(&other));
        if (error < least) least = error, best = wide_one(&other);
    }
    return best;
}

template <typename T>
INLINE void pack_panel(const PackCall& call, int64_t panel) {
    const T* weight = (const T*)call.weight;
    const int64_t first = panel * PANEL, outputs = call.outputs - first < PANEL ? call.outputs - first : PANEL;
    const int64_t bytes[4] = {4 * PANEL, 2 * PANEL, PANEL, PANEL / 2};
    uint8_t* to = call.to + panel * call.inputs * bytes[call.form];
    std::memset(to, 0, call.inputs * bytes[call.form]);
    for (int64_t o = 0; o < PANEL; o++) {
        const T* row = weight + (first + (o < outputs ? o : 0)) * call.stride;
        if (call.form == FLOAT32) {
            if (o < outputs)
                for (int64_t k = 0; k < call.inputs; k++) ((float*)to)[k * PANEL + o] = wide_one(row + k);
        } else if (call.form == BFLOAT16) {
            if (o < outputs)
                for (int64_t k = 0; k < call.inputs; k++) ((bfloat16*)to)[(k / 2 * PANEL + o) * 2 + k % 2] = nearest(wide_one(row + k));
        } else {
            const int step = call.form == INT8 ? 4 : 8;
            float values[1024];
            for (int64_t k = 0; k < call.inputs; k += call.group) {
                for (int64_t i = 0; i < call.group; i++) values[i] = o < outputs ? wide_one(row + k + i) : 0;
                const float scale = scale_of(values, call.group, call.form);
                call.scales[(panel * (call.inputs / call.group) + k / call.group) * PANEL + o] = nearest(scale);
                for (int64_t i = 0; i < call.group; i++) {
                    uint8_t* place = to + (k + i) / step * (2 * 64) + o / LANES * 64 + byte_of((int)(o % LANES), (int)(i % 4));
                    if (call.form == INT8) {
                        const int code = (int)code_of(values[i], scale, -127, 127);
                        *place = (uint8_t)(code < 0 ? 128 - code : code);
                    } else {
                        const int code = (int)code_of(values[i], scale, -8, 7) + 8;
                        *place |= (uint8_t)(i % 8 < 4 ? code : code << 4);
                    }
                }
            }
        }
    }
}

void pack(void* data) {
    PackCall& call = *(PackCall*)data;
    const int64_t panels = (call.outputs + PANEL - 1) / PANEL;
    for (int64_t panel; (panel = call.next_panel.fetch_add(1)) < panels;)
        call.is_bfloat16 ? pack_panel<bfloat16>(call, panel) : pack_panel<float>(call, panel);
}

}  // namespace

// ``group``: a multiple of 8 that divides the inputs, up to 128; of the other forms 0.
extern "C" void quire_pack_linear(const void* weight, int64_t is_bfloat16, int64_t stride, int64_t outputs, int64_t inputs, int64_t form, int64_t group,
                                  void* to, bfloat16* scales, int64_t threads, Parallel parallel) {
    PackCall call = {weight, is_bfloat16, stride, inputs, outputs, group, form, (uint8_t*)to, scales, {0}};
    run_on(threads, pack, &call, parallel);
}
