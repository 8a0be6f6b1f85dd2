#include "cuda_stream.h"

#include <dlfcn.h>

#include <stdexcept>
#include <string>

namespace pyengine {

void* CudaDevice::stream() const {
  using GetStream = int32_t (*)(int32_t device_index, void** stream);
  static const GetStream get_stream = [] {
    void* torch_cuda = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
    return torch_cuda == nullptr ? nullptr
                                 : reinterpret_cast<GetStream>(dlsym(torch_cuda, "aoti_torch_get_current_cuda_stream"));
  }();
  void* stream = nullptr;
  if (get_stream == nullptr) throw std::runtime_error("the installed torch has no CUDA support");
  if (get_stream(index_, &stream) != 0)
    throw std::runtime_error("torch has no current stream on CUDA device " + std::to_string(index_));
  return stream;
}

}  // namespace pyengine
