// A mixture of experts in one call and one parallel region: the router's product and choice, the experts' products with the work on rows
// between them, the sum of their results. The reference is quire/nn/experts.py; quire/kernels/experts.py calls this through ctypes.
//
// Pairs are sorted by expert. Some of them are a wave: gate and up of all its experts, the work on these rows, all down products. A wave
// is small enough for its rows to stay in caches, so that only its weights come from memory. The products of a wave are begun one after
// the other, and nobody waits between them.
//
// Letters: as in experts.h.
#include "experts.h"

namespace {

// Pairs of a wave for each thread, and at least.
constexpr int64_t WAVE_OF_ONE = 256, LEAST_WAVE = 512;
// Up to this many multiplications a call ends before a second thread begins.
constexpr int64_t ONE_THREAD = 1 << 16;

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

    bool go(Worker& worker, const Wave* next) {
        expect(worker, &first->gate_up);
        if (gather.rows.count) do_rows(gather, worker);
        for (Piece* piece = first; piece < end; piece++)
            if (piece->run_gate_up(&piece->gate_up, worker.number); piece->gate_up.failed) return false;
        expect(worker, &first->down);
        for (Piece* piece = first; piece < end; piece++) worker.wait(piece->gate_up.done, piece->gate_up.items);
        do_rows(gate, worker);
        expect(worker, next ? &next->first->gate_up : nullptr);
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

// A call over some tokens.
template <typename T>
struct Run {
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
    ChoiceSum<T> mix;
    std::atomic<int64_t> workers{0}, planners{0};
    int64_t planned = 0;

    static int64_t most_pairs(int64_t threads) { return WAVE_OF_ONE * threads > LEAST_WAVE ? WAVE_OF_ONE * threads : LEAST_WAVE; }
    int64_t most_pieces() const { return (pairs < mixture.experts->count ? pairs : mixture.experts->count) + pairs / most + 1; }

    Run(const Mixture& of, T* y, const T* from, int64_t stride, const float* given_weights, const int64_t* given_choice, int64_t count,
           int64_t on, Memory& room)
        : mixture(of), x(from), out(y), rows(count), x_stride(stride), pairs(count * of.choices), threads(on),
          width(of.experts->down[0]->outputs), inner(of.experts->down[0]->inputs), columns(columns_of(of.experts->gate, inner)),
          most(most_pairs(on)), mix{{count, piece_of(width * of.choices)}} {
        const int64_t at_once = pairs < most ? pairs : most, shared_at_once = rows < most ? rows : most;
        const SharedMaps* both_maps = of.shared;
        const int64_t shared_inner = both_maps ? both_maps->down->inputs : 0;
        const int64_t shared_columns = both_maps ? columns_of(both_maps->gate, shared_inner) : 0;
        const auto larger = [](int64_t a, int64_t b) { return a > b ? a : b; };
        weights = room.take<float>(pairs), chosen = room.take<int64_t>(of.router ? pairs : 0);
        float* logits = room.take<float>(of.router ? Chooser<T>::floats(*of.router, rows) : 0);
        chooser = room.take<Chooser<T>>(of.router ? 1 : 0);
        places = room.take<int32_t>(pairs), tokens = room.take<int32_t>(pairs), ends = room.take<int32_t>(of.experts->count);
        const int64_t shared_count = both_maps ? (rows + most - 1) / most : 0;
        pieces = room.take<Piece>(most_pieces() + shared_count);
        waves = room.take<Wave<T>>(most_pieces()), shared_waves = room.take<Wave<T>>(shared_count);
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
        mix.out = y, mix.y = results, mix.places = places, mix.weights = weights, mix.choices = of.choices, mix.width = width;
        mix.shared = shared, mix.x = x, mix.x_stride = stride, mix.weight = both_maps ? (const T*)both_maps->weight : nullptr;
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

    void go() {
        Worker worker(workers);
        if (num_shared) {
            for (int64_t i = 0; i < num_shared; i++)
                if (!shared_waves[i].go(worker, i + 1 < num_shared ? shared_waves + i + 1 : nullptr)) return;
        }
        if (mixture.router && !chooser->go(worker)) return;
        if (planners.fetch_add(1) == 0) {
            plan();
            __atomic_store_n(&planned, 1, __ATOMIC_RELEASE);
        } else {
            worker.expect(nullptr);
            worker.wait(planned, 1);
        }
        for (int64_t i = 0; i < num_waves; i++)
            if (!waves[i].go(worker, i + 1 < num_waves ? waves + i + 1 : nullptr)) return;
        do_rows(mix, worker);
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

template <typename T>
void run_mixture(void* data) {
    ((Run<T>*)data)->go();
}

template <typename T>
int mix(const Mixture& mixture, void* y, const void* x, int64_t x_stride, const float* weights, const int64_t* chosen, int64_t rows,
        int64_t threads) {
    const Linear& map = *mixture.experts->down[0];
    if (rows * mixture.choices * map.inputs * map.outputs <= ONE_THREAD) threads = 1;
    Memory needed{0};
    Run<T>(mixture, (T*)y, (const T*)x, x_stride, weights, chosen, rows, threads, needed);
    Room memory;
    Memory room{(intptr_t)memory.of(needed.used / sizeof(float))};
    if (!room.base) return 1;
    Run<T> call(mixture, (T*)y, (const T*)x, x_stride, weights, chosen, rows, threads, room);
    run_on(threads, run_mixture<T>, &call, mixture.parallel);
    return call.failed();
}

template <typename T>
struct Alone {
    Chooser<T> chooser;
    std::atomic<int64_t> workers;
};

template <typename T>
void run_alone(void* data) {
    Alone<T>& alone = *(Alone<T>*)data;
    Worker worker(alone.workers);
    alone.chooser.go(worker);
}

template <typename T>
int choose_for(const RouterMap& router, Parallel parallel, float* weights, int64_t* chosen, const void* x, int64_t x_stride, int64_t rows,
               int64_t threads) {
    if (rows * router.width * router.routing.experts <= ONE_THREAD) threads = 1;
    Room memory;
    float* room = memory.of(Chooser<T>::floats(router, rows) + 1);
    if (!room) return 1;
    Alone<T> call{{router, room, weights, chosen, (const T*)x, x_stride, rows, threads}, {0}};
    run_on(threads, run_alone<T>, &call, parallel);
    return call.chooser.product.failed;
}

}  // namespace

extern "C" {

// Weights and experts [rows, K] of tokens. Return 0, or 1 without memory.
int quire_route(const RouterMap* router, Parallel parallel, int64_t is_bfloat16, float* weights, int64_t* chosen, const void* x,
                int64_t x_stride, int64_t rows, int64_t threads) {
    return (is_bfloat16 ? choose_for<bfloat16> : choose_for<float>)(*router, parallel, weights, chosen, x, x_stride, rows, threads);
}

// The choice of one row of logits [X], which are overwritten.
void quire_choose(const Routing* routing, float* logits, float* weights, int64_t* chosen) { route(*routing, logits, weights, chosen); }

// y [rows, E] of at least one token. ``weights`` and ``chosen`` [rows, K]: without a router. Return 0, or 1 without memory.
int quire_mixture(const Mixture* mixture, void* y, const void* x, int64_t x_stride, const float* weights, const int64_t* chosen,
                  int64_t rows, int64_t threads) {
    return (mixture->is_bfloat16 ? mix<bfloat16> : mix<float>)(*mixture, y, x, x_stride, weights, chosen, rows, threads);
}
}
