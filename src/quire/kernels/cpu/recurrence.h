// Mixers of recurrent layers between their projections: a short causal convolution with its state, and what follows it: the
// gated delta rule, the SSD of Mamba-2, or a gate alone; then the gated norm.
//
// The reference is quire/ops/recurrence.py with quire/nn/{delta,mamba,short_conv}.py; quire/kernels/recurrence/cpu_recurrence.py
// calls this through ctypes. A forward reads states of earlier tokens in a pool, and writes those after its wanted rows to slots of
// their own. A head's state is passed from row to row in order, whatever the batch is and however a prompt is cut: each number
// depends on its own sequence only, to the bit. All is computed in float32; what leaves is rounded once.
//
// Letters: T rows; C convolved channels; W taps; H heads of the state; J key heads (of SSD: groups), each for H / J consecutive
// heads; K, V sizes of keys and values.

#pragma once

#include "common.h"

extern "C" {

enum MixerKind { CONVOLUTION = 0, DELTA_RULE = 1, SSD = 2 };

// A layer. Its rows have the columns of ``x_at`` to ``x_at + channels`` for the convolution, and the gate's from ``gate_at`` on. Of
// a short convolution these are b, c, x of ``channels`` each. Weights are float32.
struct Mixer {
    int64_t kind, types;  // types: 0 float32, 1 bfloat16, of rows and of kept inputs
    int64_t channels, taps;
    int64_t heads, key_heads, keys, values;
    int64_t x_at, gate_at;
    const float *taps_WC, *bias_C;     // bias: or null
    const float *rate_H, *step_bias_H;  // A, below 0
    const float *skip_H, *norm;        // D of SSD, or null; weights of the norm, or null
    int64_t norm_groups, norm_width;   // parts of a row with a mean each; numbers of ``norm``, which repeat
    int64_t gate_first;
    double least_step, greatest_step, scale, eps;
    Parallel parallel;
};

// The rows of a forward: see contracts.recurrence.RecurrencePlan. Either entries are chains whose last state is wanted, or all
// states are.
struct Forward {
    int64_t rows, entries;
    const int64_t *starts, *parents, *given, *sources;
    const int64_t* targets;  // [T]: the slot for the state after a row, or -1
};
}

namespace {

// Work that threads share, and how much of it is done.
struct Phase {
    std::atomic<int64_t> next{0};
    int64_t done = 0;
};

struct Task {
    const Mixer* mixer;
    const Forward* forward;
    void* out;
    const void *x, *rates;  // rates of the delta rule: H of beta, then H of steps
    int64_t stride, rates_stride;
    void* kept;      // pool [S, W - 1, C]
    float* states;   // pool [S, H, K, V]
    int64_t piece;   // rows that run from the convolution to the norm before the next ones begin
    // Of the rows of a piece: [C] convolved, [2H] decays and shares, [H, V] read; see ``room_of``.
    float *mixed, *gates, *read;
    Phase* phases;  // three for each piece
};

constexpr int64_t TAPS_AT_MOST = 8, KEYS_AT_MOST = 256;
constexpr int64_t ROWS_AT_MOST = 128;  // rows of a piece

typedef void (*Mix)(void*);

}  // namespace

// By ``types``; null where this compiler does not make them.
extern const Mix quire_mix_portable[2], quire_mix_avx2[2], quire_mix_avx512[2];
// The body of a parallel region over a Task: what the threads of a level of rows.h run.
extern "C" Mix quire_begin_mix(const Mixer* mixer);

namespace {

// Floats of a row in a Task: convolved, read, gates.
INLINE int64_t mixed_floats(const Mixer& mixer) {
    return mixer.kind == CONVOLUTION ? 0 : mixer.channels + 2 * mixer.heads + mixer.heads * mixer.values;
}

// Where ``place`` has room for the rows of a piece.
INLINE void take_room(Task& task, float* place) {
    const Mixer& mixer = *task.mixer;
    task.mixed = place, task.read = place + task.piece * mixer.channels;
    task.gates = task.read + task.piece * mixer.heads * mixer.values;
}

}  // namespace
