"""What torch does today that this library steps around. A canary that fails is good news: torch
changed, and the detour that the message names may go."""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch import Tensor

from zero_fn import autodiff

from .memory import peak
from .processes import run_on_processes


def tell(what: str) -> str:
    return f"torch changed: {what}"


def functional_collectives() -> dict[str, str]:
    """What torch's own differentiable collectives do under torch.func, on a real group."""
    import torch.distributed._functional_collectives as funcol

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    said: dict[str, str] = {}
    x = torch.ones(2)

    def total(x: Tensor) -> Tensor:
        return funcol.all_reduce_autograd(x, "sum", dist.group.WORLD).sum()  # type: ignore[attr-defined]

    def gathered(x: Tensor) -> Tensor:
        return funcol.all_gather_tensor_autograd(x, 0, dist.group.WORLD).sum()

    for name, f in (("all_gather", gathered), ("all_reduce", total)):
        try:
            said[f"{name} grad"] = str(torch.func.grad(f)(x).tolist())
        except Exception as error:
            said[f"{name} grad"] = f"{type(error).__name__}: {error}"

    def raw(x: Tensor) -> Tensor:
        out = torch.ops._c10d_functional.all_reduce(x, "sum", dist.group.WORLD.group_name)
        return torch.ops._c10d_functional.wait_tensor(out)

    try:
        said["jvp"] = str(torch.func.jvp(raw, (x,), (x,))[1].tolist())
    except Exception as error:
        said["jvp"] = f"{type(error).__name__}: {error}"
    return said


def test_torchs_functional_collectives_under_torch_func() -> None:
    for said in run_on_processes(2, functional_collectives):
        refused = "setup_context", "cannot use C++ torch::autograd::Function"  # torch 2.11's words
        assert any(words in said["all_gather grad"] for words in refused), tell(
            f"its all-gather works under torch.func.grad: {said}; collectives.py may call it"
        )
        assert said["jvp"] == "[0.0, 0.0]", tell(
            f"the raw all-reduce has no silent zero tangent any more: {said}"
        )


def gathered_on_gloo() -> dict[str, str]:
    """What becomes of each dtype in a raw all-gather."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    said = {}
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.uint16, torch.uint8):
        try:
            out = torch.ops._c10d_functional.all_gather_into_tensor(
                torch.ones(2).to(dtype), 2, dist.group.WORLD.group_name
            )
            torch.ops._c10d_functional.wait_tensor(out)
            said[str(dtype)] = "gathered"
        except RuntimeError as error:
            said[str(dtype)] = str(error)
    return said


def test_gloo_carries_no_fp8_and_no_uint16() -> None:
    for said in run_on_processes(2, gathered_on_gloo):
        assert said.pop("torch.uint8") == "gathered"
        assert all("Invalid scalar type" in what for what in said.values()), tell(
            f"Gloo carries more dtypes: {said}; CARRIED of transport.py may shrink"
        )


def test_incoming_gradients_have_stride_0() -> None:
    """The backward of a collective makes them contiguous."""
    x, seen = torch.ones(2, requires_grad=True), []
    y = x.clone()
    y.register_hook(lambda grad: seen.append(grad.stride()))
    y.sum().backward()
    assert seen == [(0,)], tell("the gradient of a sum has memory of its own")


def test_torch_func_grad_keeps_what_a_pullback_frees() -> None:
    """autodiff.py differentiates by vjp without keeping the graph."""

    def f(x: Tensor) -> Tensor:
        for _ in range(16):
            x = x.sin()
        return x.sum()

    x = torch.randn(1 << 16)
    kept, freed = peak(lambda: torch.func.grad(f)(x)), peak(lambda: autodiff.grad(f)(x))
    assert kept > 1.4 * freed, tell(
        f"torch.func.grad needs {kept} bytes where vjp needs {freed}; autodiff.grad may be it"
    )


class Doubled(torch.autograd.Function):
    """The identity, with a backward that says so: twice the gradient."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


# Dynamo makes the instance that torch warns of.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_compile_over_torch_func_drops_a_functions_backward() -> None:
    def f(x: Tensor) -> Tensor:
        return Doubled.apply(x).sum()

    x = torch.ones(2)
    assert torch.func.grad(f)(x).tolist() == [2, 2]
    compiled = torch.compile(torch.func.grad(f), fullgraph=True, backend="eager")(x)
    assert compiled.tolist() == [1, 1], tell(
        "torch.compile keeps a custom backward under torch.func; allow_in_graph may go"
    )


