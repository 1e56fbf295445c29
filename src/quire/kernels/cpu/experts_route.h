// The choice of experts: one token's logits become K experts and their weights. The reference is ``route`` of quire/ops/experts.py.
//
// Softmax and logistic function are computed in float64 and rounded to float32, so that equal logits have equal scores. Among equal scores
// the choice is that of torch.topk, which calls the same functions of the standard library; quire/kernels/experts.py checks that.
//
// Letters: X experts, K of them.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>

extern "C" {

// As ``Routing`` of quire/contracts/experts.py.
struct Routing {
    int64_t experts, choices;
    int64_t is_of_chosen, is_sigmoid, is_renormalised;
    int64_t groups, top_groups, is_by_two;
    double summand, scale;
    double reach;             // below 0: none
    const float* correction;  // [X], or null
};
}

namespace {

constexpr int64_t MOST_EXPERTS = 4096;

typedef std::pair<float, int64_t> Scored;

// What is no number comes first.
inline bool is_better(const Scored& a, const Scored& b) { return (std::isnan(a.first) && !std::isnan(b.first)) || a.first > b.first; }

// The best ``count`` scores in front, best first.
inline void choose(Scored* scores, int64_t of, int64_t count) {
    if (count * 64 <= of) {
        std::partial_sort(scores, scores + count, scores + of, is_better);
    } else {
        std::nth_element(scores, scores + count - 1, scores + of, is_better);
        std::sort(scores, scores + count - 1, is_better);
    }
}

// In place; the largest number is subtracted first.
inline void softmax(float* x, int64_t count) {
    float most = -std::numeric_limits<float>::infinity();
    for (int64_t i = 0; i < count; i++) most = x[i] > most || std::isnan(x[i]) ? x[i] : most;
    double sum = 0;
    for (int64_t i = 0; i < count; i++) sum += std::exp((double)(x[i] - most));
    for (int64_t i = 0; i < count; i++) x[i] = (float)(std::exp((double)(x[i] - most)) / sum);
}

// Experts outside of the best groups get minus infinity.
inline void keep_best_groups(const Routing& routing, float* scores, Scored* queue, Scored* inside) {
    const int64_t groups = routing.groups, size = routing.experts / groups, best = routing.is_by_two ? 2 : 1;
    for (int64_t group = 0; group < groups; group++) {
        for (int64_t i = 0; i < size; i++) inside[i] = {scores[group * size + i], i};
        choose(inside, size, best);
        queue[group] = {best == 2 ? inside[0].first + inside[1].first : inside[0].first, group};
    }
    choose(queue, groups, routing.top_groups);
    std::sort(queue, queue + routing.top_groups, [](const Scored& a, const Scored& b) { return a.second < b.second; });
    for (int64_t group = 0, kept = 0; group < groups; group++) {
        if (kept < routing.top_groups && queue[kept].second == group)
            kept++;
        else
            std::fill(scores + group * size, scores + (group + 1) * size, -std::numeric_limits<float>::infinity());
    }
}

// The best expert, then the best of the others, the first among equals.
inline void route_sparsely(const Routing& routing, const float* logits, float* weights, int64_t* chosen) {
    for (int64_t k = 0; k < 2; k++) {
        const auto is_left = [&](int64_t x) { return k == 0 || x != chosen[0]; };
        int64_t best = is_left(0) ? 0 : 1;
        for (int64_t x = best + 1; x < routing.experts; x++)
            if (is_left(x) && logits[x] > logits[best]) best = x;
        double sum = 0;
        for (int64_t x = 0; x < routing.experts; x++) {
            const float below = logits[best] - logits[x], size = std::max(std::fabs(logits[x]), logits[best]);
            if (is_left(x) && !(below / size > (float)routing.reach)) sum += std::exp(-(double)below);
        }
        chosen[k] = best, weights[k] = (float)(1 / sum);
    }
}

// ``logits`` are overwritten.
inline void route(const Routing& routing, float* logits, float* weights, int64_t* chosen) {
    const int64_t experts = routing.experts, choices = routing.choices;
    if (routing.reach >= 0) return route_sparsely(routing, logits, weights, chosen);
    float corrected[MOST_EXPERTS];
    Scored queue[MOST_EXPERTS], inside[MOST_EXPERTS];
    float* by = logits;
    if (!routing.is_of_chosen) {
        if (routing.is_sigmoid)
            for (int64_t x = 0; x < experts; x++) logits[x] = (float)(1 / (1 + std::exp(-(double)logits[x])));
        else
            softmax(logits, experts);
        if (routing.correction || routing.top_groups < routing.groups) {
            for (int64_t x = 0; x < experts; x++) corrected[x] = routing.correction ? logits[x] + routing.correction[x] : logits[x];
            by = corrected;
        }
        if (routing.top_groups < routing.groups) keep_best_groups(routing, corrected, queue, inside);
    }
    for (int64_t x = 0; x < experts; x++) queue[x] = {by[x], x};
    choose(queue, experts, choices);
    for (int64_t k = 0; k < choices; k++) chosen[k] = queue[k].second, weights[k] = routing.correction ? logits[chosen[k]] : queue[k].first;
    if (routing.is_of_chosen) {
        softmax(weights, choices);
    } else if (routing.is_renormalised) {
        double sum = 0;
        for (int64_t k = 0; k < choices; k++) sum += weights[k];
        const float all = (float)sum + (float)routing.summand;
        for (int64_t k = 0; k < choices; k++) weights[k] /= all;
    }
    if (routing.scale != 1)
        for (int64_t k = 0; k < choices; k++) weights[k] *= (float)routing.scale;
}

}  // namespace
