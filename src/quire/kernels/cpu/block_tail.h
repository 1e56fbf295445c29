// Parts of a block's end: projection of the heads, residual sum and norm; MLP, residual sum. Before the sums may stand norms.
//
// Letters: as in block.h.

#pragma once

#include "block.h"

namespace {

// The projection of the heads, the residual sum and its norm; in a block without heads the norm of x alone.
template <typename T, typename W, typename S>
struct Joint {
    LinearCall out;  // without a map: there are no heads
    Multiply run;
    Residual<T, W, S> sum;
    Norm<T, W, S> norm;

    // ``made``: for the product; ``base``: what it is added to.
    Joint(const Block& block, T* made, S* h, T* normed, const T* heads, int64_t heads_stride, const S* x, const S* base, int64_t rows,
          int64_t threads)
        : sum{{rows, piece_of(block.width)}, h, made, block.width, base, block.width, block.width, (float)block.scale,
              (const W*)block.attention_out_norm, (float)block.attention_out_eps, normed, (const W*)block.mlp_norm, (float)block.mlp_eps},
          norm{{rows, piece_of(block.width)}, normed, x, block.width, (const W*)block.mlp_norm, block.width, (float)block.mlp_eps} {
        out.map = nullptr, out.failed = 0;
        if (block.out) run = quire_begin_linear(&out, block.out, made, heads, heads_stride, rows, threads);
    }

    bool go(Worker& worker) {
        if (!out.map) {
            do_rows(norm, worker);
            return true;
        }
        if (!multiply(out, run, worker)) return false;
        do_rows(sum, worker);
        return true;
    }
};

template <typename T, typename W, typename S>
struct DenseEnd {
    LinearCall gate_up, down;
    Multiply run;
    GateRows<T> gate;
    Residual<T, W, S> sum;

    DenseEnd(const Block& block, const T* x, T* both, T* inside, T* made, const S* h, S* y, int64_t rows, int64_t threads)
        : gate{{rows, piece_of(block.down->inputs)}, inside, both, block.gate_up->outputs, block.down->inputs, block.gate,
               (float)block.gate_factor},
          sum{{rows, piece_of(block.width)}, y, made, block.width, h, block.width, block.width, (float)block.mlp_scale,
              (const W*)block.mlp_out_norm, (float)block.mlp_out_eps, nullptr, nullptr, 0.f, (float)block.down_factor} {
        run = quire_begin_linear(&gate_up, block.gate_up, both, x, block.width, rows, threads);
        quire_begin_linear(&down, block.down, made, inside, block.down->inputs, rows, threads);
    }

    // ``next``: the product behind this block, or null.
    bool go(Worker& worker, const LinearCall* next) {
        worker.expect(&down, next);
        if (!multiply(gate_up, run, worker)) return false;
        do_rows(gate, worker);
        worker.expect(next);
        if (!multiply(down, run, worker)) return false;
        do_rows(sum, worker);
        return true;
    }

    bool failed() const { return gate_up.failed || down.failed; }
};

}  // namespace
