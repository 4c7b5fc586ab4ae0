"""Questions whose answers are known, hidden in a long text: facts, pass keys, and key-value tables.

text_document() and table_document() take any text, a length in tokens and a random generator and give a document with its questions.
The forms are those that the bundled model was trained on; models that follow instructions answer them too. An answer is right if it is
exactly the expected sentence.
"""
import dataclasses
import re
import uuid

TASKS = ("fact", "pass-key", "key-value")

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
TEXT_BEFORE_TABLE = 0.25  # of a table's document. A small table in the middle of a text is not what the bundled model was trained on


@dataclasses.dataclass(frozen=True)
class Question:
    task: str      # one of TASKS
    text: str
    answer: str    # the whole expected answer
    depth: float   # where in the document what it asks for stands, 0 to 1


@dataclasses.dataclass(frozen=True)
class Document:
    text: str
    questions: tuple  # in random order


def text_document(haystack, tokens, facts, count_tokens, rng):
    """About `tokens` tokens of the text `haystack`, from a random place, with `facts` facts and a pass key at random depths, each with its
    question. count_tokens(text) gives a text's number of tokens."""
    subjects = rng.sample([(a, e) for a in ATTRIBUTES for e in ENTITIES], facts)
    inserts = [_fact(attribute, entity, rng) for attribute, entity in subjects] + [_pass_key(rng)]
    rng.shuffle(inserts)
    room = tokens - sum(count_tokens(sentence) for sentence, *_ in inserts)
    sentences = _part(haystack, room, count_tokens, rng)
    if len(sentences) <= len(inserts):
        raise ValueError(f"{tokens} tokens are too few for {facts} facts")

    pieces, starts, size = [], [], 0  # starts: of the inserts, characters
    waiting = list(zip(_spread(len(inserts), len(sentences), rng), inserts))
    for number, sentence in enumerate(sentences):
        if waiting and waiting[0][0] == number:
            insert = waiting.pop(0)[1]
            starts.append(size)
            pieces.append(insert[0] + " ")
            size += len(pieces[-1])
        pieces.append(sentence)
        size += len(sentence)
    questions = [Question(task, text, answer, round(start / size, 4)) for start, (_, task, text, answer) in zip(starts, inserts)]
    rng.shuffle(questions)
    return Document("".join(pieces).rstrip() + "\n", tuple(questions))


def table_document(haystack, tokens, questions, count_tokens, rng):
    """About `tokens` tokens: some of the text, then one table of keys and values, with questions for random keys. Keys are of one kind
    and values of one kind; UUIDs for UUIDs are left out, the bundled model runs on after many of them."""
    text = "".join(_part(haystack, int(tokens * TEXT_BEFORE_TABLE), count_tokens, rng)).rstrip()
    kind, value_kind = rng.choice([(k, v) for k in (_number, _two_words, _uuid) for v in (_number, _two_words, _uuid) if k != v or k != _uuid])
    pairs, room = {}, tokens - count_tokens(text)
    while room > 0:
        key, value = kind(rng), value_kind(rng)
        if key not in pairs:
            pairs[key] = value
            room -= count_tokens(f'"{key}": "{value}",\n')
    if len(pairs) < questions:
        raise ValueError(f"{tokens} tokens are too few for a table with {questions} questions")

    table = ",\n".join(f'"{key}": "{value}"' for key, value in pairs.items())
    document = f"{text}\nJSON data:\n{{{table}}}\n"
    asked = [Question("key-value", f'What is the value for the key "{key}"?', f'The value for "{key}" is "{pairs[key]}".',
                      round(document.index(f'"{key}": ') / len(document), 4)) for key in rng.sample(list(pairs), questions)]
    return Document(document, tuple(asked))


def _fact(attribute, entity, rng):
    """(sentence, task, question, answer); the document may say "for" where question and answer say "of"."""
    value = rng.choice((_number, _code, _date, _two_words))(rng)
    subject = f"{attribute} of the {entity}"
    sentence = f"{rng.choice(LEADS)} {attribute} {rng.choice(('of', 'for'))} the {entity} is {value}."
    question = rng.choice((f"What is the {subject}?", f"Tell me the {subject}."))
    return sentence, "fact", question, f"The {subject} is {value}."


def _pass_key(rng):
    key = rng.randrange(10000, 100000)
    return f"The pass key is {key}. Remember it. {key} is the pass key.", "pass-key", "What is the pass key?", f"The pass key is {key}."


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
