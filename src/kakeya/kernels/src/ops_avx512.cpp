// The kernels for processors with AVX-512 (F, BW, VL, DQ) and VNNI.
#include "ops_tables.h"

#if KAKEYA_X86

#include <immintrin.h>

#include "lanes_common.h"

// From here to the end this file is compiled for AVX-512; ops.cpp asks the processor before it comes here.
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")
#endif

namespace kakeya {
namespace avx512 {
#include "lanes_avx512.h"
#include "unpack_kernel.h"
#include "rounding_kernel.h"
#include "product_kernel.h"
#include "rowwise_kernel.h"
#include "attention_kernel.h"
#include "choice_lanes_avx512.h"
#include "choice_kernel.h"
}  // namespace avx512

extern const Ops kAvx512Ops = {"avx512-vnni",
                               avx512::round_groups,
                               avx512::round_super,
                               avx512::product,
                               avx512::rms_norm_row,
                               avx512::gated_row,
                               avx512::store_kv,
                               avx512::attend,
                               avx512::choice_ops};

}  // namespace kakeya

#if defined(__clang__)
#pragma clang attribute pop
#endif

#endif  // KAKEYA_X86
