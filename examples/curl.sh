#!/bin/sh
# The HTTP API with curl alone: examples/curl.sh [BASE_URL]
set -eu
base=${1:-http://127.0.0.1:8000}

# A completion.
curl --silent --show-error --fail "$base/v1/completions" -H "Content-Type: application/json" \
  -d '{"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}'
echo

# A chat, streamed: one "data:" line for each piece, then "data: [DONE]".
curl --silent --show-error --fail --no-buffer "$base/v1/chat/completions" -H "Content-Type: application/json" \
  -d '{"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8, "temperature": 0, "stream": true}'
