"""From logits to tokens.

A row of logits is sampled by functions of that row and its request alone, one row at a time: nothing else in the batch can
change a bit of the result. The order is vLLM's:

1. raw log-probabilities, from the logits as the model gave them;
2. allowed_token_ids, bad_words, min_tokens, logit_bias;
3. penalties: repetition, then frequency and presence;
4. the most likely token (greedy), or temperature, min_p, top_k, top_p and the draw.
"""
