"""The device functions ``tvmf_*`` that stand before a kernel, with C++ in place of their inline PTX.

A function's own source is compiled; each ``asm`` statement becomes what ``INSTRUCTIONS`` has for its instruction. To
add an instruction, add a pattern of its name and a function that writes C++ from its operands. In that C++, ``line`` is
the line of the kernel's call.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from ..errors import CompilerError


def _array(operands: list[str], kind: str, name: str) -> tuple[str, str, str]:
    """Operands as an array: C++ before, the array, and C++ that takes values back from it.

    Operands that are ``p[0], p[1], …`` are the array ``p``, which makes less code, and are checked to be in it.
    """
    base = operands[0].removesuffix("[0]")
    if operands == [f"{base}[{number}]" for number in range(len(operands))]:
        return f"ROOM({base}, {len(operands)});", base, ""
    values = ", ".join(f"SimtCast<{kind}>({operand})" for operand in operands)
    back = " ".join(f"SimtSet({operand}, {name}[{n}]);" for n, operand in enumerate(operands))
    return f"{kind} {name}[] = {{{values}}};", name, back


def _load_matrix(name: re.Match, operands: list) -> str:
    before, target, back = _array(operands[0], "unsigned", "simt_d")
    transposed = "true" if name[2] else "false"
    return (
        f"{before} simt::LoadMatrix({target}, {operands[1]}, {name[1]}, {transposed}, line); {back}"
    )


def _multiply(kind: str) -> Callable[[re.Match, list], str]:
    def write(name: re.Match, operands: list) -> str:
        if operands[0] != operands[3]:
            raise CompilerError("matrix instructions are emulated with sums that they add to")
        d, a, b = (
            _array(operands[n], "unsigned" if n else "float", f"simt_{'dab'[n]}") for n in range(3)
        )
        return f"{d[0]} {a[0]} {b[0]} simt::Multiply(simt::{kind}, {d[1]}, {a[1]}, {b[1]}, line); {d[2]}"

    return write


def _multiply_warpgroup(name: re.Match, operands: list) -> str:
    sums, rows, columns, add, *rest = operands
    before, d, back = _array(sums, "float", "simt_d")
    if back or len(sums) * 2 != int(name[1]):
        raise CompilerError("sums of wgmma are emulated where they are a part of one array")
    if add not in ("0", "1") or rest[:2] != ["1", "1"] or not set(rest[2:]) <= {"0", "1"}:
        raise CompilerError("wgmma is emulated without scales")
    kind = {"f16": "kHalf", "bf16": "kBfloat16"}[name[2]]
    arguments = (
        f"simt::{kind}, {name[1]}, {d}, {rows}, {columns}, {add}, {' + 2 * '.join(rest[2:])}, line"
    )
    return f"{before} simt::MultiplyWarpgroup({arguments});"


def _copy_async(name: re.Match, operands: list) -> str:
    to, source, size = operands[:3]
    # Without a source size, all is copied.
    read = operands[3] if len(operands) > 3 else size
    return f"simt::CopyAsync({to}, (const void*)({source}), {size}, {read}, line);"


def _store(name: re.Match, operands: list) -> str:
    address, values = operands
    values = values if isinstance(values, list) else [values]
    before, array, _ = _array(values, "unsigned", "simt_v")
    return f"{before} {_move('Store', name[1], address, array, len(values))}"


def _load(name: re.Match, operands: list) -> str:
    targets, address = operands
    targets = targets if isinstance(targets, list) else [targets]
    before, array, back = _array(targets, "unsigned", "simt_v")
    return f"{before} {_move('Load', name[1], address, array, len(targets))} {back}"


def _move(function: str, space: str, address: str, array: str, count: int) -> str:
    if space == "global":
        address, function, rest = f"(void*)({address})", f"simt::{function}", f"{4 * count}"
    else:
        cluster = "true" if space.endswith("cluster") else "false"
        function, rest = f"simt::{function}Shared", f"{4 * count}, {cluster}"
    first, second = (address, array) if "Store" in function else (array, address)
    return f"{function}({first}, {second}, {rest}, line);"


def _bulk_load(name: re.Match, operands: list) -> str:
    to, tensor_map, places, _, barrier = operands
    if len(places) != int(name[1]):
        raise CompilerError(f"a copy of {name[1]} axes has {len(places)} coordinates")
    values = ", ".join(places)
    return (
        f"const int simt_c[] = {{{values}}}; "
        f"simt::BulkLoad({to}, (const simt::Map*)({tensor_map}), simt_c, {name[1]}, {barrier}, line);"
    )


def _unary(expression: str) -> Callable[[re.Match, list], str]:
    return lambda name, operands: f"{operands[0]} = {expression.format(operands[1])};"


def _round(even: str) -> Callable[[re.Match, list], str]:
    # The result is a register of 32 bits, declared as a float or not.
    return lambda name, operands: f"SimtSet({operands[0]}, simt::RoundTf32({operands[1]}, {even}));"


_FLOAT = r"(?:\.approx)?(?:\.ftz)?\.f32"

#: What is compiled for an instruction, by a pattern of its whole name.
INSTRUCTIONS: dict[str, Callable[[re.Match, list], str]] = {
    r"ldmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared(?:::cta)?\.b16": _load_matrix,
    r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.f16\.f16\.f32": _multiply("kHalf"),
    r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.bf16\.bf16\.f32": _multiply("kBfloat16"),
    r"mma\.sync\.aligned\.m16n8k8\.row\.col\.f32\.tf32\.tf32\.f32": _multiply("kTf32"),
    r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.(b?f16)\.\2": _multiply_warpgroup,
    r"wgmma\.fence\.sync\.aligned": lambda name, operands: "simt::WarpgroupFence(line);",
    r"wgmma\.commit_group\.sync\.aligned": lambda name, operands: "simt::WarpgroupCommit(line);",
    r"wgmma\.wait_group\.sync\.aligned": lambda name, operands: f"simt::WarpgroupWait({operands[0]}, line);",
    r"fence\.proxy\.async(?:\.shared::cta)?": lambda name, operands: "simt::ProxyFence();",
    # An empty statement only keeps the compiler from moving code; calls into the emulation do so too.
    r"": lambda name, operands: ";",
    r"cp\.async\.c[ag]\.shared(?:::cta)?\.global(?:\.L2::\w+)*": _copy_async,
    r"cp\.async\.commit_group": lambda name, operands: "simt::Commit();",
    r"cp\.async\.wait_group": lambda name, operands: f"simt::Wait({operands[0]});",
    r"cp\.async\.wait_all": lambda name, operands: "simt::Commit(); simt::Wait(0);",
    r"st(?:\.volatile)?\.(shared(?:::\w+)?|global)[\w.:]*?(?:\.v[24])?\.[bufs]32": _store,
    r"ld(?:\.volatile)?\.(shared(?:::\w+)?|global)[\w.:]*?(?:\.v[24])?\.[bufs]32": _load,
    r"(?:bar|barrier)\.sync(?:\.aligned)?": lambda name, operands: _barrier(operands),
    r"mapa\.shared::cluster\.u32": lambda name, operands: (
        "{} = simt::MapRank({}, {}, line);".format(*operands)
    ),
    r"barrier\.cluster\.arrive[\w.]*": lambda name, operands: "simt::ClusterArrive(line);",
    r"barrier\.cluster\.wait[\w.]*": lambda name, operands: "simt::ClusterWait(line);",
    r"bar\.warp\.sync": lambda name, operands: f"simt::WarpBarrier({operands[0]}, line);",
    r"mbarrier\.init(?:\.shared(?:::cta)?)?\.b64": lambda name, operands: (
        f"simt::BarrierInit({operands[0]}, {operands[1]}, line);"
    ),
    r"mbarrier\.arrive\.expect_tx\.shared(?:::cta)?\.b64": lambda name, operands: (
        f"simt::BarrierArrive({operands[1]}, {operands[2]}, line);"
    ),
    r"mbarrier\.arrive\.shared(?:::cta)?\.b64": lambda name, operands: (
        f"simt::BarrierArrive({operands[1]}, 0, line);"
    ),
    r"fence\.mbarrier_init\.release\.cluster": lambda name, operands: "simt::PublishBarriers();",
    r"cp\.async\.bulk\.tensor\.(\d)d\.shared::cluster\.global(?:\.tile)?\.mbarrier::complete_tx::bytes": _bulk_load,
    r"setmaxnreg\.(?:inc|dec)\.sync\.aligned\.u32": lambda name, operands: "simt::Registers(line);",
    # Order among launches and threads that the emulation has anyway.
    r"griddepcontrol\.\w+|fence\.[\w.:]+|membar\.\w+|prefetch\w*\.[\w.:]+": lambda name, operands: ";",
    r"cvt\.rna\.tf32\.f32": _round("false"),
    r"cvt\.rn\.tf32\.f32": _round("true"),
    rf"ex2{_FLOAT}": _unary("std::exp2({})"),
    rf"lg2{_FLOAT}": _unary("std::log2({})"),
    rf"rcp{_FLOAT}": _unary("1.0f / ({})"),
    rf"rsqrt{_FLOAT}": _unary("1.0f / std::sqrt({})"),
    rf"sqrt{_FLOAT}": _unary("std::sqrt({})"),
    rf"tanh{_FLOAT}": _unary("std::tanh({})"),
    rf"sin{_FLOAT}": _unary("std::sin({})"),
    rf"cos{_FLOAT}": _unary("std::cos({})"),
}  # fmt: skip


#: The same for the whole text of several statements in one ``asm``.
SEQUENCES: dict[str, Callable[[re.Match, list[str]], str]] = {
    r"\{ \.reg \.pred p; mbarrier\.try_wait\.parity\.shared(?:::cta)?\.b64 p, \[%(\d)\], %(\d); "
    r"selp\.u32 %(\d), 1, 0, p; \}": lambda found, operands: (
        "{2} = simt::BarrierWait({0}, {1}, line);".format(*(operands[int(n)] for n in found.groups()))
    ),
}  # fmt: skip


def _barrier(operands: list) -> str:
    if operands != ["0"]:
        raise CompilerError("barriers of part of a block are not emulated")
    return "simt::Barrier(line);"


_CALL = re.compile(r"\b(tvmf_\w+)\s*\(")
_DEFINITION = re.compile(
    r"^(?:template <[^\n]*>\n)?__device__ [^\n;{]*?\b(tvmf_\w+)\(([^)]*)\)\s*\{", re.MULTILINE
)
_FOR_DEVICE = re.compile(r"#ifdef __CUDA_ARCH__\n.*?#else\n(.*?)#endif\n", re.DOTALL)
_ASM = re.compile(r"\b(?:__)?asm(?:__)?(?:\s+(?:__)?volatile(?:__)?)?\s*\(")
_STRING = re.compile(r'\s*"((?:[^"\\]|\\.)*)"')
_OPERAND = re.compile(r'\s*,?\s*"[^"]*"\s*\(')


def device_functions(head: str, kernels: str) -> str:
    """Return the C++ of the device functions that kernels call.

    Parameters
    ----------
    head : str
        The source before the kernels, with the CUDA definitions.
    kernels : str
        The source of the kernels.

    Raises
    ------
    CompilerError
        If a function is not defined or has an instruction that is not emulated.
    """
    defined = {match[1]: match for match in _DEFINITION.finditer(head)}
    done: dict[str, str] = {}

    def need(text: str) -> None:
        for name in dict.fromkeys(_CALL.findall(text)):
            if name in done:
                continue
            if name not in defined:
                raise CompilerError(f"the kernel calls {name}, which the source does not define")
            done[name] = ""  # a function may call itself
            made = _function(head, defined[name])
            need(made)
            # After the functions that it calls.
            del done[name]
            done[name] = made

    need(kernels)
    return "".join(done.values())


def _function(head: str, match: re.Match) -> str:
    """C++ of a device function."""
    name, first = match[1], match.start(2)
    body = _FOR_DEVICE.sub(r"\1", head[match.end() : _closing(head, match.end() - 1)])
    # The line of the call is one more argument. A barrier passes it on.
    body = re.sub(r"\b__sync(threads|warp)\(\)", r"SimtSync_\1(line)", body)
    parameters = f"{match[2]}, LINE" if match[2].strip() else "LINE"
    try:
        body = _without_asm(body)
    except CompilerError as error:
        raise CompilerError(f"the kernel calls {name}: {error}") from error
    start = f'#line {head.count(chr(10), 0, match.start()) + 1} "kernel.cu"\n'
    return f"{start}{head[match.start() : first]}{parameters}) {{{body}\n"


def _closing(text: str, start: int, brackets: str = "{}") -> int:
    """Position behind the bracket that closes the one at ``start``; brackets in strings have to be in pairs."""
    depth = 0
    for position in range(start, len(text)):
        depth += (text[position] == brackets[0]) - (text[position] == brackets[1])
        if depth == 0:
            return position + 1
    raise CompilerError(f"a bracket is not closed: {text[start : start + 80]}")


def _without_asm(text: str) -> str:
    """Replace the ``asm`` statements."""
    while (match := _ASM.search(text)) is not None:
        end = _closing(text, match.end() - 1, "()")
        inside, ptx, position = text[match.end() : end - 1], "", 0
        while (part := _STRING.match(inside, position)) is not None:
            ptx += part[1].replace("\\n", " ").replace("\\t", " ")
            position = part.end()
        operands = []
        # Behind the instruction come ``: outputs : inputs : clobbers``, the last of strings alone.
        while position < len(inside):
            found = _OPERAND.match(inside, position)
            if found is None:
                position += 1
                continue
            position = _closing(inside, found.end() - 1, "()")
            operands.append(inside[found.end() : position - 1])
        tail = text[end:].lstrip().removeprefix(";")
        text = f"{text[: match.start()]}{{ {_instruction(ptx, operands)} }}{tail}"
    return text


def _instruction(ptx: str, operands: list[str]) -> str:
    """C++ of an instruction."""
    for sequence, write_all in SEQUENCES.items():
        if (whole := re.fullmatch(sequence, ptx.strip())) is not None:
            return write_all(whole, operands)
    name, _, rest = ptx.strip().rstrip(";").strip().partition(" ")
    for pattern, write in INSTRUCTIONS.items():
        found = re.fullmatch(pattern, name)
        if found is not None and ";" not in rest:
            return write(found, _arguments(rest, operands))
    raise CompilerError(
        f"its PTX instruction {ptx.strip()} is not emulated; see INSTRUCTIONS of "
        "tvm_fusion/testing/_cuda_device.py"
    )


def _arguments(text: str, operands: list[str]) -> list:
    """The arguments of an instruction: ``{%0, %1}, [%2], 16`` with C++ for ``%0``."""

    def expression(part: str) -> str:
        part = part.strip().removeprefix("[").removesuffix("]")
        return re.sub(r"%(\d+)", lambda number: operands[int(number[1])], part)

    parts = [part.strip() for part in re.findall(r"\{[^}]*\}|[^,{}]+", text) if part.strip()]
    return [
        [expression(item) for item in part[1:-1].split(",")] if part[0] == "{" else expression(part)
        for part in parts
    ]
