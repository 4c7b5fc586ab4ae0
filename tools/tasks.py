"""Questions whose answers are known: facts, key-value tables and pass keys, hidden in a long text.

make_document() takes any text, a length in tokens and a random generator and gives one document with its questions. The forms are those
that the bundled model was trained on; models that follow instructions answer them too. An answer is right if it is exactly the
expected sentence.
"""
import dataclasses
import re
import uuid

TASKS = ("fact", "key-value", "pass-key")

ATTRIBUTES = (
    "access code", "serial number", "opening date", "registration code", "storage location", "inspection date", "catalogue number",
    "maintenance code", "delivery date", "file reference", "tracking number", "radio call sign", "locker number", "closing date",
    "account number", "display name", "shelf mark", "permit number", "security phrase", "backup code")
ENTITIES = (
    "north gate", "harbor office", "copper kettle", "blue archive", "mountain station", "old lighthouse", "river ferry", "glass pavilion",
    "winter garden", "signal tower", "east bridge", "silver compass", "grain warehouse", "stone mill", "night express", "city museum",
    "botanical society", "weather balloon", "iron lantern", "southern depot", "marble fountain", "survey vessel", "printing house",
    "clock workshop", "orchard house", "reading room", "cable railway", "white quarry", "market hall", "observatory")
WORDS = (
    "amber", "anchor", "basket", "birch", "bronze", "candle", "canyon", "cedar", "cobalt", "coral", "crystal", "dagger", "desert",
    "ember", "falcon", "feather", "fern", "forest", "garnet", "glacier", "granite", "hammer", "harvest", "hazel", "indigo", "island",
    "ivory", "jasmine", "juniper", "kernel", "ladder", "lemon", "linen", "magnet", "maple", "meadow", "mirror", "nectar", "needle",
    "olive", "onyx", "orchid", "paper", "pebble", "pepper", "pigeon", "pillar", "quartz", "raven", "ribbon", "saddle", "saffron",
    "salmon", "sparrow", "spruce", "thistle", "timber", "topaz", "tunnel", "velvet", "walnut", "willow", "window", "zephyr")
MONTHS = ("January", "February", "March", "April", "May", "June", "July", "August", "September", "October", "November", "December")
LEADS = ("The", "Note that the", "Remember: the", "According to the records, the")
TABLE_PAIRS = 24  # of a key-value table


@dataclasses.dataclass(frozen=True)
class Question:
    task: str      # one of TASKS
    text: str
    answer: str    # the whole expected answer
    depth: float   # where in the document what it asks for stands, 0 to 1


@dataclasses.dataclass(frozen=True)
class Document:
    text: str
    questions: tuple


@dataclasses.dataclass(frozen=True)
class _Insert:
    text: str
    questions: tuple  # (task, question, answer)
    paragraph: bool   # stands on lines of its own


def make_document(haystack, tokens, counts, count_tokens, rng):
    """A document of about `tokens` tokens: a random part of the text `haystack` with what the questions ask for inserted at random
    depths. counts: questions a task, {"fact": 10, ...}; pass-key at most 1, key-value in tables of 24 pairs. count_tokens(text) gives
    a text's number of tokens. The questions come in random order."""
    inserts = _inserts(counts, rng)
    room = tokens - sum(count_tokens(insert.text) for insert in inserts)
    sentences = _part(haystack, room, count_tokens, rng)
    if len(sentences) <= len(inserts):
        raise ValueError(f"{tokens} tokens are too few for what is to be hidden in them")

    rng.shuffle(inserts)
    places = _spread(len(inserts), len(sentences), rng)
    pieces, starts, size = [], [], 0  # starts: of each insert, characters
    waiting = list(zip(places, inserts))
    for number, sentence in enumerate(sentences):
        if waiting and waiting[0][0] == number:
            insert = waiting.pop(0)[1]
            text = f"\n{insert.text}\n" if insert.paragraph else insert.text + " "
            starts.append((insert, size))
            pieces.append(text)
            size += len(text)
        pieces.append(sentence)
        size += len(sentence)
    questions = [Question(task, text, answer, round(start / size, 4)) for insert, start in starts for task, text, answer in insert.questions]
    rng.shuffle(questions)
    return Document("".join(pieces).strip() + "\n", tuple(questions))


