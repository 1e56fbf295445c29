// Work on rows between the products: root mean square norms, gates, rotation with the write of K and V.
//
// The reference is quire/ops/rows.py; quire/kernels/rows/cpu_rows.py calls this through ctypes. A row is worked on by one thread, in one
// order, whatever other rows there are: its result depends on that row only, to the bit. All is computed in float32, rounded once.
//
// Letters: E, F widths of a row; D head size; R rotary columns.

#pragma once

#include <cmath>

#include "common.h"

// The level that runs: 0 any processor, 1 AVX2, 2 AVX-512. In rows.cpp.
extern "C" int quire_rows_now;

// The function between two products of a feed-forward layer. Kinds: 0 silu, 1 gelu, 2 gelu_tanh of gate times up, 3 clamped, 4 squared.
struct GateForm {
    int64_t kind;
    double alpha, limit;  // of 3
};

namespace {

// Of no numbers the places may be null, which memcpy must not be given.
template <typename T>
INLINE void copy(T* to, const T* from, int64_t count) {
    if (count > 0) std::memcpy(to, from, sizeof(T) * count);
}

// -- functions ---------------------------------------------------------------------------------------------------------

// e^x: powers of two times a polynomial of degree 7. Off by 2 units in the last place at most; 0 and infinity beyond the range.
INLINE Lanes exp_of(Lanes given) {
    const Lanes most = Lanes{} + 89.f, least = Lanes{} - 104.f;
    Lanes x = chosen(negative(most - given), most, given);
    x = chosen(negative(x - least), least, x);
    Lanes n = (x * 1.44269504f + 12582912.f) - 12582912.f;
    Lanes r = x - n * 0.693145751953125f;
    r = r - n * 1.42860682e-6f;
    Lanes p = r * (1.f / 5040) + 1.f / 720;
    p = p * r + 1.f / 120;
    p = p * r + 1.f / 24;
    p = p * r + 1.f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.f;
    p = p * r + 1.f;
    // Two factors, since one cannot be 2^128 or a denormal number.
    Ints power = converted<Ints>(n), half = power >> 1;
    p = p * (Lanes)((half + 127) << 23) * (Lanes)((power - half + 127) << 23);
    return chosen(no_number(given), given, p);
}

struct Silu {};
struct Gelu {};
struct GeluTanh {};

INLINE Lanes activated(Silu, Lanes x) { return x / (1.f + exp_of(-x)); }

// x times the logistic function of a gate.
INLINE Lanes times_logistic(Lanes x, Lanes gate) { return x / (1.f + exp_of(-gate)); }

// x times the logistic function of 2 sqrt(2 / pi) (x + 0.044715 x^3), which is (1 + tanh) / 2 without its cancellation.
INLINE Lanes activated(GeluTanh, Lanes x) { return x / (1.f + exp_of(x * (-1.59576912f - 0.0713548163f * (x * x)))); }

// x times the normal distribution function. erfc is a fit of relative error 1.2e-7 (Press et al., Numerical Recipes, 6.2).
INLINE Lanes activated(Gelu, Lanes x) {
    Lanes a = (Lanes)((Bits)x & 0x7fffffffu) * 0.707106781f;
    Lanes t = 1.f / (1.f + 0.5f * a);
    Lanes p = 0.17087277f * t - 0.82215223f;
    p = p * t + 1.48851587f;
    p = p * t - 1.13520398f;
    p = p * t + 0.27886807f;
    p = p * t - 0.18628806f;
    p = p * t + 0.09678418f;
    p = p * t + 0.37409196f;
    p = p * t + 1.00002368f;
    p = p * t - 1.26551223f;
    Lanes tail = 0.5f * t * exp_of(p - a * a);
    return x * chosen(negative(x), tail, 1.f - tail);
}

// The hyperbolic tangent: an odd polynomial of degree 11 below 0.625 (Cephes), beyond that by e^2x. Off by 3 units in the last place.
INLINE Lanes tanh_of(Lanes x) {
    const Bits sign = (Bits)x & 0x80000000u;
    const Lanes size = (Lanes)((Bits)x & 0x7fffffffu), square = size * size;
    Lanes p = square * -5.70498872745e-3f + 2.06390887954e-2f;
    p = p * square - 5.37397155531e-2f;
    p = p * square + 1.33314422036e-1f;
    p = p * square - 3.33332819422e-1f;
    const Lanes small = p * square * size + size, large = 1.f - 2.f / (exp_of(size + size) + 1.f);
    return (Lanes)((Bits)chosen(negative(size - 0.625f), small, large) | sign);
}

template <typename T>
INLINE float squares(const T* x, int64_t count) {
    Lanes sums[4] = {};
    int64_t i = 0;
    for (; i + 4 * LANES <= count; i += 4 * LANES)
        for (int j = 0; j < 4; j++) {
            Lanes value = wide(x + i + j * LANES);
            sums[j] += value * value;
        }
    for (; i + LANES <= count; i += LANES) {
        Lanes value = wide(x + i);
        sums[0] += value * value;
    }
    float sum = total((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; i < count; i++) sum += wide_one(x + i) * wide_one(x + i);
    return sum;
}

template <typename T>
INLINE float norm_scale(const T* x, int64_t count, float eps) {
    return 1.f / std::sqrt(squares(x, count) / (float)count + eps);
}

// -- the work on one row -----------------------------------------------------------------------------------------------

struct Rows {
    const int64_t count, piece;  // how many; how many a thread takes at a time
    std::atomic<int64_t> next{0};
    int64_t done = 0;
};

// Numbers times a factor, rounded.
template <typename T>
INLINE void multiply_row(T* x, float factor, int64_t width) {
    if (factor == 1.f) return;
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) put(x + i, wide(x + i) * factor);
    for (; i < width; i++) put_one(x + i, wide_one(x + i) * factor);
}

// Each number of a row times its column's factor, in place.
template <typename T>
struct Columns {
    Rows rows;
    T* x;
    const T* factors;
    int64_t width;
};

template <typename T>
INLINE void run_row(const Columns<T>& work, int64_t row) {
    T* x = work.x + row * work.width;
    int64_t i = 0;
    for (; i + LANES <= work.width; i += LANES) put(x + i, wide(x + i) * wide(work.factors + i));
    for (; i < work.width; i++) put_one(x + i, wide_one(x + i) * wide_one(work.factors + i));
}

// The norm, rounded, times a factor. S: type of x.
template <typename T, typename W, typename S = T>
struct Norm {
    Rows rows;
    T* out;
    const S* x;
    int64_t stride;
    const W* weight;
    int64_t width;
    float eps;
    float factor = 1.f;
};

template <typename T, typename W, typename S>
INLINE void write_norm(T* to, const S* from, const W* weight, int64_t width, float eps) {
    float scale = norm_scale(from, width, eps);
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) put(to + i, wide(from + i) * scale * wide(weight + i));
    for (; i < width; i++) put_one(to + i, wide_one(from + i) * scale * wide_one(weight + i));
}

