"""Using a trained model: quantised weights, distillation, generation, batching, serving.

quantization.py  weights as small integers with scales, and what that costs
products.py      linear layers and embeddings on them
distillation.py  a student's loss against a teacher, in chunks
sampling.py      the next token from logits and a key
generation.py    zf.generate: prompts continued, a token at a time
requests.py      what waits for an answer, and figures
batching.py      zf.Batcher: single requests answered together, by length
continuous.py    zf.ContinuousBatcher: sequences that join and leave between tokens
model_files.py   a GPT in a folder
serving.py       the HTTP server
commands.py      zero-fn generate and zero-fn serve
"""
