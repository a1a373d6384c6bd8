"""The small in-box inference server: vLLM's HTTP dialect, continuous batching with transformers, its own process.

Run it with `python -m prorl_gym.embedded --model DIR`. Nothing is imported here, so that `import prorl_gym.embedded`
needs no torch.
"""
