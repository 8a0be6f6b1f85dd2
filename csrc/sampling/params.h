// Arguments of the sampling kernels: plain data that every backend shares. Strides are in elements.
#pragma once
#include <cstdint>

namespace pyengine {

// Repetition penalty on tokens of the prompt or the output, then frequency and presence penalties on those of the output.
struct PenaltiesParams {
  float* logits;                 // [num_rows, vocab_size]
  const bool* prompt_mask;       // [num_rows, vocab_size]: whether the prompt has the token
  const int32_t* output_counts;  // [num_rows, vocab_size]: how often the output has it
  const float* repetition;       // [num_rows], 1: none
  const float* presence;         // [num_rows], 0: none
  const float* frequency;        // [num_rows], 0: none
  int64_t logits_stride, prompt_mask_stride, output_counts_stride;
  int32_t num_rows, vocab_size;
};

// Sets the logits of tokens whose bit is 0 to -inf.
struct BitmaskParams {
  float* logits;           // [num_rows, vocab_size]
  const int32_t* bitmask;  // [num_rows, ceil(vocab_size / 32)], the lowest bit first
  int64_t logits_stride, bitmask_stride;
  int32_t num_rows, vocab_size;
};

// The largest logit of each row, and its token.
struct ArgmaxParams {
  int64_t* token_ids;   // [num_rows]: of equals the lowest id; the first NaN if there is one
  float* maxima;        // [num_rows]
  const float* logits;  // [num_rows, vocab_size]
  int64_t logits_stride;
  int32_t num_rows, vocab_size;
};

// Draws a token a row. min_p and top_k cut first, then top_p among what they left; see csrc/sampling/cuda/sample.cu.
struct SampleParams {
  int64_t* token_ids;        // [num_rows]; -1 where the row's largest logit is not finite or one is NaN
  const float* logits;       // [num_rows, vocab_size]; -inf: never drawn
  const float* temperature;  // [num_rows]; below 1e-30: the most likely token, the lowest id of equals
  const int32_t* top_k;      // [num_rows]; 0: off
  const float* top_p;        // [num_rows], in (0, 1]; 1: off
  const float* min_p;        // [num_rows], in [0, 1]; 0: off
  const int64_t* seeds;      // [num_rows], the request's
  const int64_t* positions;  // [num_rows], of the token in the output; (seed, position) decides the draw
  int64_t logits_stride;
  int32_t num_rows, vocab_size;
};

}  // namespace pyengine
