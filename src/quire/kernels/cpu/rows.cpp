// The entries of rows.h.
#include "rows.h"

namespace {

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
int best_level() {
    __builtin_cpu_init();
    return __builtin_cpu_supports("x86-64-v4") ? 2 : __builtin_cpu_supports("x86-64-v3") ? 1 : 0;
}
#else
int best_level() { return 0; }
#endif

// Numbers of a piece that a thread caps at a time.
constexpr int64_t CAPPED = 4096;

template <typename Work>
void run(Work& work, int64_t threads, Parallel parallel) {
    run_on(threads, runner<Work>(), &work, parallel);
}

template <typename T, typename W>
void norm(void* out, const void* x, int64_t stride, const void* weight, int64_t count, int64_t width, float eps, int64_t threads,
          Parallel parallel) {
    Norm<T, W> work = {{count, piece_of(width)}, (T*)out, (const T*)x, stride, (const W*)weight, width, eps};
    run(work, threads, parallel);
}

template <typename T, typename W>
void add_norm(void* out, void* y, int64_t y_stride, const void* x, int64_t x_stride, float scale, const void* weight, int64_t count,
              int64_t width, float eps, int64_t threads, Parallel parallel) {
    Residual<T, W> work = {{count, piece_of(width)}, (T*)y, (T*)y, y_stride, (const T*)x, x_stride, width, scale, nullptr, 0.f,
                           (T*)out, (const W*)weight, eps};
    run(work, threads, parallel);
}

template <typename T, typename A>
void gated(void* out, const void* x, int64_t stride, int64_t count, int64_t width, int64_t threads, Parallel parallel) {
    Gated<T, A> work = {{count, piece_of(width)}, (T*)out, (const T*)x, stride, width};
    run(work, threads, parallel);
}

template <typename T>
void gate_heads(void* y, const void* gate, int64_t stride, int64_t step, int64_t count, int64_t heads, int64_t width,
                int64_t gate_width, int64_t threads, Parallel parallel) {
    HeadGate<T> work = {{count, piece_of(heads * width)}, (T*)y, (const T*)gate, stride, step, heads, width, gate_width};
    run(work, threads, parallel);
}

template <typename T>
void clamped(void* out, const void* x, int64_t stride, int64_t count, int64_t width, float alpha, float limit, int64_t threads,
             Parallel parallel) {
    Clamped<T> work = {{count, piece_of(width)}, (T*)out, (const T*)x, stride, width, alpha, limit};
    run(work, threads, parallel);
}

template <typename T>
void weighed(void* y, const void* x, int64_t stride, const void* weight, int64_t count, int64_t width, int64_t outputs, int64_t threads,
             Parallel parallel) {
    Weighed<T> work = {{count, piece_of(width)}, (T*)y, (const T*)x, stride, (const T*)weight, width, outputs};
    run(work, threads, parallel);
}

template <typename T, typename W>
void place(void* out, const void* qkv, int64_t stride, int64_t count, int64_t heads, int64_t kv_heads, int64_t key_width,
           int64_t value_width, const float* cos, const float* sin, int64_t turn_stride, int64_t rotary, int64_t interleaved,
           const void* q_weight, const void* k_weight, float eps, void* k, void* v, const int64_t* slots, int64_t threads,
           Parallel parallel) {
    Place<T, W> work = {{count, piece_of((heads + kv_heads) * key_width)}, (T*)out, (const T*)qkv, stride, key_width, heads,
                        kv_heads, key_width, value_width, cos, sin, turn_stride, rotary, interleaved, (const W*)q_weight,
                        (const W*)k_weight, eps, (T*)k, (T*)v, slots};
    run(work, threads, parallel);
}

template <typename T>
void turn_last(void* out, const void* x, int64_t stride, int64_t step, int64_t count, int64_t heads, int64_t width, const float* cos,
               const float* sin, int64_t turn_stride, int64_t rotary, int64_t interleaved, int64_t threads, Parallel parallel) {
    TurnLast<T> work = {{count, piece_of(heads * width)}, (T*)out, (const T*)x, stride, step, heads, width, cos, sin, turn_stride, rotary,
                        interleaved};
    run(work, threads, parallel);
}

}  // namespace

// -- what Python calls -------------------------------------------------------------------------------------------------