template <typename T, typename W, typename S>
INLINE void run_row(const Norm<T, W, S>& work, int64_t row) {
    T* to = work.out + row * work.width;
    write_norm(to, work.x + row * work.stride, work.weight, work.width, work.eps);
    multiply_row(to, work.factor, work.width);
}

// x + scale * y, or x + scale * norm(y), with y times a factor before; ``out``: a norm of the sum. S: type of the residual.
template <typename T, typename W, typename S = T>
struct Residual {
    Rows rows;
    S* sum;  // may be ``y``, or ``x``
    T* y;    // changes
    int64_t y_stride;  // of the sum, too
    const S* x;
    int64_t x_stride, width;
    float scale;
    const W* own;  // weight of y's norm, or null
    float own_eps;
    T* out;
    const W* weight;  // of the sum's norm, or null: no ``out``
    float eps;
    float factor = 1.f;
};

template <typename T, typename W, typename S>
INLINE void run_row(const Residual<T, W, S>& work, int64_t row) {
    T* y = work.y + row * work.y_stride;
    S* sum = work.sum + row * work.y_stride;
    const S* x = work.x + row * work.x_stride;
    multiply_row(y, work.factor, work.width);
    if (work.own) write_norm(y, y, work.own, work.width, work.own_eps);
    int64_t i = 0;
    for (; i + LANES <= work.width; i += LANES) put(sum + i, wide(y + i) * work.scale + wide(x + i));
    for (; i < work.width; i++) put_one(sum + i, wide_one(y + i) * work.scale + wide_one(x + i));
    if (work.weight) write_norm(work.out + row * work.width, sum, work.weight, work.width, work.eps);
}

INLINE Lanes capped(Lanes x, float cap) { return tanh_of(x / cap) * cap; }

// A piece of a row becomes cap * tanh(x / cap).
struct SoftCap {
    Rows rows;  // pieces
    float* x;
    int64_t width;  // of a piece; the last one may have less
    int64_t count;
    float cap;
};

