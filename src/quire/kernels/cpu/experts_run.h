// A mixture of experts inside of a parallel region: the router's product and choice, the experts' products with the work on rows between
// them. The sum of a token's results is left to who calls this, which may do more with a row.
//
// Pairs are sorted by expert. Some of them are a wave: gate and up of all its experts, the work on these rows, all down products. A wave
// is small enough for its rows to stay in caches, so that only its weights come from memory. The products of a wave are begun one after
// the other, and nobody waits between them.
//
// Letters: as in experts.h.

#pragma once

#include "experts.h"

namespace {

// Pairs of a wave for each thread, and at least.
constexpr int64_t WAVE_OF_ONE = 256, LEAST_WAVE = 512;

// Memory in parts that begin at lines of a cache; first counted, then given.
struct Memory {
    intptr_t base;  // 0: counted
    int64_t used = 0;
    template <typename S>
    S* take(int64_t count) {
        S* found = (S*)(base + used);
        used += (count * (int64_t)sizeof(S) + 63) / 64 * 64;
        return found;
    }
};

// An expert's rows of a wave.
struct Piece {
    LinearCall gate_up, down;
    Multiply run_gate_up, run_down;
};

template <typename T>
struct Wave {
    Piece *first, *end;
    Gather<T> gather;
    GateRows<T> gate;

    // ``next``: the product behind this wave, or null.
    bool go(Worker& worker, const LinearCall* next) {
        expect(worker, &first->gate_up);
        if (gather.rows.count) do_rows(gather, worker);
        for (Piece* piece = first; piece < end; piece++)
            if (piece->run_gate_up(&piece->gate_up, worker.number); piece->gate_up.failed) return false;
        expect(worker, &first->down);
        for (Piece* piece = first; piece < end; piece++) worker.wait(piece->gate_up.done, piece->gate_up.items);
        do_rows(gate, worker);
        expect(worker, next);
        for (Piece* piece = first; piece < end; piece++)
            if (piece->run_down(&piece->down, worker.number); piece->down.failed) return false;
        for (Piece* piece = first; piece < end; piece++) worker.wait(piece->down.done, piece->down.items);
        return true;
    }

    // Where an item has all rows, a thread's items are neighbours in memory.
    static void expect(Worker& worker, const LinearCall* call) { worker.expect(call && call->items == call->parts ? call : nullptr); }

    bool failed() const {
        for (const Piece* piece = first; piece < end; piece++)
            if (piece->gate_up.failed || piece->down.failed) return true;
        return false;
    }
};

// The work of a mixture over some tokens, each pair's result included.
template <typename T>
struct MixtureRun {
    const Mixture& mixture;
    const T* x;
    T* out;
    int64_t rows, x_stride, pairs, threads, width, inner, columns, most;
    float* weights;
    int64_t* chosen;
    Chooser<T>* chooser = nullptr;
    int32_t *places, *tokens, *ends;  // [P] each, [X]
    Piece* pieces;
    Wave<T>*waves, *shared_waves;
    int64_t num_waves = 0, num_shared = 0;
    T *gathered, *both, *inside, *results, *shared = nullptr;
    ChoiceSum<T> sum;  // for who calls ``go``
    std::atomic<int64_t> planners{0};
    int64_t planned = 0;

    static int64_t most_pairs(int64_t threads) { return WAVE_OF_ONE * threads > LEAST_WAVE ? WAVE_OF_ONE * threads : LEAST_WAVE; }
    int64_t most_pieces() const { return (pairs < mixture.experts->count ? pairs : mixture.experts->count) + pairs / most + 1; }

    // ``own`` is for this run alone. Runs that go one after the other may share ``room``: only who has taken an item works in it.
    MixtureRun(const Mixture& of, T* y, const T* from, int64_t stride, const float* given_weights, const int64_t* given_choice,
               int64_t count, int64_t on, Memory& own, Memory& room)
        : mixture(of), x(from), out(y), rows(count), x_stride(stride), pairs(count * of.choices), threads(on),
          width(of.experts->down[0]->outputs), inner(of.experts->down[0]->inputs), columns(columns_of(of.experts->gate, inner)),
          most(most_pairs(on)), sum{{count, piece_of(width * of.choices)}} {
        const int64_t at_once = pairs < most ? pairs : most, shared_at_once = rows < most ? rows : most;
        const SharedMaps* both_maps = of.shared;
        const int64_t shared_inner = both_maps ? both_maps->down->inputs : 0;
        const int64_t shared_columns = both_maps ? columns_of(both_maps->gate, shared_inner) : 0;
        const auto larger = [](int64_t a, int64_t b) { return a > b ? a : b; };
        weights = room.take<float>(pairs), chosen = room.take<int64_t>(of.router ? pairs : 0);
        float* logits = room.take<float>(of.router ? Chooser<T>::floats(*of.router, rows) : 0);
        chooser = own.take<Chooser<T>>(of.router ? 1 : 0);
        places = room.take<int32_t>(pairs), tokens = room.take<int32_t>(pairs), ends = room.take<int32_t>(of.experts->count);
        const int64_t shared_count = both_maps ? (rows + most - 1) / most : 0;
        pieces = own.take<Piece>(most_pieces() + shared_count);
        waves = own.take<Wave<T>>(most_pieces()), shared_waves = own.take<Wave<T>>(shared_count);
        gathered = room.take<T>(at_once * width);
        both = room.take<T>(larger(at_once * columns, shared_at_once * shared_columns));
        inside = room.take<T>(larger(at_once * inner, shared_at_once * shared_inner));
        results = room.take<T>(pairs * width);
        if (both_maps) shared = room.take<T>(rows * width);
        if (!room.base) return;
        if (of.router)
            new (chooser) Chooser<T>(*of.router, logits, weights, chosen, x, stride, rows, threads);
        else
            weights = (float*)given_weights, chosen = (int64_t*)given_choice;
        for (int64_t wave = 0; wave < shared_count; wave++) {
            const int64_t first = rows * wave / shared_count, end = rows * (wave + 1) / shared_count;
            Piece* piece = pieces + wave;
            new (shared_waves + wave) Wave<T>{piece, piece + 1, {{0, 1}},
                                              {{end - first, piece_of(shared_columns)}, inside, both, shared_columns, shared_inner, both_maps->gate}};
            begin(piece, both_maps->gate_up, both_maps->down, x + first * stride, stride, end - first, both, inside, shared + first * width);
        }
        pieces += shared_count, num_shared = shared_count;
        sum.out = y, sum.y = results, sum.places = places, sum.weights = weights, sum.choices = of.choices, sum.width = width;
        sum.shared = shared, sum.x = x, sum.x_stride = stride, sum.weight = both_maps ? (const T*)both_maps->weight : nullptr;
    }

