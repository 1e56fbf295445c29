// The beginning of a block with attention: norm, projection, rotation and the write of K and V, attention, gates of its heads.
//
// Letters: as in block.h.

#pragma once

#include "block.h"

namespace {

template <typename T, typename W, typename S>
struct Heads {
    Norm<T, W, S> norm;
    LinearCall qkv, gates;
    Multiply run, run_gates = nullptr;  // null: no gates of whole heads
    Place<T, W> place;
    Call attention;
    Attend attend;
    HeadGate<T> gate;
    const T* out;  // [M, C], behind the call

    // ``room``: as ``heads_room`` says.
    Heads(const Step& step, T* room, const S* x, int64_t rows, int64_t threads)
        : Heads(*step.block, *(const LayerAttention*)step.layer, *(const ForwardAttention*)step.forward, room,
                room + rows * step.block->qkv->inputs,
                room + rows * (step.block->qkv->inputs + step.block->qkv->outputs), x, rows, threads) {}

    Heads(const Block& block, const LayerAttention& layer, const ForwardAttention& forward, T* normed, T* all, T* turned, const S* x,
          int64_t rows, int64_t threads)
        : Heads(block, layer, forward, normed, all, turned, turned + rows * (layer.heads + layer.kv_heads) * layer.key_width,
                block.qkv->inputs, x, rows, threads) {}

    // Gates of whole heads come behind the heads.
    Heads(const Block& block, const LayerAttention& layer, const ForwardAttention& forward, T* normed, T* all, T* turned, T* heads,
          int64_t width, const S* x, int64_t rows, int64_t threads)
        : norm{{rows, piece_of(width)}, normed, x, width, (const W*)block.attention_norm, width, (float)block.attention_eps,
               (float)block.in_factor},
          place{{rows, piece_of((layer.heads + layer.kv_heads) * layer.key_width)}, turned, all, block.qkv->outputs,
                block.gated ? 2 * layer.key_width : layer.key_width, layer.heads, layer.kv_heads, layer.key_width, layer.value_width,
                forward.cos, forward.sin, forward.turn_stride, forward.rotary, forward.interleaved, (const W*)layer.q_norm,
                (const W*)layer.k_norm, (float)layer.head_eps, (T*)layer.k, (T*)layer.v, forward.slots},
          gate{{block.gated || block.rates ? rows : 0, piece_of(layer.heads * layer.value_width)}, heads,
               block.rates ? heads + rows * layer.heads * layer.value_width : all + layer.key_width,
               block.rates ? layer.heads : block.qkv->outputs, block.rates ? 1 : 2 * layer.key_width, layer.heads, layer.value_width,
               block.rates ? 1 : layer.value_width},
          out(heads) {
        const T* from = norm.weight ? normed : (const T*)x;  // without a norm S is T
        run = quire_begin_linear(&qkv, block.qkv, all, from, width, rows, threads);
        if (block.rates) run_gates = quire_begin_linear(&gates, block.rates, (void*)gate.gate, from, width, rows, threads);
        attend = quire_begin_attention(&attention, (const Call*)forward.call, turned, nullptr, layer.k, layer.v, heads, nullptr,
                                       layer.sinks, layer.scale, layer.softcap);
    }

    // ``next``, ``second``: the products behind these heads.
    bool go(Worker& worker, const LinearCall* next, const LinearCall* second) {
        if (norm.weight) do_rows(norm, worker);
        worker.expect(next, second);
        run(&qkv, worker.number);
        if (run_gates) run_gates(&gates, worker.number);
        if (failed()) return false;
        worker.wait(qkv.done, qkv.items);
        if (run_gates) worker.wait(gates.done, gates.items);
        do_rows(place, worker);
        attend(&attention);
        worker.wait(attention.done, attention.batch->num_items);
        if (gate.rows.count) do_rows(gate, worker);
        return true;
    }

    bool failed() const { return qkv.failed || (run_gates && gates.failed); }
};

// Numbers of a row.
int64_t heads_room(const Step& step) {
    const LayerAttention& layer = *(const LayerAttention*)step.layer;
    return step.block->qkv->inputs + step.block->qkv->outputs + (layer.heads + layer.kv_heads) * layer.key_width +
           layer.heads * layer.value_width + (step.block->rates ? layer.heads : 0);
}

}  // namespace