// All numbers take one code, since which are the last ones of a piece depends on how many rows there are.
INLINE void run_row(const SoftCap& work, int64_t piece) {
    float *x = work.x + piece * work.width, few[LANES] = {};
    const int64_t left = work.count - piece * work.width, width = left < work.width ? left : work.width;
    for (int64_t i = 0; i < width; i += LANES) {
        const int64_t rest = width - i;
        float* at = rest < LANES ? few : x + i;
        if (rest < LANES) copy(few, x + i, rest);
        put(at, capped(wide(at), work.cap));
        if (rest < LANES) copy(x + i, few, rest);
    }
}

template <typename T, typename A>
struct Gated {
    Rows rows;
    T* out;
    const T* x;
    int64_t stride, width;
};

template <typename T, typename A>
INLINE void run_row(const Gated<T, A>& work, int64_t row) {
    const int64_t width = work.width;
    const T *gate = work.x + row * work.stride, *up = gate + width;
    T* to = work.out + row * width;
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) put(to + i, activated(A(), wide(gate + i)) * wide(up + i));
    for (; i < width; i++) {
        Lanes one = wide_one(gate + i) - Lanes{};
        put_one(to + i, lane(activated(A(), one), 0) * wide_one(up + i));
    }
}

// Heads times the logistic function of a gate, in place.
template <typename T>
struct HeadGate {
    Rows rows;
    T* y;  // [T, heads, width]
    const T* gate;
    int64_t stride, step, heads, width, gate_width;  // gate_width: that of a head, or 1: one number for all of it
};

template <typename T>
INLINE void run_row(const HeadGate<T>& work, int64_t row) {
    for (int64_t h = 0; h < work.heads; h++) {
        const T* gate = work.gate + row * work.stride + h * work.step;
        T* y = work.y + (row * work.heads + h) * work.width;
        const Lanes of_all = wide_one(gate) - Lanes{};
        int64_t i = 0;
        for (; i + LANES <= work.width; i += LANES) put(y + i, times_logistic(wide(y + i), work.gate_width == 1 ? of_all : wide(gate + i)));
        for (; i < work.width; i++) {
            const Lanes one = work.gate_width == 1 ? of_all : wide_one(gate + i) - Lanes{};
            put_one(y + i, lane(times_logistic(wide_one(y + i) - Lanes{}, one), 0));
        }
    }
}

// Columns of gate and up by turns; gate is at most ``limit``, up within both signs of it: gate sigmoid(alpha gate) (up + 1).
template <typename T>
struct Clamped {
    Rows rows;
    T* out;
    const T* x;
    int64_t stride, width;
    float alpha, limit;
};

INLINE Lanes at_most(Lanes x, Lanes limit) { return chosen(negative(limit - x) & ~no_number(x), limit, x); }

INLINE Lanes clamped(Lanes gate, Lanes up, float alpha, float limit) {
    gate = at_most(gate, Lanes{} + limit), up = -at_most(-at_most(up, Lanes{} + limit), Lanes{} + limit);
    return gate / (1.f + exp_of(-(gate * alpha))) * (up + 1.f);
}

template <typename T>
INLINE void run_row(const Clamped<T>& work, int64_t row) {
    const T* x = work.x + row * work.stride;
    T* to = work.out + row * work.width;
    for (int64_t i = 0; i < work.width; i += LANES) {
        float gate[LANES] = {}, up[LANES] = {}, found[LANES];
        const int64_t count = work.width - i < LANES ? work.width - i : LANES;
        for (int64_t j = 0; j < count; j++) gate[j] = wide_one(x + 2 * (i + j)), up[j] = wide_one(x + 2 * (i + j) + 1);
        store(found, clamped(wide(gate), wide(up), work.alpha, work.limit));
        for (int64_t j = 0; j < count; j++) put_one(to + i + j, found[j]);
    }
}

// max(x, 0)^2
template <typename T>
struct Squared {
    Rows rows;
    T* out;
    const T* x;
    int64_t stride, width;
};

template <typename T>
INLINE void run_row(const Squared<T>& work, int64_t row) {
    const T* x = work.x + row * work.stride;
    T* to = work.out + row * work.width;
    int64_t i = 0;
    for (; i + LANES <= work.width; i += LANES) {
        const Lanes value = wide(x + i), above = chosen(negative(value) & ~no_number(value), Lanes{}, value);
        put(to + i, above * above);
    }
    for (; i < work.width; i++) {
        const float value = wide_one(x + i), above = value < 0 ? 0 : value;
        put_one(to + i, above * above);
    }
}

