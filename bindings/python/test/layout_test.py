"""kvasir/_abi.py is the header: a C program tells sizes, offsets, constants and functions, and each option reaches its field."""
import ctypes
import enum
import graphlib
import os
import pathlib
import re
import shutil
import subprocess
import tempfile
import unittest

from support import kvasir

from kvasir import _abi, _core, enums, options

HEADER = pathlib.Path(os.environ["KVASIR_INCLUDE_DIR"], "kvasir.h")
STRUCTS = [v for v in vars(_abi).values() if isinstance(v, type) and issubclass(v, ctypes.Structure) and v is not ctypes.Structure]
ENUMS = {enums.Status: "KV_", enums.LogLevel: "KV_LOG_", enums.Phase: "KV_PHASE_", enums.KvType: "KV_KV_", enums.FilterWindow: "KV_FILTER_",
         enums.BudgetSchedule: "KV_BUDGET_", enums.StopReason: "KV_STOP_", enums.NumberType: "KV_"}


class Layout(unittest.TestCase):
    def told_by_c(self, expressions):
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if not compiler:
            self.skipTest("no C compiler")
        lines = "".join(f'printf("%llu\\n", (unsigned long long)({e}));' for e in expressions)
        with tempfile.TemporaryDirectory() as folder:
            source = pathlib.Path(folder, "layout.c")
            source.write_text(f'#include <stddef.h>\n#include <stdio.h>\n#include "kvasir.h"\nint main(void) {{{lines} return 0; }}\n', encoding="utf-8")
            subprocess.run([compiler, f"-I{HEADER.parent}", "-o", source.with_suffix(""), source], check=True)
            return [int(line) for line in subprocess.run([source.with_suffix("")], capture_output=True, text=True, check=True).stdout.split()]

    def test_structs_and_constants_are_the_header_s(self):
        expected = {}
        for struct in STRUCTS:
            expected[f"sizeof({struct.__name__})"] = ctypes.sizeof(struct)
            for name, *_ in struct._fields_:
                field = getattr(struct, name)
                expected[f"offsetof({struct.__name__}, {name})"] = field.offset
                expected[f"sizeof((({struct.__name__} *)0)->{name})"] = field.size
        for kind, prefix in ENUMS.items():
            expected.update({prefix + member.name: member.value for member in kind})
        for name in ("TOKENIZE_SPECIAL", "TOKENIZE_BOS", "TOKENIZE_DOCUMENT", "LOAD_VERIFY", "LIBRARY_VERIFY", "LIBRARY_NO_REPLACE"):
            expected["KV_" + name] = getattr(_abi, name)
        expected["KV_VERSION_NUMBER"] = _abi.HEADER_VERSION
        for (expression, value), told in zip(expected.items(), self.told_by_c(expected)):
            self.assertEqual(value, told, expression)

    def test_nothing_of_the_header_is_missing(self):
        text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(encoding="utf-8"), flags=re.S)
        functions = set(re.findall(r"KV_API[^;(]*?\b(kv_\w+)\(", text))
        bound = {*_abi._CALLS, *_abi._OTHERS, *(struct.__name__ + "_init" for struct in _abi.WITH_INIT)}
        self.assertEqual(functions, bound)
        self.assertEqual({"kv_" + name for name in re.findall(r"^(?:typedef enum kv_\w+ \{.*)?\} kv_(\w+);", text, re.M)},
                         {s.__name__ for s in STRUCTS} | set(re.findall(r"typedef enum (kv_\w+)", text)))
        numbers = set(re.findall(r"\b(KV_[A-Z0-9_]+) = \d+", text))
        self.assertEqual(numbers, {prefix + member.name for kind, prefix in ENUMS.items() for member in kind})
        for name, parameters in _abi._CALLS.items():
            declared = re.search(rf"\b{name}\((.*?)\);", text, re.S).group(1)
            self.assertEqual(len(declared.split(",")), len(parameters) + 1, name)

    def test_modules_do_not_import_each_other_in_a_circle(self):
        package = pathlib.Path(kvasir.__file__).parent
        imports = {path.stem: set(re.findall(r"^ *from \.(\w+) import", path.read_text(encoding="utf-8"), re.M)) for path in package.glob("*.py")}
        for path in package.glob("*.py"):
            for names in re.findall(r"^ *from \. import (.*)", path.read_text(encoding="utf-8"), re.M):
                imports[path.stem].update(names.split(", "))
        self.assertIn("_abi", imports["session"])
        list(graphlib.TopologicalSorter(imports).static_order())  # raises CycleError, with the circle

    def test_every_option_reaches_its_field(self):
        for struct, known in ((_abi.kv_model_options, options.ModelOptions), (_abi.kv_session_options, options.SessionOptions),
                              (_abi.kv_generate_options, options.GenerateOptions), (_abi.kv_library_options, options.LibraryOptions),
                              (_abi.kv_cache_options, options.StoreOptions), (_abi.kv_pack_options, options.PackOptions),
                              (_abi.kv_cache_attention_options, options.AttentionOptions), (_abi.kv_call_options, options.PrefillOptions)):
            fields = dict(struct._fields_)
            hidden = {"struct_size", "flags", "reserved", "log_user", "progress_user", "stop_count"}
            self.assertEqual(set(fields) - hidden, set(known.__annotations__) - {"special"}, struct)
            for name in set(known.__annotations__) - {"log", "progress", "cancel", "stop", "special"}:
                value = {ctypes.c_char_p: "text", ctypes.c_float: 0.25, ctypes.c_double: 0.25}.get(fields[name], 7)
                filled = _core.fill(struct, known, {name: value})
                told = getattr(filled, name)
                self.assertEqual(told.decode() if isinstance(told, bytes) else told, value, name)
                untouched = _core.fill(struct, known, {})
                for other in set(fields) - {name, "progress", "log", "stop"}:
                    self.assertEqual(getattr(filled, other), getattr(untouched, other), other)
        with kvasir.Cancel() as token:
            filled = _core.fill(_abi.kv_generate_options, options.GenerateOptions,
                                {"cancel": token, "stop": ["a", "ö"], "special": True})
            self.assertEqual(filled.cancel, token._live()._as_parameter_.value)
        self.assertEqual([filled.stop[i].decode() for i in range(filled.stop_count)], ["a", "ö"])
        self.assertEqual(filled.flags, 1)

    def test_a_longer_struct_of_a_newer_library_does_not_write_past_ours(self):
        class kv_call_options(ctypes.Structure):  # as an older header had it
            _fields_ = [("struct_size", ctypes.c_uint32), ("flags", ctypes.c_uint32)]

        filled = _core.fill(kv_call_options, options.CallOptions, {})
        self.assertEqual((filled.struct_size, filled.flags), (8, 0))

    def test_numbers_of_a_newer_library_stay_numbers(self):
        self.assertEqual(enums.known(enums.Phase, 99), 99)
        self.assertIsInstance(enums.known(enums.Phase, 2), enum.IntEnum)
        self.assertEqual(kvasir.Error("x", 99).status, 99)


unittest.main()
