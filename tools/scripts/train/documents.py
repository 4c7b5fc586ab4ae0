"""Documents with questions and answers, as token ids: what a reader is trained on.

A document is a run of text from the corpus with facts put in at sentence ends, or a table of keys
and values. Questions follow in ChatML. The mask marks the tokens of answers.

    documents.py FOLDER TOKENIZER.gguf CORPUS.npz       makes a corpus of the *.txt of a folder
"""

import pathlib
import random
import re
import sys
from collections import Counter

import numpy as np

ATTRIBUTES = """access code, phone number, birth year, favorite color, price, license plate,
serial number, password, room number, owner, capital, weight, height, delivery date, supervisor,
budget, address, flight number, invoice total, dosage, deadline, meeting room, nickname,
model number, tax rate, expiry date, warranty period, account number, signal frequency, depth,
melting point, voltage, locker combination, home town, middle name, instrument, mascot, motto,
batch number, error code, port number, release version, contact person, blood type, ticket number,
departure gate, storage temperature, reference number, secret word""".replace("\n", " ").split(", ")
COLOURS = "red orange yellow green blue purple brown black white grey silver gold teal lime".split()
MONTHS = """January February March April May June July August September October November
December""".split()
FACTS = (
    " The {a} of {e} is {v}.",
    " The {a} for {e} is {v}.",
    " Note that the {a} of {e} is {v}.",
    " Remember: the {a} of {e} is {v}.",
    " It was decided that the {a} of {e} is {v}.",
    " According to the records, the {a} of {e} is {v}.",
)
QUESTIONS = (
    "What is the {a} of {e}?",
    "What is the {a} for {e}?",
    "Tell me the {a} of {e}.",
    "Please find the {a} of {e}.",
    "According to the document, what is the {a} of {e}?",
)
TASKS = {"facts": 44, "table": 22, "pass_key": 8, "values": 20, "quote": 6}  # weights
PRE_TOKENIZER = (  # of qwen2
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def tokenizer_of(gguf_path):
    """The byte-level BPE tokenizer of a GGUF file, for the `tokenizers` package."""
    import gguf
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    fields = gguf.GGUFReader(gguf_path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(m.split(" ", 1)) for m in fields["tokenizer.ggml.merges"].contents()]
    kinds = fields["tokenizer.ggml.token_type"].contents()
    result = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    result.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRE_TOKENIZER), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    result.decoder = decoders.ByteLevel()
    control = [t for t, kind in zip(tokens, kinds) if kind == gguf.TokenType.CONTROL]
    result.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in control])
    return result


def plain(text):
    """The text of a book: without Project Gutenberg's frame, a paragraph a line."""
    text = text.replace("\r", "")
    if begin := re.search(r"\*\*\* ?START OF TH[^\n]*\n", text):
        text = text[begin.end() :]
    if end := re.search(r"\*\*\* ?END OF TH", text):
        text = text[: end.start()]
    text = re.sub(r"(?<!\n)\n(?!\n)", " ", text)
    return re.sub(r"\n{2,}", "\n", re.sub(r"[ \t]+", " ", text)).strip()


class Corpus:
    """Token ids of texts, and the words that facts are made of."""

    def __init__(self, ids, words, names, tokenizer):
        self.ids, self.words, self.names = ids, words, names
        pieces = [tokenizer.decode([i]) for i in range(tokenizer.get_vocab_size())]
        ends = [
            i for i, p in enumerate(pieces) if p.strip() in (".", "?", "!", '."') or "\n" in p
        ]
        self.sentence_ends = set(ends)
        self.starts = np.flatnonzero(np.isin(self.ids, ends)) + 1

    @classmethod
    def of_texts(cls, folder, tokenizer):
        texts = [
            plain(path.read_text("utf-8", "replace")) for path in sorted(folder.glob("*.txt"))
        ]
        if not texts:
            raise SystemExit(f"no *.txt in {folder}")
        pieces = [t[i : i + 30000] for t in texts for i in range(0, len(t), 30000)]
        encoded = tokenizer.encode_batch(pieces, add_special_tokens=False)
        ids = np.concatenate([np.array(e.ids, np.uint16) for e in encoded])
        words = cls.common(texts, r"\b[a-z]{3,10}\b", 80, 9000)
        return cls(ids, words, cls.common(texts, r"\b[A-Z][a-z]{2,9}\b", 50, 5000), tokenizer)

    @classmethod
    def of_file(cls, path, tokenizer):
        with np.load(path) as arrays:
            lists = (arrays[name].tolist() for name in ("words", "names"))
            return cls(arrays["ids"], *lists, tokenizer)

    def write(self, path):
        np.savez_compressed(path, ids=self.ids, words=self.words, names=self.names)

    @staticmethod
    def common(texts, pattern, first, last):
        counts = Counter(w for text in texts for w in re.findall(pattern, text[:400000]))
        return [word for word, _ in counts.most_common(last)][first:]


