// The end of a block: projection of the heads, residual sum and norm, gated MLP, residual sum. Before the sums may stand norms.
//
// Letters: as in block.h.

#pragma once

#include "block.h"

namespace {

template <typename T, typename W, typename A>
struct Tail {
    LinearCall out, gate_up, down;
    Multiply run;
    Residual<T, W> norm;
    Gated<T, A> gated;
    Residual<T, W> sum;

    // ``room``: rows * (2 E + 3 F) numbers.
    Tail(const Block& block, T* room, T* y, const T* heads, int64_t heads_stride, const T* x, int64_t rows, int64_t threads)
        : Tail(block, room, room + rows * block.out->outputs, room + 2 * rows * block.out->outputs,
               room + 2 * rows * (block.out->outputs + block.down->inputs), y, heads, heads_stride, x, rows, threads) {}

    Tail(const Block& block, T* h, T* normed, T* both, T* inside, T* y, const T* heads, int64_t heads_stride, const T* x, int64_t rows,
         int64_t threads)
        : norm{{rows, piece_of(block.out->outputs)}, h, block.out->outputs, x, block.out->outputs, block.out->outputs,
               (float)block.scale, (const W*)block.attention_out_norm, (float)block.attention_out_eps, normed, (const W*)block.mlp_norm,
               (float)block.mlp_eps},
          gated{{rows, piece_of(block.down->inputs)}, inside, both, 2 * block.down->inputs, block.down->inputs},
          sum{{rows, piece_of(block.out->outputs)}, y, block.out->outputs, h, block.out->outputs, block.out->outputs,
              (float)block.scale, (const W*)block.mlp_out_norm, (float)block.mlp_out_eps, nullptr, nullptr, 0.f} {
        run = quire_begin_linear(&out, block.out, h, heads, heads_stride, rows, threads);
        quire_begin_linear(&gate_up, block.gate_up, both, block.mlp_norm ? normed : h, block.out->outputs, rows, threads);
        quire_begin_linear(&down, block.down, y, inside, block.down->inputs, rows, threads);
    }

    // ``next``: the product behind this block, or null.
    bool go(Worker& worker, const LinearCall* next) {
        worker.expect(&gate_up, &down);
        if (!multiply(out, run, worker)) return false;
        do_rows(norm, worker);
        worker.expect(&down, next);
        if (!multiply(gate_up, run, worker)) return false;
        do_rows(gated, worker);
        worker.expect(next);
        if (!multiply(down, run, worker)) return false;
        do_rows(sum, worker);
        return true;
    }

    bool failed() const { return out.failed || gate_up.failed || down.failed; }
};

int64_t tail_room(const Block& block) { return 2 * block.out->outputs + 3 * block.down->inputs; }

}  // namespace
