"""A step is believed by what it ran: counts of kernels, no dense attention, no compilation."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

from draftline.compiling import (
    FLASH_BACKWARD,
    FLASH_FORWARD,
    FLEX_BACKWARD,
    FLEX_FORWARD,
    SDPA,
    Expectation,
    compile_isolated,
    prepare_profiler,
    prove,
)
from draftline.errors import AttentionFallbackError

CPU = torch.device("cpu")
DISPATCHED = r"^aten::scaled_dot_product_attention$"


def two_layers() -> None:
    q = torch.ones(1, 2, 8, 16, requires_grad=True)
    scaled_dot_product_attention(scaled_dot_product_attention(q, q, q), q, q).sum().backward()


def test_a_step_that_ran_what_was_promised_is_proved_with_its_counts() -> None:
    proof = prove(two_layers, expect=Expectation({DISPATCHED: 2, FLEX_FORWARD: 0}), device=CPU)
    assert proof.counts == {DISPATCHED: 2, FLEX_FORWARD: 0}
    assert proof.events["aten::scaled_dot_product_attention"] == 2
    assert (proof.dense_calls, proof.compilations, proof.peak_memory_bytes) == (0, (), None)
    assert proof.thread == "MainThread"


def test_a_worker_thread_proves_its_own_step() -> None:
    prepare_profiler()
    with ThreadPoolExecutor(1, thread_name_prefix="drafter") as pool:
        proof = pool.submit(prove, two_layers, expect=Expectation({DISPATCHED: 2}), device=CPU).result(30)
    assert (proof.thread, proof.counts) == ("drafter_0", {DISPATCHED: 2})


def test_a_wrong_count_is_refused_with_what_ran_instead() -> None:
    with pytest.raises(AttentionFallbackError) as error:
        prove(two_layers, expect=Expectation({FLEX_FORWARD: 2, SDPA: 0}), device=CPU)
    message = str(error.value)
    assert f"/{FLEX_FORWARD}/ ran 0 times instead of 2" in message
    assert "2 x aten::scaled_dot_product_attention" in message
    assert error.value.exit_code == 9


def test_a_step_that_compiles_is_not_warm() -> None:
    cold = compile_isolated(lambda x: x.cos(), "cold", backend="eager")
    with pytest.raises(AttentionFallbackError, match=r"it compiled \(dynamo .* in MainThread\)"):
        prove(lambda: cold(torch.ones(3)), expect=Expectation({}), device=CPU)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_dense_flex_attention_is_refused_even_where_its_error_is_swallowed() -> None:
    def step() -> None:
        q = torch.ones(1, 1, 8, 16)
        try:
            flex_attention(q, q, q)
        except AttentionFallbackError:
            scaled_dot_product_attention(q, q, q)

    with pytest.raises(AttentionFallbackError, match="flex_attention ran dense 1 times"):
        prove(step, expect=Expectation({}), device=CPU)


def test_a_memory_bound_cannot_be_proved_on_a_cpu() -> None:
    with pytest.raises(ValueError, match="max_memory_bytes=1 cannot be proved on cpu"):
        prove(two_layers, expect=Expectation({}, max_memory_bytes=1), device=CPU)


FA4 = "kernel_cutlass_kernel_flash_attncuteflash_"


# Names as the profiler gave them on an H200 with PyTorch 2.11 and flash-attn-4 4.0.0b36.
@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("triton_tem_fused_flex_attention_0", FLEX_FORWARD),
        ("triton_tem_fused__to_copy_add_cat_flex_attention_mul_5", FLEX_FORWARD),
        ("triton_tem_fused_flex_attention_backward_1", FLEX_BACKWARD),
        ("triton_tem_fused__to_copy_flex_attention_flex_attention_backward_view_7", FLEX_BACKWARD),
        ("triton_red_fused_flex_attention_backward_0", None),
        ("triton_poi_fused_flex_attention_2", None),
        (f"{FA4}fwd_sm90FlashAttentionForwardSm90_object_at__tensor0000o41112104113_", FLASH_FORWARD),
        (f"{FA4}bwd_sm90FlashAttentionBackwardSm90_object_at__tensor0000o11101213_te", FLASH_BACKWARD),
        (f"{FA4}bwd_preprocessFlashAttentionBackwardPreprocess_object_at__tensorptrb", None),
        (f"{FA4}bwd_postprocessFlashAttentionBackwardPostprocess_object_at__tensorpt", None),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false", SDPA),
    ],
)
def test_the_patterns_count_each_attention_kernel_once(name: str, pattern: str | None) -> None:
    patterns = (FLEX_FORWARD, FLEX_BACKWARD, FLASH_FORWARD, FLASH_BACKWARD, SDPA)
    assert [each for each in patterns if re.search(each, name)] == ([] if pattern is None else [pattern])
