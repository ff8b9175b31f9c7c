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
def prefetch(_: Any, array: Any, at: Any) -> Any:
    """Begins to fetch the cache line of array[at], which need not exist."""

    def code(context: Any, builder: ir.IRBuilder, _: Any, args: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        pointer = builder.bitcast(_pointer(context, builder, array, *args), byte)
        known = ir.FunctionType(ir.VoidType(), [byte, _I32, _I32, _I32])
        fetch = cgutils.get_or_insert_function(builder.module, known, "llvm.prefetch.p0")
        builder.call(fetch, [pointer, _I32(0), _I32(2), _I32(1)])  # to read, into the second cache, data
        return context.get_dummy_value()

    return types.void(array, types.int64), code


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
def larger(_: Any, a: Any, b: Any) -> Any:
    """The larger of each two lanes."""

    def code(_: Any, builder: ir.IRBuilder, __: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">", *args), *args)

    return lanes(lanes, lanes), code


@operation
def total(_: Any, value: Any) -> Any:
    """The sum of all lanes, by halves."""

    def code(_: Any, builder: ir.IRBuilder, __: Any, args: Any) -> Any:
        rest, width = args[0], 16
        while width > 1:
            width //= 2
            rest = builder.fadd(_part(builder, rest, 0, width), _part(builder, rest, width, width))
        return builder.extract_element(rest, _I32(0))

    return types.float32(lanes), code


@operation
def store_totals(_: Any, array: Any, at: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    """array[at : at + 4] = the sums of all lanes of a, b, c and d. array: float32. Nothing checks the bounds."""

    def code(context: Any, builder: ir.IRBuilder, _: Any, args: Any) -> Any:
        a, b, c, d = args[2:]
        rest, width = _halved(builder, 2, _halved(builder, 1, a, b), _halved(builder, 1, c, d)), 16
        while width > 4:  # the sums alternate
            width //= 2
            rest = builder.fadd(_part(builder, rest, 0, width), _part(builder, rest, width, width))
        pointer = _pointer(context, builder, array, *args[:2])
        builder.store(rest, builder.bitcast(pointer, ir.VectorType(_F32, 4).as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(array, types.int64, a, b, c, d), code


def _halved(builder: ir.IRBuilder, step: int, a: Any, b: Any) -> Any:
    """Sums of lanes `step` apart: by turns `step` of a and `step` of b."""
    one, two = (
        [lane for at in range(first, 16, 2 * step) for start in (at, 16 + at) for lane in range(start, start + step)]
        for first in (0, step)
    )
    low, high = (builder.shuffle_vector(a, b, ir.Constant(_vector(_I32), places)) for places in (one, two))
    return builder.fadd(low, high)


def _part(builder: ir.IRBuilder, value: Any, first: int, width: int) -> Any:
    places = ir.Constant(ir.VectorType(_I32, width), [*range(first, first + width)])
    return builder.shuffle_vector(value, value, places)


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


class Tile(types.Type):
    """Sums for 64 outputs of some rows: four `Lanes` a row."""

    def __init__(self, rows: int) -> None:
        super().__init__(f"Tile({rows})")
        self.rows = rows


@register_model(Tile)
class _TileModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Tile) -> None:
        super().__init__(manager, kind, ir.ArrayType(_LANES, 4 * kind.rows))


def tile(rows: int) -> Any:
    """An operation without arguments: a tile of zeros for so many rows."""

    def zeros(_: Any) -> Any:
        return Tile(rows)(), lambda context, _, kind, __: context.get_constant_null(kind.return_type)

    return operation(zeros)


@operation
def add_column(_: Any, sums: Any, kind: Any, address: Any, x: Any, row: Any, column: Any) -> Any:
    """Adds to a tile what a column of the inputs x, from `row` on, gives to 64 outputs with the weights at `address`.

    `kind` is any array with the dtype of the weights: float32 or int8, where a column is an input in float32, or
    bfloat16 as uint16, where it is a pair of inputs in bfloat16, as uint32 (takes AVX512_BF16's VDPBF16PS).
    """
    weight = {types.float32: _F32, types.uint16: _I32, types.int8: ir.IntType(8)}[kind.dtype]

    def code(context: Any, builder: ir.IRBuilder, _: Any, args: Any) -> Any:
        total, _, address, inputs, row, column = args
        first = builder.inttoptr(address, _vector(weight).as_pointer())
        weights = [builder.load(builder.gep(first, [_I32(part)]), align=1) for part in range(4)]
        if kind.dtype == types.int8:
            weights = [builder.sitofp(builder.sext(part, _vector(_I32)), _LANES) for part in weights]
        data = context.make_array(x)(context, builder, inputs)
        width = builder.extract_value(data.shape, 1)
        for at in range(sums.rows):
            index = builder.add(builder.mul(builder.add(row, row.type(at)), width), column)
            value = _splat(builder, builder.load(builder.gep(data.data, [index])))
            for part in range(4):
                place = 4 * at + part
                old = builder.extract_value(total, place)
                pairs = kind.dtype == types.uint16
                new = _add_pairs(builder, old, weights[part], value) if pairs else None
                new = new or _fma(builder, _LANES, weights[part], value, old)
                total = builder.insert_value(total, new, place)
        return total

    return sums(sums, kind, types.int64, x, types.int64, types.int64), code


def _add_pairs(builder: ir.IRBuilder, into: Any, a: Any, b: Any) -> Any:
    pairs = _vector(_I32)
    kind = ir.FunctionType(_LANES, (_LANES, pairs, pairs))
    return builder.asm(kind, "vdpbf16ps $3, $2, $0", "=v,0,v,v", (into, a, b), side_effect=False)


@operation
def store_tile(_: Any, out: Any, row: Any, at: Any, sums: Any) -> Any:
    """out[row + i, at : at + 64] = the sums of the tile's row i. out: float32."""

    def code(context: Any, builder: ir.IRBuilder, _: Any, args: Any) -> Any:
        array, row, at, total = args
        data = context.make_array(out)(context, builder, array)
        width = builder.extract_value(data.shape, 1)
        for index in range(sums.rows):
            start = builder.add(builder.mul(builder.add(row, row.type(index)), width), at)
            pointer = builder.bitcast(builder.gep(data.data, [start]), _LANES.as_pointer())
            for part in range(4):
                value = builder.extract_value(total, 4 * index + part)
                builder.store(value, builder.gep(pointer, [_I32(part)]), align=4)
        return context.get_dummy_value()

    return types.void(out, types.int64, types.int64, sums), code
