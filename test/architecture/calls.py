"""The library never ends the process, prints, reads the environment or the host's locale, or throws
anything but a failed allocation.

The command line takes from the user's locale what characters are, and nothing else: its numbers
have a point.
"""

import re
import sys

from source import CPP, code_only, files, finish, read

FORBIDDEN = {
    r"\b(?:printf|fprintf|vprintf|vfprintf|puts|fputs|putchar|putc|fputc|perror|psignal)\s*\(": (
        "prints"
    ),
    r"\bstd::(?:cout|cerr|clog|print|println)\b": "prints",
    r"#\s*include\s*<(?:iostream|print)>": "iostream has static initialisers",
    r"(?<![.\w>])(?:abort|exit|_exit|_Exit|quick_exit)\s*\(": "ends the process",
    r"\bstd::(?:abort|exit|_Exit|quick_exit|terminate)\b": "ends the process",
    r"\b(?:secure_)?getenv\s*\(": "options never come from the environment",
    r"\b(?:signal|sigaction)\s*\(": "installs a signal handler",
    r"#\s*include\s*<regex>": "std::regex recurses over its input",
    r"\bthrow\b(?!\s+std::bad_alloc|\s*;)": "only failed allocations throw",
    r"\b(?:std::)?(?:strto(?:d|f|ld)|sto(?:d|f|ld)|s?scanf|fscanf|strftime|strptime|strcoll|"
    r"strxfrm|strn?casecmp|"
    r"strerror|setlocale|newlocale|uselocale|localeconv|"
    r"mbs?r?towcs?|wcs?r?tombs?|"
    r"is(?:alpha|alnum|digit|xdigit|space|blank|print|punct|graph|cntrl|upper|lower)|"
    r"to(?:upper|lower))\s*\(": (
        "depends on the locale"
    ),
    r"\bstd::(?:locale|format|regex|put_time|get_time)\b|"
    r"#\s*include\s*<(?:locale|clocale|cctype|sstream|iomanip|fstream)>": (
        "depends on the locale"
    ),
    r"\b(?:strcpy|strcat|sprintf|vsprintf|gets|atoi|atol|atof|strtok|rand|srand)\s*\(": (
        "unchecked, or with global state"
    ),
}
# In printf's formats. to_chars() and base/number_text.h write fractions as JSON takes them.
FRACTION = re.compile(r"%[-+ #0']*(?:\*|\d+)?(?:\.(?:\*|\d+)?)?L?[aAeEfFgG]")
GROUPED = re.compile(r"%[-+ #0]*'")
STRING = re.compile(r'"(?:\\.|[^"\\\n])*"')
TOOLS_LOCALE = re.compile(
    r"\bsetlocale\s*\(\s*(?!LC_CTYPE\b)|\bstd::locale::global\b|\.imbue\s*\(\s*std::locale\s*\("
)


def main():
    problems = []
    rules = [(re.compile(pattern), why) for pattern, why in FORBIDDEN.items()]
    for path in files("src", "kernels", suffixes=CPP):
        for number, line in enumerate(code_only(read(path)).splitlines(), 1):
            problems += [
                f"{path}:{number}: {match.group().strip()}: {why}"
                for rule, why in rules
                for match in [rule.search(line)]
                if match
            ]
        without_comments = re.sub(r"//[^\n]*", "", read(path))
        for number, line in enumerate(without_comments.splitlines(), 1):
            problems += [
                f"{path}:{number}: {text}: printf writes fractions as the locale wants"
                for text in STRING.findall(line)
                if FRACTION.search(text) or GROUPED.search(text)
            ]
    for path in files("tools", suffixes=CPP):
        for number, line in enumerate(code_only(read(path)).splitlines(), 1):
            if TOOLS_LOCALE.search(line):
                problems.append(
                    f"{path}:{number}: {line.strip()}: numbers would be written as the locale wants"
                )
    return finish(problems)


sys.exit(main())
