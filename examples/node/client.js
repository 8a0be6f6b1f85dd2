// Streams a completion from a pyengine server over gRPC: npm install, then
//
//   node client.js [--target HOST:PORT] [--max-tokens N] [--cancel-after N] [PROMPT]
//
// With --cancel-after the call is cancelled once that many tokens have come; the server frees its memory within a step.
'use strict';

const path = require('node:path');
const { parseArgs } = require('node:util');
const grpc = require('@grpc/grpc-js');
const protoLoader = require('@grpc/proto-loader');

const PROTOS = path.join(__dirname, '../../protos');

const { values: options, positionals } = parseArgs({
  allowPositionals: true,
  options: {
    target: { type: 'string', default: '127.0.0.1:50051' },
    'max-tokens': { type: 'string', default: '32' },
    'cancel-after': { type: 'string' },
  },
});
const maxTokens = Number(options['max-tokens']);
const cancelAfter = options['cancel-after'] === undefined ? Infinity : Number(options['cancel-after']);

const definition = protoLoader.loadSync('pyengine/v1/inference.proto', {
  includeDirs: [PROTOS],
  keepCase: true,
  defaults: true, // a message without text, say the one of an end-of-sequence token, has text ''
  enums: String,
  oneofs: true, // message[oneof name] says which of its fields is set
});
const { Inference } = grpc.loadPackageDefinition(definition).pyengine.v1;
const client = new Inference(options.target, grpc.credentials.createInsecure());

const request = {
  text: positionals[0] ?? 'The capital of France is',
  sampling: { max_tokens: maxTokens, temperature: 0 },
};
const call = client.Generate(request, { deadline: Date.now() + 120_000 });
let numTokens = 0;

call.on('data', (response) => {
  process.stdout.write(response.text);
  numTokens += response.token_ids.length;
  if (response.finish) {
    console.log(`\n[${response.finish.reason}, ${response.finish.usage.completion_tokens} tokens]`);
  } else if (numTokens >= cancelAfter) {
    call.cancel();
  }
});
call.on('error', (error) => {
  if (error.code === grpc.status.CANCELLED && numTokens >= cancelAfter) {
    console.log(`\n[cancelled after ${numTokens} tokens]`);
  } else {
    console.error(`error: ${grpc.status[error.code]}: ${error.details}`);
    process.exitCode = 1;
  }
});
call.on('status', () => client.close());
