"""Kernels in Triton's interpreter, on one thread of the CPU.

Nothing here is collected unless TRITON_INTERPRET=1: the variable decides which runner an engine gets, so it may not be
set for the other tests. `tests/test_interpreted.py` runs these files in processes of their own.
"""

import contextlib
import dataclasses
import os
from typing import Any

import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if INTERPRETED else ["test_*.py"]
torch.set_num_threads(1)


def _hurry() -> None:
    """Nearly all of the interpreter's time goes into types, shapes and wrappers; what it computes stays as it is."""
    _patch_less()
    _call_directly()
    _remember_types()
    _remember_shapes()
    _compare_quickly()
    _combine_alike()
    _reduce_at_once()


def _patch_less() -> None:
    """Patch the language once for each launch, not for each call inside it, and leave out overflow checks."""
    from triton.runtime import interpreter

    patch, launch, done = interpreter._patch_lang, interpreter.GridExecutor.__call__, set()
    unchecked = dataclasses.replace(interpreter.interpreter_builder.options, sanitize_overflow=False)

    def patch_once(function):
        home = id(function.__globals__)
        if home in done:
            return None
        done.add(home)
        return patch(function)

    def launch_anew(self, *args, **kwargs):
        done.clear()
        return launch(self, *args, **kwargs)

    interpreter.interpreter_builder.options = unchecked
    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch_anew


def _call_directly() -> None:
    """Builtins are looked for once, and called without the two wrappers around each."""
    import inspect

    from triton.language import core
    from triton.runtime import interpreter

    semantic, checks = interpreter.interpreter_semantic, core.builtin(lambda: None).__code__
    found: dict[Any, list[tuple[str, Any]]] = {}

    def direct(member):
        inner = member.__wrapped__ if getattr(member, "__code__", None) is checks else member

        def call(*args, **kwargs):
            kwargs["_semantic"] = semantic
            return inner(*args, **kwargs)

        return call

    def patch_builtin(home, builder, scope):
        if home not in found:
            found[home] = [(name, direct(m)) for name, m in inspect.getmembers(home) if core.is_builtin(m)]
        for name, member in found[home]:
            scope.set_attr(home, name, member)

    interpreter._patch_builtin = patch_builtin


def _remember_types() -> None:
    """NumPy's type for each of Triton's, looked up by name."""
    from triton.runtime import interpreter

    look_up, known = interpreter._get_np_dtype, {}

    def remembered(dtype):
        name = dtype.scalar.name
        if name not in known:
            known[name] = look_up(dtype)
        return known[name]

    interpreter._get_np_dtype = remembered


def _remember_shapes() -> None:
    """Each shape is checked and described once: types and tensors of that shape share it."""
    from triton.language import core

    begin, scalar = core.block_type.__init__, (core.constexpr(1), core.tuple([]))
    known: dict[tuple[int, ...], tuple[Any, ...]] = {}

    def block_type(self, element_ty, shape):
        key = tuple([s.value if type(s) is core.constexpr else s for s in shape])
        if key not in known:
            begin(self, element_ty, shape)
            whole = core.constexpr(self.numel), core.tuple([core.constexpr(s) for s in self.shape])
            known[key] = self.shape, self.numel, str(self.shape), whole
        self.element_ty = element_ty
        self.shape, self.numel, text, self.whole = known[key]
        self.name = f"<{text}, {element_ty}>"

    def tensor(self, handle, type):
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = type.whole if type.is_block() else scalar

    core.block_type.__init__, core.tensor.__init__ = block_type, tensor


def _compare_quickly() -> None:
    """What is the same object is equal; and two blocks of one shape need not be broadcast."""
    from triton.language import core, semantic

    equal, same_values = core.dtype.__eq__, core.tuple.__eq__
    broadcast, answers = semantic.TritonSemantic.broadcast_impl_value, (core.constexpr(False), core.constexpr(True))

    def same_type(self, other):
        return self is other or equal(self, other)

    def same_shape(self, other):
        if type(other) is list and all(type(x) is int for x in other):
            return answers[self.values == other]
        return same_values(self, other)

    def fit(self, lhs, rhs):
        if lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    core.dtype.__eq__, core.tuple.__eq__ = same_type, same_shape
    semantic.TritonSemantic.broadcast_impl_value = fit


def _combine_alike() -> None:
    """Operands of one common type need no conversion; and a number behind a tensor is made a tensor once.

    The text of a number tells 1 from 1.0 and 0.0 from -0.0, and shapes are shared: see `_remember_shapes`."""
    from triton.language import core, semantic

    check = semantic.TritonSemantic.binary_op_type_checking_impl
    common = {id(dtype) for dtype in (core.int32, core.int64, core.float32)}
    made: dict[tuple[Any, ...], Any] = {}

    def with_number(self, lhs, rhs, *how, **named):
        key = repr(rhs), id(lhs.dtype), id(lhs.shape), how, tuple(named.items())
        if key in made:
            return lhs, made[key]
        pair = check(self, lhs, rhs, *how, **named)
        if pair[0] is lhs:
            made[key] = pair[1]
        return pair

    def alike(self, lhs, rhs, *how, **named):
        if type(lhs) is core.tensor and id(lhs.dtype) in common:
            if type(rhs) is core.tensor and lhs.dtype is rhs.dtype:
                return self.broadcast_impl_value(lhs, rhs)
            if type(rhs) in (int, float):
                return with_number(self, lhs, rhs, *how, **named)
        return check(self, lhs, rhs, *how, **named)

    semantic.TritonSemantic.binary_op_type_checking_impl = alike


def _reduce_at_once() -> None:
    """Sorting takes the exclusive or of pairs: one call of NumPy, where the interpreter goes from element to element."""
    import numpy as np
    from triton.language import standard
    from triton.runtime import interpreter

    apply, either = interpreter.ReduceOps.apply_impl, standard._xor_combine

    def at_once(self, input):
        if self.combine_fn is not either:
            return apply(self, input)
        data = np.bitwise_xor.reduce(input[0].handle.data, axis=self.axis, keepdims=self.keep_dims)
        return self.to_tensor(data, input[0].dtype)

    interpreter.ReduceOps.apply_impl = at_once


if INTERPRETED:
    with contextlib.suppress(ImportError, AttributeError, TypeError):  # another Triton may look different: just slower
        _hurry()
