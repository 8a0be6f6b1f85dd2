// argmax: checks and launch. CPU only: on other devices torch's own is as good.
#if !defined(PE_EMULATED)
#include "../common/launch.h"

namespace pyengine {
namespace {

using torch::headeronly::ScalarType;

// token_ids, maxima [num_rows]; logits [num_rows, vocab_size]
void argmax(Tensor token_ids, Tensor maxima, const Tensor logits) {
  const char* op = "argmax";
  const TensorArg ids_arg(op, "token_ids", token_ids, 1), maxima_arg(op, "maxima", maxima, 1),
      logits_arg(op, "logits", logits, 2);
  ArgmaxParams p{};
  logits_arg.expect_dtype(ScalarType::Float);
  logits_arg.expect_dense(1);
  p.num_rows = logits_arg.size32(0, "num_rows");
  p.vocab_size = logits_arg.size32(1, "vocab_size");
  ids_arg.expect_dtype(ScalarType::Long);
  maxima_arg.expect_dtype(ScalarType::Float);
  for (const TensorArg* arg : {&ids_arg, &maxima_arg}) {
    arg->expect_same_device(logits_arg);
    arg->expect_size(0, "num_rows", p.num_rows, "logits");
    arg->expect_dense(0);
  }
  p.token_ids = ids_arg.data_as<int64_t>();
  p.maxima = maxima_arg.data_as<float>();
  p.logits = logits_arg.data_as<float>();
  p.logits_stride = logits_arg.stride(0);
  if (p.num_rows > 0 && p.vocab_size == 0) logits_arg.fail("has an empty vocabulary");
  if (p.num_rows > 0) cpu::launch(op, &cpu::KernelTable::argmax, p);
}

STABLE_TORCH_LIBRARY_IMPL(pyengine, CPU, library) { library.impl("argmax", TORCH_BOX(&argmax)); }

}  // namespace
}  // namespace pyengine

#endif
