// A mixture of experts in one call and one parallel region. The reference is quire/nn/experts.py; quire/kernels/experts.py calls this
// through ctypes. Letters: as in experts.h.
#include "experts_run.h"

namespace {

// Up to this many multiplications a call ends before a second thread begins.
constexpr int64_t ONE_THREAD = 1 << 16;

template <typename T>
struct AloneMixture {
    MixtureRun<T> run;
    std::atomic<int64_t> workers;
};

template <typename T>
void run_mixture(void* data) {
    auto& alone = *(AloneMixture<T>*)data;
    Worker worker(alone.workers);
    if (alone.run.go(worker, nullptr)) do_rows(alone.run.sum, worker);
}

template <typename T>
int mix(const Mixture& mixture, void* y, const void* x, int64_t x_stride, const float* weights, const int64_t* chosen, int64_t rows,
        int64_t threads) {
    const Linear& map = *mixture.experts->down[0];
    if (rows * mixture.choices * map.inputs * map.outputs <= ONE_THREAD) threads = 1;
    Memory needed{0};
    MixtureRun<T>(mixture, (T*)y, (const T*)x, x_stride, weights, chosen, rows, threads, needed, needed);
    Room memory;
    Memory room{(intptr_t)memory.of(needed.used / sizeof(float))};
    if (!room.base) return 1;
    AloneMixture<T> call{{mixture, (T*)y, (const T*)x, x_stride, weights, chosen, rows, threads, room, room}, {0}};
    run_on(threads, run_mixture<T>, &call, mixture.parallel);
    return call.run.failed();
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