def _inserts(counts, rng):
    if set(counts) - set(TASKS):
        raise ValueError(f"unknown tasks: {', '.join(sorted(set(counts) - set(TASKS)))}")
    if counts.get("pass-key", 0) > 1:
        raise ValueError("a document has one pass key")
    subjects = rng.sample([(a, e) for a in ATTRIBUTES for e in ENTITIES], counts.get("fact", 0))
    inserts = [_fact(attribute, entity, rng) for attribute, entity in subjects]
    inserts += _tables(counts.get("key-value", 0), rng)
    if counts.get("pass-key", 0):
        inserts.append(_pass_key(rng))
    return inserts


def _fact(attribute, entity, rng):
    subject = f"{attribute} {rng.choice(('of', 'for'))} the {entity}"
    value = rng.choice((_number, _code, _date, _two_words))(rng)
    question = rng.choice((f"What is the {subject}?", f"Tell me the {subject}."))
    return _Insert(f"{rng.choice(LEADS)} {subject} is {value}.", (("fact", question, f"The {subject} is {value}."),), False)


def _tables(count, rng):
    """Tables of all kinds of keys in turn, as many as are needed to ask each for half of its pairs at most."""
    kinds = (_uuid, _number, _two_words)
    tables = max(min(count, len(kinds)), -(-count // (TABLE_PAIRS // 2)))
    return [_table(kinds[i % len(kinds)], kinds, count // tables + (i < count % tables), rng) for i in range(tables)]


def _table(kind, kinds, count, rng):
    keys = {}
    while len(keys) < TABLE_PAIRS:
        keys[kind(rng)] = rng.choice(kinds)(rng)
    questions = tuple(("key-value", f'What is the value for the key "{key}"?', f'The value for "{key}" is "{value}".')
                      for key, value in rng.sample(list(keys.items()), count))
    lines = ",\n".join(f'"{key}": "{value}"' for key, value in keys.items())
    return _Insert(f"JSON data:\n{{{lines}}}", questions, True)


def _pass_key(rng):
    key = rng.randrange(10000, 100000)
    text = f"The pass key is {key}. Remember it. {key} is the pass key."
    return _Insert(text, (("pass-key", "What is the pass key?", f"The pass key is {key}."),), False)


def _number(rng):
    return str(rng.randrange(1000000, 10000000))


def _code(rng):
    letters = "".join(rng.choice("ABCDEFGHJKLMNPRSTUVWXYZ") for _ in range(2))
    return f"{letters}-{rng.randrange(1000, 10000)}"


def _date(rng):
    return f"{rng.randrange(1, 29)} {rng.choice(MONTHS)} {rng.randrange(1850, 2000)}"


def _two_words(rng):
    return " ".join(rng.sample(WORDS, 2))


def _uuid(rng):
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _part(haystack, tokens, count_tokens, rng):
    """Sentences, with the space after them, of a random part of the text that has about so many tokens."""
    sentences = re.findall(r"\S.*?(?:[.!?][\"')\]]*\s+|\Z)", haystack, re.DOTALL)
    sizes = [count_tokens(sentence) for sentence in sentences]
    last, size = len(sentences), 0  # the last start from which the rest is long enough
    while last > 0 and size < tokens:
        last -= 1
        size += sizes[last]
    if size < tokens:
        raise ValueError(f"the text has {size} tokens, {tokens} are needed")
    first = rng.randrange(last + 1)
    end, size = first, 0
    while size < tokens:
        size += sizes[end]
        end += 1
    return sentences[first:end]


def _spread(count, sentences, rng):
    """Sorted distinct places among the sentences, one at random in each of `count` equal stretches."""
    edges = [sentences * i // count for i in range(count + 1)]
    return [rng.randrange(edges[i], edges[i + 1]) for i in range(count)]
