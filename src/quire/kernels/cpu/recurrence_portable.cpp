// Mixers of recurrent layers with vectors that any processor has: see recurrence_body.h.

#define REGISTER 16
#include <sched.h>

#include "recurrence.h"
#include "rows.h"

#define MOST 1
#include "recurrence_body.h"

const Mix quire_mix_portable[2] = {mix<float>, mix<bfloat16>};
