// A mixture of experts and the residual sum behind it; and the end of any block: an MLP, experts or neither behind the sum with the heads.
//
// Letters: as in block.h.

#pragma once

#include "block_tail.h"
#include "experts_run.h"

namespace {

// The sum of a token's results, and the residual's.
template <typename T, typename W, typename S>
struct TokenSums {
    Rows rows;
    const ChoiceSum<T>* results;
    const Residual<T, W, S>* residual;
};

template <typename T, typename W, typename S>
INLINE void run_row(const TokenSums<T, W, S>& work, int64_t row) {
    run_row(*work.results, row);
    run_row(*work.residual, row);
}

template <typename T, typename W, typename S>
struct ExpertsEnd {
    MixtureRun<T> mixture;
    Residual<T, W, S> residual;
    TokenSums<T, W, S> sums;

    // ``own`` and ``room``: as of MixtureRun.
    ExpertsEnd(const Block& block, const T* x, T* made, const S* h, S* y, int64_t rows, int64_t threads, Memory& own, Memory& room)
        : mixture(*block.experts, made, x, block.width, nullptr, nullptr, rows, threads, own, room),
          residual{{rows, 1}, y, made, block.width, h, block.width, block.width, (float)block.mlp_scale, (const W*)block.mlp_out_norm,
                   (float)block.mlp_out_eps, nullptr, nullptr, 0.f},
          sums{{rows, piece_of(block.width * block.experts->choices)}, &mixture.sum, &residual} {}

    // ``next``: the product behind this block, or null.
    bool go(Worker& worker, const LinearCall* next) {
        if (!mixture.go(worker, next)) return false;
        do_rows(sums, worker);
        return true;
    }
};

template <typename T, typename W, typename S>
struct End {
    enum Kind { BARE, DENSE, EXPERTS };
    const Kind kind;
    Joint<T, W, S> joint;
    union {
        DenseEnd<T, W, S> dense;
        ExpertsEnd<T, W, S> experts;
    };

    // ``room``: rows * ``end_room`` numbers. ``x``: the block's input; ``base``: what the heads are added to, or x. ``own``, ``shared``: of
    // a mixture.
    End(const Block& block, T* room, S* y, const T* heads, int64_t heads_stride, const S* x, const S* base, int64_t rows, int64_t threads,
        Memory& own, Memory shared)
        : End(block, (S*)room, room + rows * block.width * (int64_t)(sizeof(S) / sizeof(T)), y, heads, heads_stride, x, base, rows, threads,
              own, shared) {}

    End(const Block& block, S* h, T* made, S* y, const T* heads, int64_t heads_stride, const S* x, const S* base, int64_t rows,
        int64_t threads, Memory& own, Memory& shared)
        : kind(block.experts ? EXPERTS : block.down ? DENSE : BARE),
          joint(block, made, kind == BARE ? y : h, made + rows * block.width, heads, heads_stride, x, base, rows, threads) {
        T *normed = made + rows * block.width, *both = normed + rows * block.width;
        const S* sum = block.out ? h : x;
        const T* from = block.mlp_norm ? normed : (const T*)h;  // without a norm S is T
        if (kind == EXPERTS)
            new (&experts) ExpertsEnd<T, W, S>(block, from, made, sum, y, rows, threads, own, shared);
        else if (kind == DENSE)
            new (&dense) DenseEnd<T, W, S>(block, from, both, both + rows * block.gate_up->outputs, made, sum, y, rows, threads);
    }

    // The first product, and the one behind it if that is known; or null.
    const LinearCall* first() const { return joint.out.map ? &joint.out : inner(); }
    const LinearCall* second() const { return joint.out.map ? inner() : kind == DENSE ? &dense.down : nullptr; }

    // The first product behind the heads' projection.
    const LinearCall* inner() const { return kind == DENSE ? &dense.gate_up : kind == EXPERTS ? experts.mixture.first() : nullptr; }

    // ``next``: the product behind this block, or null.
    bool go(Worker& worker, const LinearCall* next) {
        if (kind == BARE)
            worker.expect(next);
        else
            worker.expect(inner(), kind == DENSE ? &dense.down : nullptr);
        if (!joint.go(worker)) return false;
        return kind == BARE || (kind == DENSE ? dense.go(worker, next) : experts.go(worker, next));
    }

    bool failed() const {
        return joint.out.failed || (kind == DENSE && dense.failed()) || (kind == EXPERTS && experts.mixture.failed());
    }
};

// Numbers of a row, of which the first ones are of type S.
template <typename T, typename S>
int64_t end_room(const Block& block) {
    return block.width * (int64_t)(2 + sizeof(S) / sizeof(T)) + (block.down ? block.gate_up->outputs + block.down->inputs : 0);
}

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
    MixtureRun<T>(*block.experts, nullptr, nullptr, block.width, nullptr, nullptr, rows, threads, own, some);
    if (some.used > shared.used) shared.used = some.used;
}

}  // namespace
