"""Sixteen float32 lanes as a value in Numba's functions, and numbers in bfloat16, which Numba does not know.

Compilers may not reorder sums of floats, so a sum that is to be quick, and to have the same bits wherever it is
compiled into, has to be written in lanes. bfloat16 stands in arrays of uint16: the upper half of a float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

binding.initialize_native_asmparser()  # for `add_pairs`

_F32, _I16, _I32 = ir.FloatType(), ir.IntType(16), ir.IntType(32)
_LANES = ir.VectorType(_F32, 16)


def operation(typing: Callable[..., Any]) -> Any:
    """A function that is compiled to the instructions which its typing gives for the types of a call."""
    return intrinsic(typing)


class Lanes(types.Type):
    """<16 x float>."""

    def __init__(self) -> None:
        super().__init__("Lanes")


lanes = Lanes()


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, _LANES)


def _vector(element: ir.Type) -> ir.VectorType:
    return ir.VectorType(element, 16)


def _each(element: ir.Type, value: int) -> ir.Constant:
    return ir.Constant(_vector(element), [value] * 16)


_STORED: dict[Any, ir.Type] = {types.float32: _F32, types.uint16: _I16}


def _pointer(context: Any, builder: ir.IRBuilder, kind: types.Array, array: Any, at: Any) -> Any:
    data = context.make_array(kind)(context, builder, array).data
    return builder.gep(data, [at])


def _load(builder: ir.IRBuilder, pointer: Any, element: ir.Type) -> Any:
    """Sixteen float32 or bfloat16 in a row, at any address."""
    value = builder.load(builder.bitcast(pointer, _vector(element).as_pointer()), align=2)
    if element is _F32:
        return value
    return builder.bitcast(builder.shl(builder.zext(value, _vector(_I32)), _each(_I32, 16)), _LANES)


@operation
def load(_: Any, array: Any, at: Any) -> Any:
    """The lanes array[at : at + 16]; of float32, or bfloat16 as uint16. Nothing checks the bounds."""

    def code(context: Any, builder: ir.IRBuilder, _: Any, args: Any) -> Any:
        return _load(builder, _pointer(context, builder, array, *args), _STORED[array.dtype])

    return (lanes(array, types.int64), code) if array.dtype in _STORED else None


@operation
def store(_: Any, array: Any, at: Any, value: Any) -> Any:
    """array[at : at + 16] = value, of float32. Nothing checks the bounds."""

    def code(context: Any, builder: ir.IRBuilder, _: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, array, *args[:2])
        builder.store(args[2], builder.bitcast(pointer, _LANES.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(array, types.int64, lanes), code


@operation
def splat(_: Any, value: Any) -> Any:
    """The same number in every lane."""

    def code(_: Any, builder: ir.IRBuilder, __: Any, args: Any) -> Any:
        return _splat(builder, args[0])

    return lanes(types.float32), code


def _splat(builder: ir.IRBuilder, scalar: Any) -> Any:
    one = builder.insert_element(ir.Constant(ir.VectorType(scalar.type, 16), ir.Undefined), scalar, _I32(0))
    return builder.shuffle_vector(one, one, _each(_I32, 0))


@operation
def fma(_: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once; of lanes, or of float32."""

    kind, element = (lanes, _LANES) if isinstance(a, Lanes) else (types.float32, _F32)

    def code(_: Any, builder: ir.IRBuilder, __: Any, args: Any) -> Any:
        return _fma(builder, element, *args)

    return kind(kind, kind, kind), code


def _fma(builder: ir.IRBuilder, kind: ir.Type, *args: Any) -> Any:
    name = f"llvm.fma.{'v16f32' if kind is _LANES else 'f32'}"
    known = ir.FunctionType(kind, [kind] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, known, name), args)


@operation
def plus(_: Any, a: Any, b: Any) -> Any:
    """a + b of lanes."""

    def code(_: Any, builder: ir.IRBuilder, __: Any, args: Any) -> Any:
        return builder.fadd(*args)

    return lanes(lanes, lanes), code


@operation
def total(_: Any, value: Any) -> Any:
    """The sum of all lanes, by halves."""

    def code(_: Any, builder: ir.IRBuilder, __: Any, args: Any) -> Any:
        rest, width = args[0], 16
        while width > 1:
            width //= 2
            low, high = (
                builder.shuffle_vector(rest, rest, ir.Constant(ir.VectorType(_I32, width), [*range(at, at + width)]))
                for at in (0, width)
            )
            rest = builder.fadd(low, high)
        return builder.extract_element(rest, _I32(0))

    return types.float32(lanes), code


@operation
def add_column(_: Any, into: Any, address: Any, value: Any) -> Any:
    """Adds to sixteen outputs what a column of inputs gives to each; the outputs' weights for it are at `address`.

    `value` is an input in float32, or a pair of inputs in bfloat16 (as uint32; the machine must have AVX512_BF16).
    """

    def alone(_: Any, builder: ir.IRBuilder, __: Any, args: Any) -> Any:
        into, address, value = args
        weights = _load(builder, builder.inttoptr(address, _F32.as_pointer()), _F32)
        return _fma(builder, _LANES, weights, _splat(builder, value), into)

    def pair(_: Any, builder: ir.IRBuilder, __: Any, args: Any) -> Any:
        into, address, value = args
        pairs = _vector(_I32)
        weights = builder.load(builder.inttoptr(address, pairs.as_pointer()), align=4)
        kind = ir.FunctionType(_LANES, (_LANES, pairs, pairs))
        operands = (into, weights, _splat(builder, value))
        return builder.asm(kind, "vdpbf16ps $3, $2, $0", "=v,0,v,v", operands, side_effect=False)

    code = {types.float32: alone, types.uint32: pair}.get(value)
    return (lanes(lanes, types.int64, value), code) if code else None


@operation
def get(_: Any, array: Any, at: Any) -> Any:
    """The float32 that array[at] stands for. Nothing checks the bounds."""

    def code(context: Any, builder: ir.IRBuilder, _: Any, args: Any) -> Any:
        value = builder.load(_pointer(context, builder, array, *args))
        if array.dtype == types.float32:
            return value
        return builder.bitcast(builder.shl(builder.zext(value, _I32), _I32(16)), _F32)

    return (types.float32(array, types.int64), code) if array.dtype in _STORED else None


@operation
def put(_: Any, array: Any, at: Any, value: Any) -> Any:
    """array[at] = value, rounded to the nearest number that can be stored, ties to even. Nothing checks the bounds."""

    def code(context: Any, builder: ir.IRBuilder, _: Any, args: Any) -> Any:
        value = args[2]
        if array.dtype == types.uint16:
            raw = builder.bitcast(value, _I32)
            odd = builder.and_(builder.lshr(raw, _I32(16)), _I32(1))
            near = builder.lshr(builder.add(builder.add(raw, _I32(0x7FFF)), odd), _I32(16))
            ordered = builder.fcmp_ordered("ord", value, value)
            value = builder.trunc(builder.select(ordered, near, _I32(0x7FC0)), _I16)
        builder.store(value, _pointer(context, builder, array, *args[:2]))
        return context.get_dummy_value()

    return types.void(array, types.int64, types.float32), code


@operation
def power_of_two(_: Any, exponent: Any) -> Any:
    """2**exponent, of a whole float32 from -126 to 127."""

    def code(_: Any, builder: ir.IRBuilder, __: Any, args: Any) -> Any:
        biased = builder.add(builder.fptosi(args[0], _I32), _I32(127))
        return builder.bitcast(builder.shl(biased, _I32(23)), _F32)

    return types.float32(types.float32), code
