"""Using a trained model: quantised weights, distillation, generation, batching, serving.

quantization.py  weights as small integers with scales, and what that costs
products.py      linear layers and embeddings on them
"""
