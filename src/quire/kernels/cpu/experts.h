// A feed-forward layer that is a mixture of experts: structures of a call, the router's work, and the work on rows between the products.
//
// Letters: T tokens; X experts, K of each token; P = T * K pairs of a token and one of its experts; E model width; F inner width.

#pragma once

#include "block.h"
#include "experts_route.h"

extern "C" {

// Logits are a product of ``map``, rounded to its activations' type, or sums in float64, rounded to float32, over
// weights [X / 16][E][16] and a bias [X] or null.
struct RouterMap {
    const Linear* map;  // or null
    const float *weights, *bias;
    int64_t width;
    Routing routing;
};

struct ExpertMaps {
    const Linear *const *gate_up, *const *down;  // of each expert
    int64_t count;
    GateForm gate;
};

// The expert of all tokens.
struct SharedMaps {
    const Linear *gate_up, *down;
    const void* weight;  // [E]: its result is times the logistic function of the token's product with it; or null
    GateForm gate;
};

struct Mixture {
    const RouterMap* router;  // null: the call has the choices
    const ExpertMaps* experts;
    const SharedMaps* shared;  // or null
    Parallel parallel;
    int64_t choices, is_bfloat16;
};
}

namespace {

// -- the router --------------------------------------------------------------------------------------------------------

typedef double Doubles __attribute__((vector_size(32)));
typedef float Singles __attribute__((vector_size(16)));
constexpr int64_t ROUTED = 16;          // experts side by side
constexpr int64_t TOKENS_AT_ONCE = 24;  // of an item

// Sums of float64 from the first input to the last, each token's and expert's by itself. A product of two floats is exact.
template <typename T>
struct Logits64 {
    Rows rows;  // panels of experts by blocks of tokens
    float* out;  // [T, X]
    const T* x;
    int64_t x_stride, tokens, blocks;
    const float *weights, *bias;
    int64_t width, experts;
};

template <int M, typename T>
INLINE void logits_of(const Logits64<T>& work, int64_t panel, int64_t token) {
    const float* w = work.weights + panel * work.width * ROUTED;
    const T* x = work.x + token * work.x_stride;
    Doubles sums[M][4] = {};
    for (int64_t i = 0; i < work.width; i++, w += ROUTED) {
        Doubles columns[4];
        for (int n = 0; n < 4; n++) columns[n] = __builtin_convertvector(loaded<Singles>(w + 4 * n), Doubles);
        for (int m = 0; m < M; m++) {
            const double factor = wide_one(x + m * work.x_stride + i);
            for (int n = 0; n < 4; n++) sums[m][n] += columns[n] * factor;
        }
    }
    for (int m = 0; m < M; m++)
        for (int64_t o = 0; o < ROUTED && panel * ROUTED + o < work.experts; o++) {
            const int64_t expert = panel * ROUTED + o;
            work.out[(token + m) * work.experts + expert] = (float)(sums[m][o / 4][o % 4] + (work.bias ? (double)work.bias[expert] : 0.0));
        }
}

template <typename T>
INLINE void run_row(const Logits64<T>& work, int64_t item) {
    const int64_t panel = item / work.blocks, first = item % work.blocks * TOKENS_AT_ONCE;
    const int64_t end = first + TOKENS_AT_ONCE < work.tokens ? first + TOKENS_AT_ONCE : work.tokens;
    int64_t token = first;
    for (; token + 2 <= end; token += 2) logits_of<2>(work, panel, token);
    if (token < end) logits_of<1>(work, panel, token);
}

// Each token's choice.
template <typename T>
struct Choices {
    Rows rows;
    const Routing* routing;
    const T* narrow;  // [T, X] logits, or null: they are in ``logits``
    float* logits;    // [T, X]
    float* weights;   // [T, K]
    int64_t* experts;
};

template <typename T>
INLINE void run_row(const Choices<T>& work, int64_t row) {
    const int64_t count = work.routing->experts, first = row * work.routing->choices;
    float* logits = work.logits + row * count;
    if (work.narrow)
        for (int64_t x = 0; x < count; x++) logits[x] = wide_one(work.narrow + row * count + x);
    route(*work.routing, logits, work.weights + first, work.experts + first);
}

// A router's work in a region.
template <typename T>
struct Chooser {
    LinearCall product;
    Multiply run;
    Logits64<T> logits;
    Choices<T> choices;

    static int64_t floats(const RouterMap& router, int64_t rows) { return rows * router.routing.experts * (router.map ? 2 : 1); }

    // ``room``: as many numbers as ``floats`` says.
    Chooser(const RouterMap& router, float* room, float* weights, int64_t* experts, const T* x, int64_t x_stride, int64_t rows, int64_t threads)
        : logits{{(router.routing.experts + ROUTED - 1) / ROUTED * ((rows + TOKENS_AT_ONCE - 1) / TOKENS_AT_ONCE), 1}, room, x, x_stride, rows,
                 (rows + TOKENS_AT_ONCE - 1) / TOKENS_AT_ONCE, router.weights, router.bias, router.width, router.routing.experts},
          choices{{rows, piece_of(32 * router.routing.experts)}, &router.routing,
                  router.map ? (const T*)(room + rows * router.routing.experts) : nullptr, room, weights, experts} {
        product.map = nullptr, product.failed = 0;
        if (router.map) run = quire_begin_linear(&product, router.map, (void*)choices.narrow, x, x_stride, rows, threads);
    }

    bool go(Worker& worker) {
        if (!product.map)
            do_rows(logits, worker);
        else if (!multiply(product, run, worker))
            return false;
        do_rows(choices, worker);
        return true;
    }
};

// -- rows of experts ---------------------------------------------------------------------------------------------------

// Copies of tokens for the experts with several of them.
template <typename T>
struct Gather {
    Rows rows;
    T* out;
    const T* x;
    int64_t stride, width;
    const int32_t* tokens;
};

template <typename T>
INLINE void run_row(const Gather<T>& work, int64_t row) {
    copy(work.out + row * work.width, work.x + work.tokens[row] * work.stride, work.width);
}

// A token's results times their weights, added from its first choice to its last in float32; the shared expert's result behind them.
template <typename T>
struct ChoiceSum {
    Rows rows;
    T* out;
    const T* y;            // [P, E], by experts
    const int32_t* places;  // of a token's pairs in it
    const float* weights;
    int64_t choices, width;
    T* shared;  // [T, E], or null
    const T* x;
    int64_t x_stride;
    const T* weight;  // of the shared expert's gate, or null
};

template <typename T>
INLINE void run_row(const ChoiceSum<T>& work, int64_t row) {
    const int64_t width = work.width, choices = work.choices;
    const int32_t* places = work.places + row * choices;
    const float* weights = work.weights + row * choices;
    T* to = work.out + row * width;
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        Lanes sum = {};
        for (int64_t k = 0; k < choices; k++) sum += wide(work.y + places[k] * width + i) * weights[k];
        put(to + i, sum);
    }
    for (; i < width; i++) {
        float sum = 0;
        for (int64_t k = 0; k < choices; k++) sum += wide_one(work.y + places[k] * width + i) * weights[k];
        put_one(to + i, sum);
    }
    if (!work.shared) return;
    if (work.weight) run_row(Weighed<T>{{1, 1}, work.shared, work.x, work.x_stride, work.weight, width, width}, row);
    run_row(Residual<T, T>{{1, 1}, work.out, work.out, width, work.shared, width, width, 1.f, nullptr, 0.f, nullptr, nullptr, 0.f}, row);
}

}  // namespace