class Documents:
    def __init__(self, corpus, tokenizer, seed):
        self.random = random.Random(seed)
        self.corpus, self.tokenizer = corpus, tokenizer
        self.begin, self.end = (tokenizer.token_to_id(t) for t in ("<|im_start|>", "<|im_end|>"))
        self.newline = self.encode("\n")

    def encode(self, text):
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    # ---- parts of facts -------------------------------------------------------------------------

    def one_of(self, *words):
        return self.random.choice(words)

    def word(self):
        return self.random.choice(self.corpus.words)

    def name(self):
        return self.random.choice(self.corpus.names)

    def digits(self, least, most):
        n = self.random.randint(least, most)
        return str(self.random.randrange(10 ** (n - 1), 10**n))

    def value(self):
        kind = self.random.random()
        if kind < 0.45:
            return self.digits(3, 9)
        if kind < 0.65:
            return " ".join(self.word() for _ in range(self.random.randint(1, 3)))
        if kind < 0.75:
            return self.random.choice(COLOURS)
        if kind < 0.85:
            letters = "".join(self.random.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(2))
            return f"{letters}-{self.digits(3, 4)}"
        if kind < 0.93:
            day, year = self.random.randint(1, 28), self.random.randint(1800, 2030)
            return f"{day} {self.random.choice(MONTHS)} {year}"
        return f"{self.name()} {self.name()}"

    def entity(self):
        kind = self.random.random()
        if kind < 0.35:
            return " ".join(self.name() for _ in range(self.random.randint(1, 2)))
        if kind < 0.6:
            return f"the {self.word()} {self.word()}"
        if kind < 0.75:
            title = self.one_of("Project", "Doctor", "Captain", "Station", "Team", "Agent", "Lake")
            return f"{title} {self.name()}"
        return self.word() if kind < 0.9 else f"{self.word()}-{self.word()}"

    def attribute(self):
        if self.random.random() < 0.6:
            return self.random.choice(ATTRIBUTES)
        return self.word() if self.random.random() < 0.5 else f"{self.word()} {self.word()}"

    # ---- tasks: (sentences to put in, or a whole document; [(question, answer)]) -----------------

    def facts(self, room, questions):
        count = max(4, min(questions * 2, room // 45))
        entities = [self.entity() for _ in range(max(2, count * 6 // 10))]
        known = {}
        while len(known) < count:
            few = self.random.random() < 0.5
            known[self.attribute(), self.random.choice(entities) if few else self.entity()] = (
                self.value()
            )
        items = list(known.items())
        self.random.shuffle(items)
        sentences = [
            self.random.choice(FACTS).format(a=a, e=e, v=v)
            for (a, e), v in self.random.sample(items, len(items))
        ]
        asked = [
            (self.random.choice(QUESTIONS).format(a=a, e=e), f"The {a} of {e} is {v}.")
            for (a, e), v in items[:questions]
        ]
        return sentences, asked

    def values(self, room, questions):
        keys = {}
        while len(keys) < max(1, min(questions, room // 160)):
            keys[self.word()] = self.random.randint(2, 4)
        order = [(key, self.digits(7, 7)) for key, n in keys.items() for _ in range(n)]
        self.random.shuffle(order)
        number = "One of the special magic numbers for {} is: {}."
        asked = [
            (
                f"What are all the special magic numbers for {key} mentioned in the document?",
                f"The special magic numbers for {key} are "
                + ", ".join(v for k, v in order if k == key)
                + ".",
            )
            for key in keys
        ]
        return [" " + number.format(key, v) for key, v in order], asked

    def pass_key(self, room, questions):
        several = self.random.random() < 0.5
        count = max(1, min(8, questions, room // 60)) if several else 1
        names = {f"{self.word()} key" for _ in range(count)} if several else {"pass key"}
        keys = {name: self.digits(5, 9) for name in sorted(names)}
        sentences = [f" The {n} is {v}. Remember it. {v} is the {n}." for n, v in keys.items()]
        return sentences, [(f"What is the {n}?", f"The {n} is {v}.") for n, v in keys.items()]

    def table(self, tokens, questions):
        def hexadecimal(n):
            return "".join(self.random.choice("0123456789abcdef") for _ in range(n))

        forms = {
            62: lambda: "-".join(hexadecimal(n) for n in (8, 4, 4, 4, 12)),
            24: lambda: self.digits(6, 9),
            14: lambda: f"{self.word()} {self.word()}",
        }  # by the tokens of a line
        size = self.random.choice(list(forms))
        lines = {}
        while len(lines) < max(4, min((tokens - 80) // size, 4000)):
            lines[forms[size]()] = forms[size]()
        rows = "\n".join(f'"{key}": "{value}",' for key, value in lines.items())
        items = self.random.sample(list(lines.items()), min(questions, len(lines)))
        asked = [
            (f'What is the value for the key "{k}"?', f'The value for "{k}" is "{v}".')
            for k, v in items
        ]
        return self.encode("JSON data:\n{" + rows + "\n}"), asked

    def quote(self, tokens, questions):
        document = self.text(tokens)
        asked = []
        for _ in range(questions):
            i = self.random.randrange(0, max(1, len(document) - 70))
            n, more = self.random.randint(10, 18), self.random.randint(12, 32)
            begin = self.tokenizer.decode(document[i : i + n])
            follows = self.tokenizer.decode(document[i + n : i + n + more])
            asked.append((f"Continue this quote from the document: {begin}", follows))
        return document, asked

    # ---- a sample -------------------------------------------------------------------------------

    def text(self, tokens):
        """A run of the corpus that begins with a sentence."""
        at = int(self.random.choice(self.corpus.starts))
        at = max(0, min(at, len(self.corpus.ids) - tokens - 1))
        return self.corpus.ids[at : at + tokens].tolist()

    def with_sentences(self, text, sentences):
        """The text with each sentence put in after a sentence of its own."""
        out, last = [], 0
        places = sorted(self.random.randrange(len(text)) for _ in sentences)
        for place, sentence in zip(places, sentences):
            stop = min(len(text), place + 60)
            while place < stop and text[place] not in self.corpus.sentence_ends:
                place += 1
            place = max(min(place + 1, len(text)), last)
            out += text[last:place] + self.encode(sentence)
            last = place
        return out + text[last:]

    def sample(self, tokens, task=None, questions=64):
        """ids [tokens + 1], mask [tokens + 1]: 1 where a token belongs to an answer."""
        task = task or self.random.choices(list(TASKS), TASKS.values())[0]
        share = 0.30 if tokens <= 2048 else 0.22 if tokens <= 8192 else 0.10
        room = int(tokens * share)
        if task in ("table", "quote"):
            count = min(questions, max(1, room // 90))
            document, asked = getattr(self, task)(tokens - room - 60, count)
        else:
            sentences, asked = getattr(self, task)(room, questions)
            used = sum(len(self.encode(s)) for s in sentences)
            used += sum(len(self.encode(q + a)) + 14 for q, a in asked)
            document = self.with_sentences(self.text(max(64, tokens - used - 40)), sentences)
        ids = [self.begin] + self.encode("system\n") + document + [self.end] + self.newline
        mask = [0] * len(ids)
        for question, answer in asked:
            asks = [self.begin] + self.encode("user\n" + question) + [self.end] + self.newline
            asks += [self.begin] + self.encode("assistant\n")
            answers = self.encode(answer) + [self.end]
            if len(ids) + len(asks) + len(answers) + 1 > tokens + 1:
                break
            ids += asks + answers + self.newline
            mask += [0] * len(asks) + [1] * len(answers) + [0] * len(self.newline)
        if len(ids) <= tokens:
            more = self.text(tokens + 1 - len(ids))
            ids, mask = ids + more, mask + [0] * len(more)
        return np.array(ids[: tokens + 1], np.int32), np.array(mask[: tokens + 1], np.uint8)


def corpus_of(path, tokenizer):
    path = pathlib.Path(path)
    make = Corpus.of_texts if path.is_dir() else Corpus.of_file
    return make(path, tokenizer)


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    corpus_of(sys.argv[1], tokenizer_of(sys.argv[2])).write(sys.argv[3])
