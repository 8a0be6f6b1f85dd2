// The CUDA device and stream that torch runs on, found without linking against torch's CUDA libraries.
#pragma once
#include <torch/csrc/stable/accelerator.h>

#include <cstdint>

namespace pyengine {

// Makes a device current for as long as it lives.
class CudaDevice {
 public:
  explicit CudaDevice(int32_t index) : guard_(index), index_(index) {}
  void* stream() const;  // torch's current stream there, a cudaStream_t

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  int32_t index_;
};

}  // namespace pyengine
