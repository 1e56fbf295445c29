// The beginning of a block with a mixer: norm, projection (and rates of a delta rule), the mixer over its states.
//
// Letters: as in block.h; Z columns of the projection, R of the rates, D of the mixer's output.

#pragma once

#include "block.h"

namespace {

// D.
int64_t mixer_width(const Mixer& mixer) { return mixer.kind == CONVOLUTION ? mixer.channels : mixer.heads * mixer.values; }

// Numbers of a row, of which the first ones are floats.
template <typename T>
int64_t mixed_room(const Block& block) {
    const int64_t floats = mixed_floats(*block.mixer) * sizeof(float) / sizeof(T);
    return floats + block.qkv->inputs + block.qkv->outputs + (block.rates ? block.rates->outputs : 0) + mixer_width(*block.mixer);
}

template <typename T, typename W, typename S>
struct Mixed {
    Norm<T, W, S> norm;
    LinearCall project, rates;
    Multiply run, run_rates = nullptr;  // null: the mixer has no rates of its own
    Columns<T> columns;
    Task task;
    Phase phases[3];
    Mix mix;
    const T* out;  // [M, D]

    // ``room``: as ``mixed_room`` says.
    Mixed(const Block& block, const LayerStates& states, const Forward& forward, T* room, const S* x, int64_t rows, int64_t threads)
        : Mixed(block, states, forward, (float*)room, room + rows * mixed_floats(*block.mixer) * sizeof(float) / sizeof(T), x, rows,
                threads) {}

    Mixed(const Block& block, const LayerStates& states, const Forward& forward, float* floats, T* normed, const S* x, int64_t rows,
          int64_t threads)
        : Mixed(block, states, forward, floats, normed, normed + rows * block.qkv->inputs,
                normed + rows * (block.qkv->inputs + block.qkv->outputs), x, rows, threads) {}

    Mixed(const Block& block, const LayerStates& states, const Forward& forward, float* floats, T* normed, T* projected, T* rated,
          const S* x, int64_t rows, int64_t threads)
        : norm{{rows, piece_of(block.width)}, normed, x, block.width, (const W*)block.attention_norm, block.width,
               (float)block.attention_eps, (float)block.in_factor},
          columns{{rows, piece_of(block.qkv->outputs)}, projected, (const T*)block.columns, block.qkv->outputs} {
        const int64_t width = block.width, count = block.qkv->outputs;
        const Mixer& mixer = *block.mixer;
        run = quire_begin_linear(&project, block.qkv, projected, normed, width, rows, threads);
        task = {&mixer, &forward, nullptr, projected, projected + count - mixer.heads, count, count, states.kept, states.states,
                rows,   nullptr,  nullptr, nullptr,   phases};
        T* y = rated;
        if (block.rates) {
            run_rates = quire_begin_linear(&rates, block.rates, rated, normed, width, rows, threads);
            task.rates = rated, task.rates_stride = block.rates->outputs;
            y += rows * block.rates->outputs;
        }
        task.out = y, out = y;
        take_room(task, floats);
        mix = quire_begin_mix(&mixer);
    }

    // ``next``, ``second``: the products behind the mixer.
    bool go(Worker& worker, const LinearCall* next, const LinearCall* second) {
        do_rows(norm, worker);
        worker.expect(next, second);
        run(&project, worker.number);
        if (run_rates) run_rates(&rates, worker.number);
        if (failed()) return false;
        worker.wait(project.done, project.items);
        if (run_rates) worker.wait(rates.done, rates.items);
        if (columns.factors) do_rows(columns, worker);
        mix(&task);
        return true;
    }

    bool failed() const { return project.failed || (run_rates && rates.failed); }
};

}  // namespace
