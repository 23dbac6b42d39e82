// The kernels for any processor.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
// As fast as with -O3, which takes GCC four times as long: longer than everything else together.
#pragma GCC optimize("O2")
#endif
#include "lanes_common.h"
#include "ops_tables.h"

namespace kakeya {
namespace generic {
#include "lanes_generic.h"
#include "unpack_kernel.h"
#include "rounding_kernel.h"
#include "product_kernel.h"
#include "rowwise_kernel.h"
#include "attention_kernel.h"
#include "choice_lanes_generic.h"
#include "choice_kernel.h"
}  // namespace generic

extern const Ops kGenericOps = {"generic",
                                generic::round_groups,
                                generic::round_super,
                                generic::product,
                                generic::rms_norm_row,
                                generic::gated_row,
                                generic::store_kv,
                                generic::attend,
                                generic::choice_ops};

}  // namespace kakeya
