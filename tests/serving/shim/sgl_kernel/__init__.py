"""Plain-PyTorch stand-in for the CPU build of ``sgl_kernel``.

SGLang's CPU build of that package is not on PyPI (PyPI's ``sglang-kernel`` is
CUDA only). With ``SGLANG_USE_CPU_ENGINE=1``, SGLang 0.5.23 needs from it, for
Llama-like models with EAGLE-3 speculation, the functions below and two
attention operators. They are written from the contracts at their call sites and
from the Triton kernels that SGLang uses elsewhere, for clarity and not for
speed; ``shim_check.py`` holds each of them against those Triton kernels.

``convert_weight_packed`` is absent on purpose: SGLang's
``cpu_has_amx_support()`` then stays false and every layer takes its plain torch
path.
"""

from . import attention
from .slots import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
)
from .tree import (
    build_tree_kernel_efficient_cpu,
    fill_bonus_tokens_cpu,
    rotate_input_ids_cpu,
    verify_tree_greedy_cpu,
)

__version__ = "0.0.0+stand-in"

attention.register()

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
]
