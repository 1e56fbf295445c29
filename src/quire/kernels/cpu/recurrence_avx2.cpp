// Mixers of recurrent layers with AVX2: see recurrence_body.h.

#define REGISTER 32
#include <sched.h>

#include "recurrence.h"
#include "rows.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
#pragma GCC target("arch=x86-64-v3")
#define MOST 2
#include "recurrence_body.h"

const Mix quire_mix_avx2[2] = {mix<float>, mix<bfloat16>};
#else
const Mix quire_mix_avx2[2] = {};
#endif