// Columns of the first product for ``width`` of the second.
INLINE int64_t columns_of(const GateForm& gate, int64_t width) { return gate.kind == 4 ? width : 2 * width; }

// The function of a form, of gates times a factor.
template <typename T>
struct GateRows {
    Rows rows;
    T* out;
    T* x;  // gates with a factor change
    int64_t stride, width;
    GateForm form;
    float factor = 1.f;
};

template <typename T>
INLINE void run_row(const GateRows<T>& work, int64_t row) {
    multiply_row(work.x + row * work.stride, work.factor, work.width);
    switch (work.form.kind) {
        case 0: return run_row(Gated<T, Silu>{{1, 1}, work.out, work.x, work.stride, work.width}, row);
        case 1: return run_row(Gated<T, Gelu>{{1, 1}, work.out, work.x, work.stride, work.width}, row);
        case 2: return run_row(Gated<T, GeluTanh>{{1, 1}, work.out, work.x, work.stride, work.width}, row);
        case 3:
            return run_row(Clamped<T>{{1, 1}, work.out, work.x, work.stride, work.width, (float)work.form.alpha, (float)work.form.limit}, row);
        default: return run_row(Squared<T>{{1, 1}, work.out, work.x, work.stride, work.width}, row);
    }
}

// y times the logistic function of x's product with a weight: both are rounded as PyTorch's are. The sum is in float64, sixteen of them
// side by side, so that it does not matter whether a product, which is exact, and a sum are fused.
template <typename T>
struct Weighed {
    Rows rows;
    T* y;
    const T* x;
    int64_t stride;
    const T* weight;
    int64_t width, outputs;
};

template <typename T>
INLINE float logistic(const T* x, const T* weight, int64_t width) {
    double sums[LANES] = {}, sum = 0;
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        float one[LANES], other[LANES];
        store(one, wide(x + i)), store(other, wide(weight + i));
        for (int j = 0; j < LANES; j++) sums[j] += (double)one[j] * other[j];
    }
    for (; i < width; i++) sums[0] += (double)wide_one(x + i) * wide_one(weight + i);
    for (int j = 0; j < LANES; j++) sum += sums[j];
    T rounded;
    put_one(&rounded, (float)sum);
    put_one(&rounded, (float)(1 / (1 + std::exp(-(double)wide_one(&rounded)))));
    return wide_one(&rounded);
}

template <typename T>
INLINE void run_row(const Weighed<T>& work, int64_t row) {
    const float factor = logistic(work.x + row * work.stride, work.weight, work.width);
    T* y = work.y + row * work.outputs;
    int64_t i = 0;
    for (; i + LANES <= work.outputs; i += LANES) put(y + i, wide(y + i) * factor);
    for (; i < work.outputs; i++) put_one(y + i, wide_one(y + i) * factor);
}

template <typename T, typename W>
struct Place {
    Rows rows;
    T* out;  // [T, heads + kv_heads, D]
    const T* qkv;
    int64_t stride, step, heads, kv_heads, key_width, value_width;  // step: columns from a query head to the next
    const float *cos, *sin;
    int64_t turn_stride, rotary, interleaved;
    const W *q_weight, *k_weight;  // null: no norm
    float eps;
    T *k, *v;  // pools
    const int64_t* slots;
};

// Numbers of a head after its norm.
template <typename T, typename W>
struct Normed {
    const T* from;
    const W* weight;
    float scale;
};

template <typename T, typename W>
INLINE Lanes values(const Normed<T, W>& head, int64_t i) {
    Lanes value = wide(head.from + i);
    return head.weight ? value * head.scale * wide(head.weight + i) : value;
}

template <typename T, typename W>
INLINE float value(const Normed<T, W>& head, int64_t i) {
    float value = wide_one(head.from + i);
    return head.weight ? value * head.scale * wide_one(head.weight + i) : value;
}

template <typename T, typename W>
INLINE void turn_halves(T* to, const Normed<T, W>& head, const float* cos, const float* sin, int64_t half) {
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) {
        Lanes low = values(head, i), high = values(head, half + i);
        put(to + i, low * wide(cos + i) + high * wide(sin + i));
        put(to + half + i, high * wide(cos + half + i) + low * wide(sin + half + i));
    }
    for (; i < half; i++) {
        float low = value(head, i), high = value(head, half + i);
        put_one(to + i, low * cos[i] + high * sin[i]);
        put_one(to + half + i, high * cos[half + i] + low * sin[half + i]);
    }
}

