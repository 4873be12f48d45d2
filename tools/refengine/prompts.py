"""The prompts of the demo: questions with and without a text to read first."""

from __future__ import annotations

from itertools import product
from pathlib import Path

from .docstrings import FOR_PROMPTS, docstrings
from .loader import Checkpoint

LIGHTHOUSE = """The lighthouse on the northern cape was built in three summers by a crew of forty. Stone came by \
boat from a quarry across the bay, and only on days when the wind blew from the south. The first keeper, a retired \
ship's carpenter, lived there with two goats and a barrel of lamp oil that had to last the winter. Every evening he \
climbed one hundred and twelve steps, trimmed the wick, and wrote a line in the log: the weather, the ships he had \
seen, and what he had eaten. When the light was changed to electricity, sixty years later, the log filled eleven \
shelves. A teacher from the village copied all of it by hand. She found that the keeper had noted the first swallow \
of each spring, and that over those sixty years the swallows had come nine days earlier. Her notes are now used by \
people who study the climate, who had never expected to learn anything from a man who counted birds because he was \
lonely."""

BAKERY = """Our bakery makes about nine hundred loaves on a weekday and twice as many on a Saturday. The dough for \
the sourdough is mixed in the evening and rests until two in the morning, when the first baker comes in and lights \
the oven. Rye bread goes in first because it needs the strongest heat; rolls come last, when the stone has cooled. \
At five the van leaves with the orders for the hospital and the two schools, and at six we open the shop. Most \
people think that the hard part is getting up early. It is not. The hard part is the weather: on a damp day flour \
takes less water, on a hot day the dough rises in half the time, and a baker who follows the recipe to the letter \
will make bad bread twice a year. So every new baker spends the first month doing nothing but mixing, feeling the \
dough, and writing down what the sky looked like. After that month they seldom look at the recipe again, and that is \
when we give them a key."""

RIVER = """A river that crosses a plain never runs straight for long. Where the bank is a little softer, the water \
cuts into it, and the stream swings to that side; on the inside of the bend the water is slow and drops its sand. So \
every bend grows, and slowly travels downstream, until two bends meet and the river takes the short way between \
them. The old bend is left behind as a lake in the shape of a horseshoe, which fills with reeds and at last becomes \
a meadow. Engineers once thought that a straight river was a better one. They dug channels, and the boats did go \
faster. But a straight river is also a steep one: it ran quicker, dug itself in, and the wells of the villages \
beside it fell dry. When floods came they arrived in one day where they had once taken three. Today some of the same \
offices pay to put the bends back, and they use the old maps, drawn by farmers who quarrelled over the meadows, to \
find where they were."""

WORKSHOP = """The repair workshop opens on the first Saturday of each month in the old fire station. People bring \
what is broken: toasters, bicycles, lamps, now and then an accordion. They do not leave it and come back; they sit \
down beside a volunteer and mend it together. The rule is that the owner holds the screwdriver. In four years the \
workshop has seen two thousand three hundred things, and a little more than half of them went home working. Someone \
keeps a list of the causes. A third of all failures are a cable that broke where it enters the housing. Another \
third are dust. The rest is divided between parts that nobody sells any more and cases that were glued shut so that \
nobody would look inside. The list was sent to three makers of kettles; one of them answered, and changed the cable. \
The volunteers have framed that letter. Asked why they do it, most of them say that they like the moment when the \
lamp comes on again."""

DOCSTRING_TOKENS = 48  # at least, of a docstring that is cut to a prompt
SHORTEST_CUT, LONGEST_CUT = 24, 40

PASSAGES = (LIGHTHOUSE, BAKERY, RIVER, WORKSHOP)
TASKS = (
    """Summarise this text in two sentences, in plain words that a child of ten would understand, and add nothing that \
the text does not say.""",
    """What is the most surprising fact in this text? Name it in one sentence, and then explain in another one why you \
did not expect it.""",
)
QUESTIONS = (
    "Why is the sky blue?",
    "Name three animals that live in the sea, and say one thing about each of them.",
    "What is the capital of France?",
)


def built_in(num_prompts: int) -> list[str]:
    """Texts with a question, every third time a question alone; numbered when they come round again."""
    long = [f"{passage}\n\n{task}" for task, passage in product(TASKS, PASSAGES)]
    prompts = []
    for index in range(num_prompts):
        turn, place = divmod(index, 3)
        source, position = (QUESTIONS, turn) if place == 2 else (long, 2 * turn + place)
        again, position = divmod(position, len(source))
        prompts.append(f"{source[position]} (Attempt {again + 1}.)" if again else source[position])
    return prompts


def of_length(tokens: list[int], num_tokens: int) -> list[int]:
    """The end of a prompt, which is where prompts differ; one that is too short is repeated."""
    return (tokens * -(-num_tokens // len(tokens)))[-num_tokens:]


def from_file(path: Path) -> list[str]:
    """Prompts of a text file, separated by blank lines."""
    blocks = path.read_text(encoding="utf-8").split("\n\n")
    prompts = [block.strip() for block in blocks if block.strip()]
    if not prompts:
        raise ValueError(f"{path} holds no prompt; write one or more, separated by blank lines")
    return prompts


def cut_docstrings(checkpoint: Checkpoint, num_prompts: int) -> list[list[int]]:
    """Token ids of beginnings of docstrings, as they are, cut where much is still to come. The model goes on with
    them, which is easier to draft than an answer. Raises ValueError where there are not so many."""
    encoded = (list(checkpoint.tokenizer.encode(text).ids) for text in docstrings(FOR_PROMPTS))
    long = [tokens for tokens in encoded if len(tokens) >= DOCSTRING_TOKENS]
    if num_prompts > len(long):
        raise ValueError(f"there are only {len(long)} docstrings of {DOCSTRING_TOKENS} tokens, not {num_prompts}")
    chosen = long[:: len(long) // num_prompts][:num_prompts]
    return [tokens[: SHORTEST_CUT + index % (LONGEST_CUT - SHORTEST_CUT + 1)] for index, tokens in enumerate(chosen)]
