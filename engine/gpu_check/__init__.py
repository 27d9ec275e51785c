"""`python -m engine.gpu_check`: are the kernels right and fast on this GPU?"""
