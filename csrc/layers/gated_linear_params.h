// Arguments of gated_linear. Apart from params.h, which every kernel includes.
#pragma once
#include "params.h"

namespace pyengine {

// out = act(gate) * up, with dtype and out_dtype fp32. The weight has twice out_features columns, in panels turn about of the
// gate and of what it gates; the bias is [2, out_features], the gate's first.
struct GatedLinearParams : LinearParams {
  GatedActivation activation;  // kSilu or kGeluTanh
};

}  // namespace pyengine
