// The kernels for any processor.
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