template <typename T, typename W>
INLINE void turn_pairs(T* to, const Normed<T, W>& head, const float* cos, const float* sin, int64_t rotary) {
    int64_t i = 0;
    for (; i + LANES <= rotary; i += LANES) {
        Lanes own = values(head, i);
        Lanes other = swapped(own);
        put(to + i, own * wide(cos + i) + other * wide(sin + i));
    }
    for (; i < rotary; i += 2) {
        float first = value(head, i), second = value(head, i + 1);
        put_one(to + i, first * cos[i] + second * sin[i]);
        put_one(to + i + 1, second * cos[i + 1] + first * sin[i + 1]);
    }
}

template <typename T, typename W>
INLINE void run_row(const Place<T, W>& work, int64_t row) {
    const int64_t width = work.key_width, all = work.heads + work.kv_heads, slot = work.slots[row];
    const T *from = work.qkv + row * work.stride, *keys_from = from + work.heads * work.step;
    T* to = work.out + row * all * width;
    const float *cos = work.cos + row * work.turn_stride, *sin = work.sin + row * work.turn_stride;
    for (int64_t h = 0; h < all; h++) {
        const bool is_query = h < work.heads;
        Normed<T, W> head = {is_query ? from + h * work.step : keys_from + (h - work.heads) * width,
                             is_query ? work.q_weight : work.k_weight, 1.f};
        if (head.weight) head.scale = norm_scale(head.from, width, work.eps);
        T* turned = to + h * width;
        if (work.interleaved)
            turn_pairs(turned, head, cos, sin, work.rotary);
        else
            turn_halves(turned, head, cos, sin, work.rotary / 2);
        int64_t i = work.rotary;
        if (head.weight) {
            for (; i + LANES <= width; i += LANES) put(turned + i, values(head, i));
            for (; i < width; i++) put_one(turned + i, value(head, i));
        } else {
            copy(turned + i, head.from + i, width - i);
        }
    }
    const int64_t keys = work.kv_heads * width, numbers = work.kv_heads * work.value_width;
    copy(work.k + slot * keys, to + work.heads * width, keys);
    copy(work.v + slot * numbers, keys_from + keys, numbers);
}

// The last columns of each head turn, the others are copied.
template <typename T>
struct TurnLast {
    Rows rows;
    T* out;  // [T, heads, width]
    const T* x;
    int64_t stride, step, heads, width;  // step: columns from a head to the next
    const float *cos, *sin;
    int64_t turn_stride, rotary, interleaved;
};

template <typename T>
INLINE void run_row(const TurnLast<T>& work, int64_t row) {
    const float *cos = work.cos + row * work.turn_stride, *sin = work.sin + row * work.turn_stride;
    const int64_t rest = work.width - work.rotary;
    for (int64_t h = 0; h < work.heads; h++) {
        const T* from = work.x + row * work.stride + h * work.step;
        T* to = work.out + (row * work.heads + h) * work.width;
        const Normed<T, T> last = {from + rest, nullptr, 1.f};
        copy(to, from, rest);
        if (work.interleaved)
            turn_pairs(to + rest, last, cos, sin, work.rotary);
        else
            turn_halves(to + rest, last, cos, sin, work.rotary / 2);
    }
}

// -- threads and generations of processors -----------------------------------------------------------------------------

template <typename Work>
INLINE void run_rows(void* data) {
    Work& work = *(Work*)data;
    const int64_t count = work.rows.count, piece = work.rows.piece;
    for (int64_t first; (first = work.rows.next.fetch_add(piece)) < count;) {
        const int64_t stop = first + piece < count ? first + piece : count;
        for (int64_t row = first; row < stop; row++) run_row(work, row);
        __atomic_fetch_add(&work.rows.done, stop - first, __ATOMIC_RELEASE);
    }
}

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
template <typename Work>
__attribute__((target("arch=x86-64-v4"))) void run_at_2(void* data) { run_rows<Work>(data); }
template <typename Work>
__attribute__((target("arch=x86-64-v3"))) void run_at_1(void* data) { run_rows<Work>(data); }
#else
template <typename Work>
void run_at_2(void* data) { run_rows<Work>(data); }
template <typename Work>
void run_at_1(void* data) { run_rows<Work>(data); }
#endif
template <typename Work>
void run_at_0(void* data) { run_rows<Work>(data); }

template <typename Work>
void (*runner())(void*) {
    return quire_rows_now == 2 ? run_at_2<Work> : quire_rows_now == 1 ? run_at_1<Work> : run_at_0<Work>;
}

// A thread takes some thousand numbers at a time.
int64_t piece_of(int64_t width) { return width >= 4096 ? 1 : 4096 / (width + 1) + 1; }

}  // namespace