// ``types``: 0 float32, 1 bfloat16, 2 bfloat16 with float32 weights. Strides: elements from row to row; a row is contiguous.
// ``parallel``: GOMP_parallel, or null.
extern "C" {

int quire_rows_now = best_level();

void quire_rms_norm(int64_t types, void* out, const void* x, int64_t stride, const void* weight, int64_t count, int64_t width,
                    float eps, int64_t threads, Parallel parallel) {
    (types == 0   ? norm<float, float>
     : types == 1 ? norm<bfloat16, bfloat16>
                  : norm<bfloat16, float>)(out, x, stride, weight, count, width, eps, threads, parallel);
}

// y becomes x + scale * y. ``weight`` null: no norm, nor ``out``.
void quire_add_rms_norm(int64_t types, void* out, void* y, int64_t y_stride, const void* x, int64_t x_stride, float scale,
                        const void* weight, int64_t count, int64_t width, float eps, int64_t threads, Parallel parallel) {
    (types == 0   ? add_norm<float, float>
     : types == 1 ? add_norm<bfloat16, bfloat16>
                  : add_norm<bfloat16, float>)(out, y, y_stride, x, x_stride, scale, weight, count, width, eps, threads, parallel);
}

void quire_soft_cap(float* x, int64_t count, float cap, int64_t threads, Parallel parallel) {
    SoftCap work = {{(count + CAPPED - 1) / CAPPED, 1}, x, CAPPED, count, cap};
    run(work, threads, parallel);
}

// ``activation``: 0 silu, 1 gelu, 2 gelu_tanh.
void quire_gated(int64_t types, int64_t activation, void* out, const void* x, int64_t stride, int64_t count, int64_t width,
                 int64_t threads, Parallel parallel) {
    if (types == 0)
        (activation == 0   ? gated<float, Silu>
         : activation == 1 ? gated<float, Gelu>
                           : gated<float, GeluTanh>)(out, x, stride, count, width, threads, parallel);
    else
        (activation == 0   ? gated<bfloat16, Silu>
         : activation == 1 ? gated<bfloat16, Gelu>
                           : gated<bfloat16, GeluTanh>)(out, x, stride, count, width, threads, parallel);
}

// ``step``: elements from the gate of a head to that of the next; ``gate_width``: that of a head, or 1.
void quire_gate_heads(int64_t types, void* y, const void* gate, int64_t stride, int64_t step, int64_t count, int64_t heads,
                      int64_t width, int64_t gate_width, int64_t threads, Parallel parallel) {
    (types == 0 ? gate_heads<float> : gate_heads<bfloat16>)(y, gate, stride, step, count, heads, width, gate_width, threads, parallel);
}

void quire_clamped(int64_t types, void* out, const void* x, int64_t stride, int64_t count, int64_t width, float alpha, float limit,
                   int64_t threads, Parallel parallel) {
    (types == 0 ? clamped<float> : clamped<bfloat16>)(out, x, stride, count, width, alpha, limit, threads, parallel);
}

void quire_weigh(int64_t types, void* y, const void* x, int64_t stride, const void* weight, int64_t count, int64_t width,
                 int64_t outputs, int64_t threads, Parallel parallel) {
    (types == 0 ? weighed<float> : weighed<bfloat16>)(y, x, stride, weight, count, width, outputs, threads, parallel);
}

// ``weights`` of norms: null for none. ``rotary`` 0: nothing turns.
void quire_place_qkv(int64_t types, void* out, const void* qkv, int64_t stride, int64_t count, int64_t heads, int64_t kv_heads,
                     int64_t key_width, int64_t value_width, const float* cos, const float* sin, int64_t turn_stride,
                     int64_t rotary, int64_t interleaved, const void* q_weight, const void* k_weight, float eps, void* k, void* v,
                     const int64_t* slots, int64_t threads, Parallel parallel) {
    (types == 0   ? place<float, float>
     : types == 1 ? place<bfloat16, bfloat16>
                  : place<bfloat16, float>)(out, qkv, stride, count, heads, kv_heads, key_width, value_width, cos, sin,
                                            turn_stride, rotary, interleaved, q_weight, k_weight, eps, k, v, slots, threads,
                                            parallel);
}

// ``stride``, ``step``: elements from row to row of x, and from head to head.
void quire_turn_last(int64_t types, void* out, const void* x, int64_t stride, int64_t step, int64_t count, int64_t heads, int64_t width,
                     const float* cos, const float* sin, int64_t turn_stride, int64_t rotary, int64_t interleaved, int64_t threads,
                     Parallel parallel) {
    (types == 0 ? turn_last<float> : turn_last<bfloat16>)(out, x, stride, step, count, heads, width, cos, sin, turn_stride, rotary,
                                                          interleaved, threads, parallel);
}

// Run at this level, or the processor's if that is lower, from now on; return the level that runs. For tests.
int64_t quire_rows_level(int64_t asked) {
    int64_t best = best_level();
    quire_rows_now = (int)(asked < best ? asked : best);
    return quire_rows_now;
}
}
