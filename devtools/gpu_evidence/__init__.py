"""GPU evidence within a budget: python -m devtools.gpu_evidence --budget 25m

    steps (ordered by value) -> a child process each: pytest -m gpu, or the benchmark -> journal -> summary, archive

The driver needs the standard library only; its children need torch, Triton, pytest and cuda-bindings.
"""
