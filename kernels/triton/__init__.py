"""Every op as Triton kernels: paged, split and merged for a GPU; runs on a CPU in the interpreter.

Each file: the jitted kernel, then the function of `ops` that launches it. Block sizes, warps and
stages come from tables of shapes, never from timing at run time: a result must not depend on other
work on the machine. With `TRITON_INTERPRET=1` set before the first import, the same kernels run on
CPU tensors in Triton's interpreter.
"""
