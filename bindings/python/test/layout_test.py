"""kvasir/_abi.py agrees with the header, which a C program reads; each option reaches its field."""
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

from kvasir import _abi, _values, enums, experimental, options

HEADERS = [
    pathlib.Path(os.environ["KVASIR_INCLUDE_DIR"], name)
    for name in ("kvasir.h", "kvasir_experimental.h")
]
STRUCTS = [
    value
    for value in vars(_abi).values()
    if isinstance(value, type)
    and issubclass(value, ctypes.Structure)
    and value is not ctypes.Structure
]
ENUMS = {
    enums.Status: "KV_",
    enums.LogLevel: "KV_LOG_",
    enums.Phase: "KV_PHASE_",
    enums.Precision: "KV_PRECISION_",
    enums.StopReason: "KV_STOP_",
    enums.Thinking: "KV_THINKING_",
    enums.NumberType: "KV_",
    enums.StateLayout: "KV_STATE_",
    enums.Param: "KV_PARAM_",
    experimental.Param: "KV_PARAM_",
    experimental.BudgetSchedule: "KV_BUDGET_",
    experimental.FilterWindow: "KV_FILTER_",
}
FLAGS = {enums.GpuUse: "KV_GPU_", experimental.Measure: "KV_MEASURE_"}
CONSTANTS = [
    "TOKENIZE_SPECIAL",
    "TOKENIZE_BOS",
    "TOKENIZE_DOCUMENT",
    "VOCABULARY_ONLY",
    "VERIFY",
    "REPLACE",
    "KEEP_TURN",
    "TRACE_PASSAGES",
    "KEEP_THINKING",
    "PLAN_DRAFTS",
    "NO_LOOKUP",
    "CACHE_UNCHECKED",
    "DOCUMENT_CANDIDATE",
    "DOCUMENT_ATTENDED",
    "STRATEGY_PREFILL",
    "STRATEGY_CACHE",
    "STRATEGY_INDEX",
    "STRATEGY_EXPERIMENTAL",
]
HIDDEN = {"struct_size", "flags", "reserved", "log_user", "stop_count"}


def headers():
    """The text of both headers without comments."""
    text = "".join(header.read_text(encoding="utf-8") for header in HEADERS)
    return re.sub(r"/\*.*?\*/", "", text, flags=re.S)