    void begin(Piece* piece, const Linear* gate_up, const Linear* down, const T* from, int64_t stride, int64_t count, T* to, T* then, T* y) {
        piece->run_gate_up = quire_begin_linear(&piece->gate_up, gate_up, to, from, stride, count, threads);
        piece->run_down = quire_begin_linear(&piece->down, down, y, then, down->inputs, count, threads);
    }

    // Sort the pairs, and make pieces and waves of them.
    void plan() {
        const int64_t count = mixture.experts->count, choices = mixture.choices;
        std::memset(ends, 0, sizeof(int32_t) * count);
        for (int64_t pair = 0; pair < pairs; pair++) ends[chosen[pair]]++;
        for (int64_t expert = 0, start = 0; expert < count; expert++) {
            const int32_t some = ends[expert];
            ends[expert] = (int32_t)start, start += some;
        }
        for (int64_t pair = 0; pair < pairs; pair++) {
            places[pair] = ends[chosen[pair]]++;
            tokens[places[pair]] = (int32_t)(pair / choices);
        }
        Piece* piece = pieces;
        Wave<T>* wave = nullptr;
        int64_t taken = 0, copied = 0;  // pairs of the wave, and copies of tokens
        for (int64_t expert = 0, start = 0; expert < count; start = ends[expert++]) {
            const int64_t all = ends[expert] - start, parts = (all + most - 1) / most;
            for (int64_t part = 0; part < parts; part++) {
                const int64_t first = start + all * part / parts, some = start + all * (part + 1) / parts - first;
                if (!wave || taken + some > most) {
                    if (wave) close(wave, piece, taken, copied);
                    wave = waves + num_waves++, taken = copied = 0;
                    new (wave) Wave<T>{piece, piece, {{0, 1}}, {{0, 1}}};
                }
                // One token is read where it is; the copies of others follow each other.
                const T* from = x + tokens[first] * x_stride;
                if (some > 1) {
                    from = gathered + copied * width;
                    std::memmove(tokens + first - (taken - copied), tokens + first, some * sizeof(int32_t));
                    copied += some;
                }
                begin(piece++, mixture.experts->gate_up[expert], mixture.experts->down[expert], from, some > 1 ? width : x_stride, some,
                      both + taken * columns, inside + taken * inner, results + first * width);
                taken += some;
            }
        }
        if (wave) close(wave, piece, taken, copied);
    }

    // ``piece``: the one behind the wave's last.
    void close(Wave<T>* wave, Piece* piece, int64_t taken, int64_t copied) {
        Piece* const first = wave->first;
        const int64_t start = ((T*)first->down.y - results) / width;
        wave->~Wave<T>();
        new (wave) Wave<T>{first, piece, {{copied, piece_of(width)}, gathered, x, x_stride, width, tokens + start},
                           {{taken, piece_of(columns)}, inside, both, columns, inner, mixture.experts->gate}};
    }

    // The first product, if it is known before the choice; else null.
    const LinearCall* first() const {
        if (num_shared) return &pieces[-num_shared].gate_up;
        return mixture.router && chooser->product.map ? &chooser->product : nullptr;
    }

    // ``next``: the product behind the sum, or null. Return false without memory.
    bool go(Worker& worker, const LinearCall* next) {
        for (int64_t i = 0; i < num_shared; i++)
            if (!shared_waves[i].go(worker, i + 1 < num_shared ? &shared_waves[i + 1].first->gate_up : nullptr)) return false;
        if (mixture.router && !chooser->go(worker)) return false;
        if (planners.fetch_add(1) == 0) {
            plan();
            __atomic_store_n(&planned, 1, __ATOMIC_RELEASE);
        } else {
            worker.expect(nullptr);
            worker.wait(planned, 1);
        }
        for (int64_t i = 0; i < num_waves; i++)
            if (!waves[i].go(worker, i + 1 < num_waves ? &waves[i + 1].first->gate_up : next)) return false;
        return true;
    }

    bool failed() const {
        if (mixture.router && chooser->product.failed) return true;
        for (int64_t i = 0; i < num_shared; i++)
            if (shared_waves[i].failed()) return true;
        for (int64_t i = 0; i < num_waves; i++)
            if (waves[i].failed()) return true;
        return false;
    }
};

}  // namespace
