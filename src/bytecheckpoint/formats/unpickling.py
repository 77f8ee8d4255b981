"""Read pickles without executing them: a global is its name, and a call is a record of the name and its arguments.

This is an interpreter of its own, because Python's (`pickle.Unpickler`) is not safe even if `find_class` returns inert
objects: it hashes any tuple as a key, so nested tuples crash the process or take forever; it allocates a memo of the size
that an opcode names; BUILD sets attributes of the objects of `find_class`; extension codes bypass `find_class`.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from bytecheckpoint.errors import CorruptCheckpointError, IncompatibleCheckpointError
from bytecheckpoint.formats.alike_objects import SKIPPED, AlikeFinder, SharedError
from bytecheckpoint.formats.inert import (
    COUNTED,
    GATHERED,
    LINES,
    ON_STACK,
    SIMPLE,
    CallRecord,
    GlobalName,
    Meaning,
    append_items,
    build,
    set_items,
)  # fmt: skip
from bytecheckpoint.garbage_collection import gc_paused

__all__ = ["MAX_PICKLE_BYTES", "PickleEndsError", "read_pickle"]

#: Largest pickle; that of 300,000 chunks of a DCP checkpoint has 40 MB.
MAX_PICKLE_BYTES: Final = 1 << 30
#: Objects that any pickle may hold, and bytes of a larger pickle for each further object.
_FREE_OBJECTS, _BYTES_PER_OBJECT = 200_000, 3
#: Places that a pickle may leave out between two objects that it remembers.
_MEMO_GAP = 256
#: Opcodes between two checks of these limits.
_MANY = range(4096)
#: Modules of Python 2, whose names protocol 2 has.
_PYTHON_2 = {"__builtin__": "builtins", "copy_reg": "copyreg"}


class PickleEndsError(CorruptCheckpointError):
    """The bytes end inside the pickle. Handler: give more bytes, if there are any."""


def read_pickle(
    data: bytes,
    *,
    file: str,
    meanings: dict[str, Meaning],
    constants: dict[str, object] | None = None,
    persistent: Callable[[object], object] | None = None,
    start: int = 0,
    alike: bool = False,
) -> tuple[object, int]:
    """Return the value of one pickle, and the position of its end.

    Args:
        data: bytes that hold the pickle.
        file: name of the file, for messages.
        meanings: inert meanings of calls, by the full name of the global.
        constants: values of globals that are no calls, by full name.
        persistent: function that returns the object of a persistent id.
        start: position of the pickle.
        alike: True: `AlikeObjects` may stand for alike items of a list, and for alike keys and values of a dict.

    Raises:
        PickleEndsError: `data` ends before the pickle does.
        CorruptCheckpointError: `data` is no pickle.
        IncompatibleCheckpointError: the pickle is beyond the limits, or has opcodes that no checkpoint needs.
    """
    with gc_paused():
        if alike:
            with contextlib.suppress(Exception):  # the interpreter alone says what is wrong
                return _Reader(data, file, meanings, constants or {}, persistent).run(start, alike=True)
        reader = _Reader(data, file, meanings, constants or {}, persistent)
        try:
            return reader.run(start)
        except (IndexError, struct.error):  # of bytes, or of the stack
            at = min(reader.position, len(data))
            if at >= len(data) - 8:
                raise PickleEndsError(f"{file}: the pickle ends early, at byte {len(data)}", file=file) from None
            raise _damaged(file, at, "an opcode lacks its arguments") from None
        except IncompatibleCheckpointError as error:
            if file in str(error):
                raise
            raise IncompatibleCheckpointError(f"{file}: {error}") from None
        except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
            text = f"{type(error).__name__}: {str(error)[:200]}"
            raise _damaged(file, reader.position, text) from None


def _damaged(file: str, position: int, what: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{file}: its pickle is damaged near byte {position}: {what}", file=file)


@dataclass(slots=True)
class _Reader:
    """The interpreter of one pickle; its arguments are those of `read_pickle`."""

    _data: bytes
    _file: str
    _meanings: dict[str, Meaning]
    _constants: dict[str, object]
    _persistent: Callable[[object], object] | None
    position: int = 0
    _names: dict[tuple[str, str], object] = field(default_factory=dict)
    _stack: list[Any] = field(default_factory=list)
    _memo: list[Any] = field(default_factory=list)

    def run(self, start: int, *, alike: bool = False) -> tuple[object, int]:
        """Interpret the opcodes from a position up to STOP."""
        if len(self._data) - start > MAX_PICKLE_BYTES:
            self._refuse(f"its pickle has {len(self._data) - start} bytes, more than {MAX_PICKLE_BYTES}")
        data, stack, memo = self._data, self._stack, self._memo
        marks: list[int] = []  # lengths of the stack at the marks
        push, pop = stack.append, stack.pop
        most = room = _FREE_OBJECTS + (len(data) - start) // _BYTES_PER_OBJECT
        remember = memo.append
        uint32 = _UINT32
        runs = AlikeFinder(data, memo) if alike else None
        i = start
        # The frequent opcodes come first, and lie in this loop: a call for each would double the time.
        while True:
            if room < 0 or len(stack) > most or len(memo) > most:
                self._refuse(f"its pickle of {len(data) - start} bytes makes too many objects")
            for _ in _MANY:
                op = data[i]
                i += 1
                if op == 0x94:  # MEMOIZE
                    remember(stack[-1])
                elif op == 0x68:  # BINGET
                    push(found := memo[data[i]])
                    i += 1
                    if found is SKIPPED:
                        raise SharedError
                elif op == 0x6A:  # LONG_BINGET
                    push(found := memo[uint32(data, i)[0]])
                    i += 4
                    if found is SKIPPED:
                        raise SharedError
                elif op == 0x4B:  # BININT1
                    push(data[i])
                    i += 1
                elif op == 0x85:  # TUPLE1
                    stack[-1] = (stack[-1],)
                    room -= 1
                elif op == 0x52 or op == 0x81:  # noqa: PLR1714 - REDUCE and NEWOBJ; a set would take longer
                    args = pop()
                    target = stack[-1]
                    self.position = i
                    if type(target) is GlobalName and target.meaning is None and type(args) is tuple:
                        stack[-1] = CallRecord(target, args)
                    else:
                        stack[-1] = self._call(target, args)
                    room -= 1
                elif op == 0x28:  # MARK
                    marks.append(len(stack))
                    room -= 1
                elif op == 0x29:  # EMPTY_TUPLE
                    push(())
                elif op == 0x7D:  # EMPTY_DICT
                    push({})
                    room -= 1
                elif op == 0x75:  # SETITEMS
                    self.position = i
                    place = marks.pop()
                    items = stack[place:]
                    del stack[place:]
                    set_items(stack[-1], items)
                    if runs is not None:
                        runs.place(items)
                elif op == 0x62:  # BUILD
                    state = pop()
                    build(stack[-1], state)
                    if runs is not None:
                        self.position = i
                        i = runs.after(i, stack, marks)
                elif op == 0x8C:  # SHORT_BINUNICODE
                    end = i + 1 + data[i]
                    push(str(data[i + 1 : end], "utf-8", "surrogatepass"))
                    i = end
                    if end > len(data):
                        raise IndexError
                elif op == 0x86:  # TUPLE2
                    last = pop()
                    stack[-1] = (stack[-1], last)
                    room -= 1
                elif op == 0x4D:  # BININT2
                    push(data[i] | data[i + 1] << 8)
                    i += 2
                elif op == 0x4A:  # BININT
                    push(int.from_bytes(data[i : i + 4], "little", signed=True))
                    i += 4
                    if i > len(data):
                        raise IndexError
                elif op == 0x71:  # BINPUT
                    self._put_at(data[i])
                    i += 1
                elif op == 0x72:  # LONG_BINPUT
                    self._put_at(int.from_bytes(data[i : i + 4], "little"))
                    i += 4
                elif op == 0x87:  # TUPLE3
                    last, middle = pop(), pop()
                    stack[-1] = (stack[-1], middle, last)
                    room -= 1
                elif op == 0x65:  # APPENDS
                    place = marks.pop()
                    append_items(stack[place - 1], items := stack[place:])
                    del stack[place:]
                    if runs is not None:
                        runs.place(items)
                elif op == 0x5D:  # EMPTY_LIST
                    push([])
                    room -= 1
                elif op == 0x95:  # FRAME
                    i += 8
                elif op == 0x2E:  # STOP
                    if runs is not None:
                        runs.end()
                    return pop(), i
                else:
                    self.position = i
                    room -= 1
                    i = self._rare(op, i, marks)

    def _put_at(self, place: int) -> None:
        """Remember the last object at a place: the next one, one that is taken, or one a little further."""
        if place > len(self._memo) + _MEMO_GAP:
            raise ValueError(f"object {place} of {len(self._memo)}")
        self._memo += [None] * (place + 1 - len(self._memo))
        self._memo[place] = self._stack[-1]

    def _since_mark(self, marks: list[int]) -> list[Any]:
        """Take all objects since the last mark off the stack."""
        place = marks.pop()
        items = self._stack[place:]
        del self._stack[place:]
        return items

    def _take(self, i: int, count: int) -> bytes:
        if count < 0 or i + count > len(self._data):
            self.position = len(self._data)
            raise IndexError
        return self._data[i : i + count]

    def _line(self, i: int) -> tuple[bytes, int]:
        end = self._data.find(b"\n", i, i + 65536)
        if end < 0:
            self.position = len(self._data)
            raise IndexError
        return self._data[i:end], end + 1

    def _call(self, target: object, args: object) -> object:
        if type(target) is not GlobalName or type(args) is not tuple:
            raise TypeError(f"a call of a {type(target).__name__}")
        if target.meaning is None:
            return CallRecord(target, args)
        return target.meaning(*args)

    def _global(self, module: str, name: str) -> object:
        if type(module) is not str or type(name) is not str:
            raise TypeError("a global without a name")
        if (module, name) not in self._names:
            of = _PYTHON_2.get(module, module)
            full = f"{of}.{name}"
            found = GlobalName(of, name, self._meanings.get(full))
            self._names[module, name] = self._constants.get(full, found)
        return self._names[module, name]

    def _refuse(self, what: str) -> None:
        raise IncompatibleCheckpointError(f"{self._file}: {what}")

    def _rare(self, op: int, i: int, marks: list[int]) -> int:
        """Interpret an opcode that is not in the loop; return the position of the next one."""
        stack = self._stack
        if op in COUNTED:
            width, convert = COUNTED[op]
            count = int.from_bytes(self._take(i, width), "little")
            stack.append(convert(self._take(i + width, count)))
            return i + width + count
        if op in LINES:
            line, i = self._line(i)
            stack.append(LINES[op](line))
        elif op in GATHERED:
            stack.append(GATHERED[op](self._since_mark(marks)))
        elif op in SIMPLE:
            stack.append(SIMPLE[op])
        elif op == 0x47:  # BINFLOAT
            stack.append(struct.unpack(">d", self._take(i, 8))[0])
            return i + 8
        elif op in ON_STACK:
            ON_STACK[op](stack)
        elif op == 0x90:  # ADDITEMS
            items = self._since_mark(marks)
            append_items(stack[-1], items)
        elif op == 0x67:  # GET
            line, i = self._line(i)
            stack.append(self._memo[int(line)])
            if stack[-1] is SKIPPED:
                raise SharedError
        elif op == 0x70:  # PUT
            line, i = self._line(i)
            self._put_at(int(line))
        elif op == 0x30:  # POP
            (marks if marks and marks[-1] == len(stack) else stack).pop()
        elif op == 0x31:  # POP_MARK
            self._since_mark(marks)
        elif op == 0x93:  # STACK_GLOBAL
            name, module = stack.pop(), stack.pop()
            stack.append(self._global(module, name))
        elif op in {0x63, 0x69}:  # GLOBAL, INST
            module_line, i = self._line(i)
            line, i = self._line(i)
            found = self._global(module_line.decode(), line.decode())
            stack.append(self._call(found, tuple(self._since_mark(marks))) if op == 0x69 else found)
        elif op == 0x6F:  # OBJ
            target, *items = self._since_mark(marks)
            stack.append(self._call(target, tuple(items)))
        elif op == 0x92:  # NEWOBJ_EX
            kwargs, args = stack.pop(), stack.pop()
            made = stack[-1] = self._call(stack[-1], args)
            if type(made) is CallRecord and type(kwargs) is dict:
                made.kwargs = kwargs
            elif kwargs:
                raise TypeError("keyword arguments")
        elif op in {0x50, 0x51}:  # PERSID, BINPERSID
            if op == 0x50:
                line, i = self._line(i)
                stack.append(line.decode())
            if self._persistent is None:
                raise ValueError("a persistent id")
            stack[-1] = self._persistent(stack[-1])
        elif op == 0x80:  # PROTO
            if self._data[i] > 5:
                self._refuse(f"its pickle has protocol {self._data[i]}, this version reads up to 5")
            return i + 1
        elif op in {0x82, 0x83, 0x84}:
            self._refuse("its pickle has an extension code, which means something in one program only")
        elif op in {0x97, 0x98}:
            self._refuse("its pickle has buffers outside of it")
        else:
            raise ValueError(f"opcode {op:#04x}")
        return i


_UINT32 = struct.Struct("<I").unpack_from