class Layout(unittest.TestCase):
    def values_in_c(self, expressions):
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if not compiler:
            self.skipTest("no C compiler")
        lines = "".join(f'printf("%llu\\n", (unsigned long long)({e}));' for e in expressions)
        with tempfile.TemporaryDirectory() as folder:
            source, program = pathlib.Path(folder, "layout.c"), pathlib.Path(folder, "layout")
            source.write_text(
                '#include <stddef.h>\n#include <stdio.h>\n#include "kvasir_experimental.h"\n'
                f"int main(void) {{{lines} return 0; }}\n",
                encoding="utf-8",
            )
            include = f"-I{HEADERS[0].parent}"
            subprocess.run([compiler, include, "-o", program, source], check=True)
            done = subprocess.run([program], capture_output=True, text=True, check=True)
            return [int(line) for line in done.stdout.split()]

    def test_structs_and_constants_are_those_of_the_header(self):
        expected = {}
        for struct in STRUCTS:
            expected[f"sizeof({struct.__name__})"] = ctypes.sizeof(struct)
            for name, *_ in struct._fields_:
                field = getattr(struct, name)
                expected[f"offsetof({struct.__name__}, {name})"] = field.offset
                expected[f"sizeof((({struct.__name__} *)0)->{name})"] = field.size
        for kind, prefix in {**ENUMS, **FLAGS}.items():
            expected.update({prefix + member.name: member.value for member in kind})
        expected.update({"KV_" + name: getattr(_abi, name) for name in CONSTANTS})
        expected["KV_VERSION_NUMBER"] = _abi.HEADER_VERSION
        for (expression, value), in_c in zip(expected.items(), self.values_in_c(expected)):
            self.assertEqual(value, in_c, expression)

    def test_nothing_of_the_header_is_missing(self):
        text = headers()
        calls = {**_abi.CALLS, **_abi.EXPERIMENTAL_CALLS}
        self.assertEqual(
            set(re.findall(r"KV_API[^;(]*?\b(kv_\w+)\(", text)), {*calls, *_abi.OTHERS}
        )
        structs = set(re.findall(r"struct (kv_\w+) \{", text))
        self.assertEqual(structs, {struct.__name__ for struct in STRUCTS})
        numbers = set(re.findall(r"\b(KV_[A-Z0-9_]+) = \d+", text))
        bound = {prefix + member.name for kind, prefix in ENUMS.items() for member in kind}
        self.assertEqual(numbers, bound)
        defines = set(re.findall(r"^#define (KV_\w+)[ \\\n]+(?:0x)?[0-9A-Fa-f]+u\b", text, re.M))
        flags = {prefix + member.name for kind, prefix in FLAGS.items() for member in kind}
        self.assertEqual(defines, flags | {"KV_" + name for name in CONSTANTS})
        for name, parameters in calls.items():
            declared = re.search(rf"\b{name}\((.*?)\);", text, re.S).group(1)
            self.assertEqual(len(declared.split(",")), len(parameters) + 1, name)

    def test_modules_do_not_import_each_other_in_a_circle(self):
        imports = {}
        for path in pathlib.Path(kvasir.__file__).parent.glob("*.py"):
            text = path.read_text(encoding="utf-8")
            text = re.sub(r"^if TYPE_CHECKING:\n(?: .*\n)+", "", text, flags=re.M)
            imports[path.stem] = set(re.findall(r"^from \.(\w+) import", text, re.M))
            for names in re.findall(r"^from \. import (\w+)", text, re.M):
                imports[path.stem].update(names.split(", "))
        self.assertIn("_abi", imports["session"])
        list(graphlib.TopologicalSorter(imports).static_order())  # raises CycleError

    def test_every_option_reaches_its_field(self):
        for struct, known, others in (
            (_abi.kv_model_options, options.ModelOptions, {"vocabulary_only", "plan_drafts"}),
            (_abi.kv_session_options, options.SessionOptions, {"no_lookup"}),
            (
                _abi.kv_generate_options,
                options.GenerateOptions,
                {"special", "keep_turn", "keep_thinking", "trace_passages", "cancel", "progress"},
            ),
            (_abi.kv_library_options, options.LibraryOptions, set()),
            (_abi.kv_cache_options, options.CacheOptions, set()),
            (_abi.kv_cache_attention_options, options.AttentionOptions, {"cancel"}),
            (_abi.kv_control, options.ControlOptions, {"user"}),
        ):
            fields = dict(struct._fields_)
            self.assertEqual(
                (set(fields) | others) - HIDDEN, set(known.__annotations__) | {"user"} & others
            )
            pointers = {"log", "progress", "cancel", "stop", "decode", "prefill", "on_thinking"}
            for name in set(known.__annotations__) - pointers - others:
                self.check_field(struct, known, name, fields[name])

    def check_field(self, struct, known, name, kind):
        texts = {ctypes.c_char_p: "text", ctypes.c_float: 0.25, ctypes.c_double: 0.25}
        value = texts.get(kind, 7)
        filled = _values.fill(struct, known, {name: value})
        untouched = _values.fill(struct, known, {})
        found = getattr(filled, name)
        self.assertEqual(found.decode() if isinstance(found, bytes) else found, value, name)
        for other in {field[0] for field in struct._fields_} - {name, "log", "stop", "on_thinking"}:
            self.assertEqual(getattr(filled, other), getattr(untouched, other), other)

    def test_options_that_are_no_numbers_reach_their_fields(self):
        asked = {"stop": ["a", "ö"], "special": True, "keep_turn": True, "trace_passages": True}
        filled = _values.fill(_abi.kv_generate_options, options.GenerateOptions, asked)
        self.assertEqual([filled.stop[i].decode() for i in range(filled.stop_count)], ["a", "ö"])
        self.assertEqual(filled.flags, 0x301)
        asked = {"thinking": True, "keep_thinking": True}
        filled = _values.fill(_abi.kv_generate_options, options.GenerateOptions, asked)
        self.assertEqual((filled.thinking, filled.flags), (1, 0x400))
        for name, flag in (("vocabulary_only", 8), ("plan_drafts", 0x800)):
            filled = _values.fill(_abi.kv_model_options, options.ModelOptions, {name: True})
            self.assertEqual(filled.flags, flag)
        filled = _values.fill(_abi.kv_session_options, options.SessionOptions, {"no_lookup": True})
        self.assertEqual(filled.flags, 0x1000)
        with kvasir.Cancel() as token:
            how = _values.control({"cancel": token}, None, _abi.VERIFY)
            self.assertEqual(how.cancel, token._live()._as_parameter_.value)
            self.assertEqual(how.flags, _abi.VERIFY)
        strategies = {"decode": "quest", "prefill": kvasir.Strategy("flat")}
        filled = _values.fill(_abi.kv_session_options, options.SessionOptions, strategies)
        self.assertTrue(filled.decode and filled.prefill)

    def test_a_shorter_struct_of_an_older_header_is_not_written_past_its_end(self):
        class kv_control(ctypes.Structure):
            _fields_ = [("struct_size", ctypes.c_uint32), ("flags", ctypes.c_uint32)]

        filled = _values.sized(kv_control)
        self.assertEqual((filled.struct_size, filled.flags), (8, 0))

    def test_numbers_of_a_newer_library_stay_numbers(self):
        self.assertEqual(enums.known(enums.Phase, 99), 99)
        self.assertIsInstance(enums.known(enums.Phase, 2), enum.IntEnum)
        self.assertEqual(kvasir.Error("x", 99).status, 99)


unittest.main()
