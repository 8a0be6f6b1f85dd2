// The page at /: sends one prompt, shows its tokens as they come, and what the engine's gauges say meanwhile.
'use strict';

const POLL_MS = 500;
const at = (id) => document.getElementById(id);
let running = null; // AbortController of the request that runs

function headers() {
  const key = at('key').value;
  return { 'Content-Type': 'application/json', ...(key && { Authorization: `Bearer ${key}` }) };
}

// ---- the gauges

// Sums of the series of /metrics, by name without labels.
function readSeries(text) {
  const sums = new Map();
  for (const line of text.split('\n')) {
    const match = /^([a-z_:]+)(?:\{[^}]*\})? (\S+)/i.exec(line);
    if (match) sums.set(match[1], (sums.get(match[1]) ?? 0) + Number(match[2]));
  }
  return sums;
}

async function poll() {
  try {
    const answer = await fetch('metrics', { headers: { Accept: 'text/plain' } });
    if (answer.ok) {
      const series = readSeries(await answer.text());
      const usage = series.get('vllm:kv_cache_usage_perc');
      at('kv').value = usage;
      at('kv-text').textContent = `${(100 * usage).toFixed(1)} %`;
      at('running').textContent = series.get('vllm:num_requests_running');
      at('waiting').textContent = series.get('vllm:num_requests_waiting');
      const queries = series.get('vllm:prefix_cache_queries_total');
      at('hits').textContent = queries ? `${((100 * series.get('vllm:prefix_cache_hits_total')) / queries).toFixed(0)} %` : '–';
    }
  } catch (error) {
    for (const id of ['kv-text', 'running', 'waiting', 'hits']) at(id).textContent = '–'; // the server is away; asked again
  }
  setTimeout(poll, POLL_MS);
}

async function showModel() {
  const answer = await fetch('v1/models', { headers: headers() });
  at('model').textContent = answer.ok ? (await answer.json()).data[0].id : 'needs an API key';
}

// ---- a request

// The JSON objects of a stream of server-sent events.
async function* events(body) {
  const decoder = new TextDecoder();
  let text = '';
  for await (const piece of chunksOf(body)) {
    text += decoder.decode(piece, { stream: true });
    const parts = text.split('\n\n');
    text = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, '');
      if (data === '[DONE]') return;
      yield JSON.parse(data);
    }
  }
}

async function* chunksOf(body) {
  const reader = body.getReader();
  for (let read = await reader.read(); !read.done; read = await reader.read()) yield read.value;
}

function requestBody() {
  const prompt = at('prompt').value;
  const isChat = at('kind').value === 'chat';
  return {
    path: isChat ? 'v1/chat/completions' : 'v1/completions',
    body: {
      ...(isChat ? { messages: [{ role: 'user', content: prompt }] } : { prompt }),
      max_tokens: Number(at('max-tokens').value),
      temperature: Number(at('temperature').value),
      return_token_ids: true, // a piece may hold several tokens, or part of one
      stream: true,
    },
  };
}

async function generate() {
  running = new AbortController();
  at('go').disabled = true;
  at('stop').disabled = false;
  for (const id of ['answer', 'error']) at(id).textContent = '';
  for (const id of ['ttft', 'rate', 'tokens', 'reason']) at(id).textContent = '–';
  try {
    await stream(requestBody(), running.signal);
  } catch (error) {
    if (error.name === 'AbortError') at('reason').textContent = 'you';
    else at('error').textContent = error.message;
  }
  running.abort(); // what ended in an error here may still be under way at the server
  running = null;
  at('go').disabled = false;
  at('stop').disabled = true;
}

async function stream({ path, body }, signal) {
  const start = performance.now();
  let first = null;
  let numTokens = 0;
  const answer = await fetch(path, { method: 'POST', headers: headers(), body: JSON.stringify(body), signal });
  if (!answer.ok) throw new Error((await answer.json()).error.message);
  for await (const event of events(answer.body)) {
    if (event.error) throw new Error(event.error.message);
    for (const choice of event.choices) {
      const numNew = choice.token_ids?.length ?? 0;
      const now = performance.now();
      if (numNew > 0 && first === null) {
        first = { time: now, count: numNew };
        at('ttft').textContent = `${(now - start).toFixed(0)} ms`;
      }
      numTokens += numNew;
      at('answer').textContent += choice.delta?.content ?? choice.text ?? '';
      at('tokens').textContent = numTokens;
      if (first !== null && now > first.time) {
        at('rate').textContent = ((1000 * (numTokens - first.count)) / (now - first.time)).toFixed(1);
      }
      if (choice.finish_reason) at('reason').textContent = choice.finish_reason;
    }
  }
}

at('form').addEventListener('submit', (event) => {
  event.preventDefault();
  generate();
});
at('stop').addEventListener('click', () => running?.abort());
at('key').addEventListener('change', showModel);
at('prompt').addEventListener('keydown', (event) => {
  if (event.key === 'Enter' && (event.ctrlKey || event.metaKey)) at('form').requestSubmit();
});
showModel();
poll();