def test_checkpoint_raises_under_torch_func() -> None:
    def f(x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(torch.sin, x, use_reentrant=False).sum()

    with pytest.raises(RuntimeError, match="saved tensor hooks"):
        torch.func.grad(f)(torch.ones(2))


def test_a_custom_op_with_register_autograd_raises_under_torch_func() -> None:
    @torch.library.custom_op("zero_fn_canary::double", mutates_args=())
    def double(x: Tensor) -> Tensor:
        return 2 * x

    double.register_autograd(lambda ctx, g: 2 * g)
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda x: double(x).sum())(torch.ones(2))


def test_flash_attention_on_a_cpu_has_no_batching_rule() -> None:
    q = torch.randn(3, 2, 2, 8, 4)
    attend = torch.func.vmap(torch.nn.functional.scaled_dot_product_attention)
    torch._C._functorch._set_vmap_fallback_warning_enabled(True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        attend(q, q, q)
    assert any("batching rule" in str(w.message) for w in caught), tell(
        "flash attention on a CPU has a batching rule; kernels/flash_attention.py may go"
    )


def test_a_fused_adam_cannot_be_mapped() -> None:
    def f(p: Tensor) -> Tensor:
        x = [torch.zeros_like(p) for _ in range(3)]
        options: Any = {"beta1": 0.9, "beta2": 0.9, "eps": 1e-8, "weight_decay": 0.0}
        torch._fused_adamw_(
            [p], [x[0]], [x[1]], [x[2]], [], [torch.ones(())],
            lr=0.1, amsgrad=False, maximize=False, **options,
        )  # fmt: skip
        return p

    with pytest.raises(RuntimeError):
        torch.func.vmap(f)(torch.ones(2, 3))


def test_saved_tensors_outlive_their_level() -> None:
    """autodiff.py and kernels/ops.py unwrap what vjp's pullback hands to a Function's backward."""
    seen: list[bool] = []

    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(*inputs)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            seen.append(torch._C._functorch.is_gradtrackingtensor(x))
            assert not torch._C._functorch.is_gradtrackingtensor(
                torch._C._functorch.unwrap_if_dead(x)
            )
            return grad

    torch.func.vjp(lambda x: Watch.apply(x).sum(), torch.ones(2))[1](torch.ones(()))
    assert seen == [True], tell("saved tensors are unwrapped already")


def test_private_names_are_still_there() -> None:
    from torch._C import _functorch
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

    assert _functorch.peek_interpreter_stack() is None
    assert list(_get_current_dispatch_mode_stack()) == []
    assert _functorch.maybe_current_level() is None
    for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "wait_tensor"):
        assert hasattr(torch.ops._c10d_functional, name)


class Sine(torch.autograd.Function):
    """The sine, with derivatives of every order in either mode."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sin()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return tangent * x.cos()


def test_an_outer_jvp_is_silenced_inside_a_functions_jvp() -> None:
    def second(f: Any, x: Tensor) -> Tensor:
        one = torch.ones_like(x)
        return torch.func.jvp(lambda x: torch.func.jvp(f, (x,), (one,))[1], (x,), (one,))[1]

    x = torch.ones(2)
    torch.testing.assert_close(second(torch.sin, x), -x.sin())
    assert second(Sine.apply, x).tolist() == [0, 0], tell(
        "forward derivatives stay on inside a Function's jvp; remat's may use plain operations"
    )


def test_hooks_for_saved_tensors_work_inside_one_derivative_and_fail_silently_inside_two() -> None:
    """What zf.activation_offload stands on, and why it moves nothing inside two derivatives."""
    hooks = torch._C._autograd  # type: ignore[attr-defined]

    def hooked(x: Tensor) -> Tensor:
        refused = hooks._saved_tensors_hooks_get_disabled_error_message()
        assert refused is not None
        hooks._saved_tensors_hooks_enable()
        try:
            with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
                return x.sin().exp()
        finally:
            hooks._saved_tensors_hooks_disable(refused, False)

    x = torch.tensor(0.3, dtype=torch.float64)

    def plain(x: Tensor) -> Tensor:
        return x.sin().exp()

    grad = torch.func.grad
    assert torch.equal(grad(hooked)(x), grad(plain)(x))
    assert not torch.allclose(grad(grad(hooked))(x), grad(grad(plain))(x))
