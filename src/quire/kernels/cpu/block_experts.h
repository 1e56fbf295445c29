// The end of a block with a mixture of experts: projection of the heads, residual sum and norm, the mixture, residual sum. And the end of
// any block, of which there are two kinds.
//
// Letters: as in block.h.

#pragma once

#include "block_tail.h"
#include "experts_run.h"

namespace {

// The sum of a token's results, and the residual's.
template <typename T, typename W>
struct TokenSums {
    Rows rows;
    const ChoiceSum<T>* results;
    const Residual<T, W>* residual;
};

template <typename T, typename W>
INLINE void run_row(const TokenSums<T, W>& work, int64_t row) {
    run_row(*work.results, row);
    run_row(*work.residual, row);
}

template <typename T, typename W>
struct ExpertsTail {
    LinearCall out;
    Multiply run;
    Residual<T, W> norm;
    MixtureRun<T> mixture;
    Residual<T, W> residual;
    TokenSums<T, W> sums;

    // ``h``: rows * 2 E numbers. ``own`` and ``room``: as of MixtureRun.
    ExpertsTail(const Block& block, T* h, T* y, const T* heads, int64_t heads_stride, const T* x, int64_t rows, int64_t threads, Memory& own,
                Memory& room)
        : ExpertsTail(block, block.out->outputs, h, h + rows * block.out->outputs, y, heads, heads_stride, x, rows, threads, own, room) {}

    ExpertsTail(const Block& block, int64_t width, T* h, T* normed, T* y, const T* heads, int64_t heads_stride, const T* x, int64_t rows,
                int64_t threads, Memory& own, Memory& room)
        : norm{{rows, piece_of(width)}, h, width, x, width, width, (float)block.scale, (const W*)block.attention_out_norm,
               (float)block.attention_out_eps, normed, (const W*)block.mlp_norm, (float)block.mlp_eps},
          mixture(*block.experts, y, block.mlp_norm ? normed : h, width, nullptr, nullptr, rows, threads, own, room),
          residual{{rows, 1}, y, width, h, width, width, (float)block.scale, (const W*)block.mlp_out_norm, (float)block.mlp_out_eps, nullptr,
                   nullptr, 0.f},
          sums{{rows, piece_of(width * block.experts->choices)}, &mixture.sum, &residual} {
        run = quire_begin_linear(&out, block.out, h, heads, heads_stride, rows, threads);
    }

    // ``next``: the product behind this block, or null.
    bool go(Worker& worker, const LinearCall* next) {
        worker.expect(mixture.first());
        if (!multiply(out, run, worker)) return false;
        do_rows(norm, worker);
        if (!mixture.go(worker, next)) return false;
        do_rows(sums, worker);
        return true;
    }

    bool failed() const { return out.failed || mixture.failed(); }
};

template <typename T, typename W, typename A>
struct End {
    union {
        Tail<T, W, A> dense;
        ExpertsTail<T, W> experts;
    };
    const bool is_mixture;

    // ``room``: rows * ``end_room`` numbers. ``own``, ``shared``: of a mixture.
    End(const Block& block, T* room, T* y, const T* heads, int64_t heads_stride, const T* x, int64_t rows, int64_t threads, Memory& own,
        Memory shared)
        : is_mixture(block.experts) {
        if (is_mixture)
            new (&experts) ExpertsTail<T, W>(block, room, y, heads, heads_stride, x, rows, threads, own, shared);
        else
            new (&dense) Tail<T, W, A>(block, room, y, heads, heads_stride, x, rows, threads);
    }

    // The first product, and the one behind it if that is known.
    const LinearCall* first() const { return is_mixture ? &experts.out : &dense.out; }
    const LinearCall* second() const { return is_mixture ? experts.mixture.first() : &dense.gate_up; }

    bool go(Worker& worker, const LinearCall* next) { return is_mixture ? experts.go(worker, next) : dense.go(worker, next); }

    bool failed() const { return is_mixture ? experts.failed() : dense.failed(); }
};

// Numbers of a row.
int64_t end_room(const Block& block) { return block.experts ? 2 * block.out->outputs : tail_room(block); }

// Memory of the mixtures of a call, kept for a thread's next one.
struct ExpertsRoom {
    Room own, shared;

    // Turn what was counted into places. Return false without memory.
    bool take(Memory& counted, Memory& of_all) {
        if (!counted.used) return true;
        counted = {(intptr_t)own.of(counted.used / sizeof(float))}, of_all = {(intptr_t)shared.of(of_all.used / sizeof(float))};
        return counted.base && of_all.base;
    }
};

// Add what the mixture of a block, if it has one, needs of its own; ``shared`` becomes what all need.
template <typename T>
void count_experts(const Block& block, int64_t rows, int64_t threads, Memory& own, Memory& shared) {
    if (!block.experts) return;
    Memory some{0};
    MixtureRun<T>(*block.experts, nullptr, nullptr, block.out->outputs, nullptr, nullptr, rows, threads, own, some);
    if (some.used > shared.used) shared.used = some.used;
}

}  // namespace
