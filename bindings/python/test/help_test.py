"""help() is complete: every public name has a docstring, every option is in the docstrings."""
import inspect
import pathlib
import re
import unittest

from support import kvasir

from kvasir import experimental, options

METHODS = {
    kvasir.Model.__init__: options.ModelOptions,
    kvasir.Model.session: options.SessionOptions,
    kvasir.Model.load: options.SessionOptions,
    kvasir.Model.compose: options.SessionOptions,
    kvasir.Model.session_from_cache: options.SessionOptions,
    kvasir.Model.session_from_checkpoint: options.SessionOptions,
    kvasir.Model.hash: options.ControlOptions,
    kvasir.Session.prefill: options.PrefillOptions,
    kvasir.Session.prefill_tokens: options.ControlOptions,
    kvasir.Session.ask: options.GenerateOptions,
    kvasir.Session.stream: options.GenerateOptions,
    kvasir.Session.aask: options.GenerateOptions,
    kvasir.Session.astream: options.GenerateOptions,
    kvasir.Session.next: options.SampleOptions,
    kvasir.Session.continuation: options.SampleOptions,
    kvasir.Session.score: options.ControlOptions,
    kvasir.Session.prepare: options.ControlOptions,
    kvasir.Session.save: options.ControlOptions,
    kvasir.Library.__init__: options.LibraryOptions,
    kvasir.Library.session: options.SessionOptions,
    kvasir.Library.compose: options.SessionOptions,
    kvasir.Cache.__init__: options.CacheOptions,
    kvasir.Cache.load.__func__: options.CacheOptions,
    kvasir.Cache.attention: options.AttentionOptions,
    kvasir.Cache.save: options.ControlOptions,
    kvasir.verify: options.ControlOptions,
    kvasir.pack: options.PackOptions,
    kvasir.unpack: options.ControlOptions,
    experimental.prefill_logits: options.ControlOptions,
}


def public():
    """Yields (name, object) of every public name, and of the public members of classes."""
    for module in (kvasir, experimental):
        names = getattr(module, "__all__", [n for n in vars(module) if n[:1] != "_"])
        for name in names:
            value = getattr(module, name)
            if not (inspect.isclass(value) or inspect.isfunction(value)):
                continue
            yield name, value
            if inspect.isclass(value) and value.__module__.startswith("kvasir"):
                for member, function in vars(value).items():
                    kinds = (property, classmethod)
                    if member[0] != "_" and (callable(function) or isinstance(function, kinds)):
                        yield f"{name}.{member}", function


class Help(unittest.TestCase):
    def test_every_public_name_has_a_docstring(self):
        missing = [name for name, value in public() if not (value.__doc__ or "").strip()]
        self.assertEqual(missing, [])

    def test_every_method_lists_its_options(self):
        for function, known in METHODS.items():
            for name in known.__annotations__:
                self.assertRegex(function.__doc__, rf"(?m)^{name}: ", function.__qualname__)

    def test_no_method_with_options_is_left_out(self):
        taking = set()
        for _, value in public():
            for function in (value, getattr(value, "__init__", None)):
                function = getattr(function, "__func__", function)
                if inspect.isfunction(function) and "Unpack" in str(inspect.signature(function)):
                    taking.add(function)
        for function in taking:
            self.assertIn(function, METHODS, function)

    def test_every_class_of_options_lists_them(self):
        for name, known in vars(options).items():
            if name.endswith("Options"):
                for option in known.__annotations__:
                    self.assertRegex(inspect.getdoc(known), rf"(?m)^{option}: ", name)

    def test_every_parameter_of_a_strategy_is_listed(self):
        for kind in (kvasir.Strategy, experimental.Strategy):
            text = inspect.getdoc(kvasir.Strategy) + inspect.getdoc(kind)
            for name in kind._params:
                self.assertRegex(text, rf"(?m)^{name}: ")

    def test_every_failure_is_named_as_an_error(self):
        for name, value in vars(kvasir).items():
            if inspect.isclass(value) and issubclass(value, Exception):
                self.assertTrue(name.endswith("Error") or name == "Cancelled", name)

    def test_all_is_sorted_and_complete(self):
        self.assertEqual(kvasir.__all__, sorted(kvasir.__all__))
        names = {
            name
            for name, value in vars(kvasir).items()
            if name[0] != "_" and (inspect.isclass(value) or inspect.isfunction(value))
        }
        self.assertEqual(names - {"annotations", "Any", "Dict"}, set(kvasir.__all__))

    def test_lines_have_at_most_100_columns(self):
        root = pathlib.Path(kvasir.__file__).parents[1]
        for path in [*root.rglob("*.py"), *root.rglob("*.md")]:
            for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
                if not re.match(r"\|", line):
                    self.assertLessEqual(len(line), 100, f"{path}:{number}")


unittest.main()
