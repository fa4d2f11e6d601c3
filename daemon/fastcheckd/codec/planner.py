"""Decides, shard by shard, whether the codec makes a step faster, and which chunks it shall have. Pure.

Encoding costs cores, sending costs the link, and the slower of the two is the step. Of a shard that takes
1/link seconds per byte raw, a share `f` of the changed bytes encoded at `encode` bytes/s (all threads that it
may have) to a `ratio`-th takes

    changed * max(f / encode, (1 - f + f / ratio) / link)        seconds per byte,

least where both are equal: f = 1 / (link / encode + 1 - 1 / ratio), at most 1. So a slow link has everything
encoded, a fast one just what the threads manage meanwhile, spread evenly over the shard.

That formula knows nothing of what else the cores do. On a loopback link with few cores encoding takes them from
sending and receiving; the holder decodes, and writes the way back. So the formula only says what is worth
trying, and the clock decides. The rule, `auto`:

1. Without a base: raw. That happens once in a while, and measures the link, but for puts into memory that the holder
   had never used: those take several times as long and do not count.
2. With one: encode a few chunks to know ratio and speed. If the formula then promises less than `SPEEDUP_MIN`,
   stay raw, without a base, which costs nobody anything.
3. Otherwise try it twice, each time with the formula's share, and go on with what took less time for the whole
   put. Of the last two times the better one counts: a hiccup decides nothing.
4. Links change. A way that has become slower than the other was is left at once. The other one is tried again soon
   after such a switch, then ever more rarely, at last every `REMEASURE_STEPS`; and raw also when encoding has become
   `SHIFT` times faster, which a faster link may have done. What these trials cost is kept at `TRIAL_SHARE` of all
   sending time: while it is more, there are none. The first `TRIALS` steps of each way do not count.

Where memory is short (`saving/contract.py`) `auto` encodes every chunk that has a base: a holder then needs room
for the way back only. `always` encodes every chunk, `never` offers no base. Who measures is `saving/`; there is no
clock in here.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

#: Promised gain below which nothing is tried: measuring is no better than that.
SPEEDUP_MIN = 1.1
#: Times in a row that a way is tried before it is judged: the first may meet cold memory.
TRIALS = 2
#: Raw puts that may not count for the holder's fresh memory, before they are believed all the same.
FRESH_MAX = 4
#: Steps by which a trial of raw grows for them: a holder that patches keeps no memory to spare.
FRESH_TRIALS = 2
#: Chunks of a shard encoded to learn what they give.
PROBE_CHUNKS = 1
#: Steps between two looks at the way not in use, at most, and right after a switch.
REMEASURE_STEPS = 50
REMEASURE_STEPS_MIN = 5
SHIFT = 1.5
TRIAL_SHARE = 0.02
#: Spending is forgotten over about as many steps as this.
_MEMORY_STEPS = 1000
#: Weight of the newest sample in ratio, speed and share of changed bytes.
_NEWEST = 0.3
#: A smaller shard vanishes in socket buffers: how long its sends took says nothing about the link.
_LINK_SAMPLE_BYTES_MIN = 16 << 20
#: Shards whose course is remembered; beyond, the one not sent for longest is forgotten.
_COURSES_MAX = 4096
#: Multiples of it fill [0, 1) evenly, those of every second or fourth chunk, a connection's share, as well.
_TURN = 2**0.5 - 1


class Way(Enum):
    """How a shard is sent."""

    #: Whole, every chunk as it is.
    RAW = "raw"
    #: As a patch, a few chunks encoded, to learn what that would give.
    PROBE = "probe"
    #: As a patch, with the planned share of the chunks encoded.
    CODED = "coded"


@dataclass(frozen=True)
class Route:
    """A rank's shard on its way to the same holders, step after step: what is alike enough to be compared."""

    job: str
    rank: int
    shard: int
    holders: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Sent:
    """How the sending of a shard went."""

    #: Of the put to the slowest holder, from asking to acknowledgement.
    seconds: float
    #: Payload bytes on the lane, per copy.
    sent_bytes: int
    #: The part of `seconds` in which its busiest connection was inside a send.
    send_s: float
    #: Thread seconds that encoding took.
    encode_s: float
    #: Every holder took the base.
    patched: bool
    #: A holder met memory that it had never used: the time says nothing about later puts.
    fresh_memory: bool = False


def best_fraction(*, link: float, encode: float, ratio: float, changed: float = 1.0) -> tuple[float, float]:
    """Share of the changed bytes to encode, and the whole shard's speed-up over raw, both by the formula above.

    Args:
        link, encode: bytes per second, above 0.
        ratio: raw over encoded bytes of what is encoded, above 0.
        changed: share of the bytes that differ from the base; the others cost nothing.
    """
    if ratio <= 1:
        return 0.0, 1 / max(changed, 1e-9)
    fraction = min(1.0, 1 / (link / encode + 1 - 1 / ratio))
    pace = max(fraction / encode, (1 - fraction + fraction / ratio) / link)
    return fraction, 1 / max(link * pace * changed, 1e-9)


class Plan:
    """What is to be done with one shard; hears which chunks had changed. Thread-safe."""

    def __init__(self, route: Route, lengths: Sequence[int], way: Way, fraction: float) -> None:
        self.route = route
        self.way = way
        #: Share of the changed chunks to encode.
        self.fraction = fraction
        self._lengths = lengths
        #: One flag per chunk: setting one needs no lock.
        self._asked = bytearray(len(lengths))

    @property
    def offer_base(self) -> bool:
        """Whether the holders are to change what they have, instead of getting it anew."""
        return self.way is not Way.RAW

    @property
    def shard_bytes(self) -> int:
        """Size of the shard."""
        return sum(self._lengths)

    def choose(self, index: int) -> bool:
        """Whether a chunk, different from the base's, is to be encoded. The same answer every time."""
        self._asked[index] = 1
        return self._chosen(index)

    def _chosen(self, index: int) -> bool:
        return index * _TURN % 1 < self.fraction

    def heard(self) -> tuple[int, int]:
        """Bytes of the chunks that had changed, and of those among them that were to be encoded."""
        asked = [i for i, flag in enumerate(self._asked) if flag]
        return sum(self._lengths[i] for i in asked), sum(self._lengths[i] for i in asked if self._chosen(i))


@dataclass
class _Arm:
    """Something that is timed, and how long it took lately."""

    #: Seconds per byte of shard.
    samples: deque[float] = field(default_factory=lambda: deque(maxlen=TRIALS))
    #: Steps since the last sample.
    age: int = 0

    @property
    def pace(self) -> float | None:
        """The better of the last samples; None before there are enough."""
        return min(self.samples) if len(self.samples) == TRIALS else None

    def add(self, sample: float) -> None:
        self.samples.append(sample)
        self.age = 0


@dataclass
class _Course:
    """All that is known about one route."""

    raw: _Arm = field(default_factory=_Arm)
    coded: _Arm = field(default_factory=_Arm)
    #: Seconds per byte inside sends, of raw puts.
    link: _Arm = field(default_factory=_Arm)
    ratio: float | None = None
    #: Share of the bytes that differ from the base.
    changed: float = 1.0
    probe_age: int = 0
    #: Raw puts in a row into fresh memory.
    fresh: int = 0
    #: Steps without a sample after which the other way is tried.
    patience: int = REMEASURE_STEPS
    #: Pace of the way in use when the other was last tried.
    compared_at: float | None = None
    trials_left: int = 0
    #: What trials took beyond the way in use, and all steps, both in steps of the way in use: seconds of a link
    #: that has changed since would say nothing.
    trial_cost: float = 0.0
    steps: float = 0.0

    @property
    def in_use(self) -> Way:
        """The faster way as far as is known."""
        raw, coded = self.raw.pace, self.coded.pace
        return Way.CODED if raw is not None and coded is not None and coded < raw else Way.RAW

    def arm(self, way: Way) -> _Arm:
        return self.coded if way is Way.CODED else self.raw


class Planner:
    """Plans the shards of one data process and learns from how they went. Owned by one thread."""

    def __init__(self, policy: str, threads: int) -> None:
        """`policy` is the config key `codec`; `threads` may encode at the same time."""
        self._policy = policy
        self._threads = threads
        #: Bytes per second of one thread.
        self._encode: float | None = None
        self._courses: OrderedDict[Route, _Course] = OrderedDict()

    def plan(
        self, route: Route, lengths: Sequence[int], *, has_base: bool, sharing: int = 1, lean: bool = False
    ) -> Plan:
        """What to do with a shard whose chunks have these lengths, in bytes.

        Args:
            has_base: an earlier step of the shard is here.
            sharing: shards that are sent, and so encoded, at the same time, this one included.
            lean: memory is short: what can be encoded is, however long it takes.
        """
        if self._policy == "always":
            # Without a base: what can be encoded on its own is.
            return Plan(route, lengths, Way.CODED, 1.0)
        if self._policy == "never" or not has_base or not lengths:
            return Plan(route, lengths, Way.RAW, 0.0)
        if lean:
            return Plan(route, lengths, Way.CODED, 1.0)
        course = self._course(route)
        way = self._way(course, sharing)
        if way is Way.PROBE:
            return Plan(route, lengths, way, min(1.0, PROBE_CHUNKS / len(lengths)))
        return Plan(route, lengths, way, self._promise(course, sharing)[0] if way is Way.CODED else 0.0)

    def learn(self, plan: Plan, sent: Sent) -> None:
        """A plan was carried out, and all holders have acknowledged."""
        if not plan.shard_bytes or sent.seconds <= 0:
            return
        course = self._course(plan.route)
        changed, chosen = plan.heard()
        if chosen and sent.encode_s > 0:
            self._encode = _blend(self._encode, chosen / sent.encode_s)
        if plan.offer_base and not sent.patched:
            return  # sent whole after all: neither of the two ways
        if plan.offer_base:
            course.changed = _blend(course.changed, changed / plan.shard_bytes)
            course.probe_age = 0
        if plan.offer_base and chosen:
            encoded = max(1, sent.sent_bytes - (changed - chosen))
            course.ratio = _blend(course.ratio, max(1.0, chosen / encoded))
        if sent.fresh_memory and not plan.offer_base:
            course.fresh += 1
            if course.in_use is Way.CODED and course.fresh <= FRESH_TRIALS:
                course.trials_left += 1
            if course.fresh <= FRESH_MAX:
                self._account(course, plan, sent.seconds, sample=False)
                return
        else:
            course.fresh = 0
        if not plan.offer_base and sent.sent_bytes:
            small = plan.shard_bytes < _LINK_SAMPLE_BYTES_MIN
            busy_s = sent.seconds if small or sent.send_s <= 0 else sent.send_s
            course.link.add(busy_s / sent.sent_bytes)
        self._account(course, plan, sent.seconds, sample=True)

    def _account(self, course: _Course, plan: Plan, seconds: float, *, sample: bool) -> None:
        used = course.in_use
        usual = course.arm(used).pace
        first_trials = plan.way is Way.CODED and course.coded.pace is None
        if usual is not None and plan.way is not used and not first_trials:
            course.trial_cost += max(0.0, seconds / (usual * plan.shard_bytes) - 1)
        keep = 1 - 1 / _MEMORY_STEPS
        course.steps = course.steps * keep + 1
        course.trial_cost *= keep
        for arm in (course.raw, course.coded):
            arm.age += 1
        course.probe_age += 1
        if plan.way is not Way.PROBE and sample:
            course.arm(plan.way).add(seconds / plan.shard_bytes)
        if course.in_use is not used:
            course.patience = REMEASURE_STEPS_MIN
            course.compared_at = None
            course.trial_cost = 0.0

    def _way(self, course: _Course, sharing: int) -> Way:
        if not course.raw.samples:
            return Way.RAW
        if course.ratio is None and course.changed > 0:
            return Way.PROBE
        promising = self._promise(course, sharing)[1] >= SPEEDUP_MIN
        if promising and course.coded.pace is None:
            return Way.CODED
        if course.raw.pace is None:
            return Way.RAW
        return self._trial(course, promising=promising) or course.in_use

    def _trial(self, course: _Course, *, promising: bool) -> Way | None:
        """Another way than the one in use, if it is time to look at it."""
        used = course.in_use
        pace = course.arm(used).pace
        assert pace is not None
        other = Way.RAW if used is Way.CODED else Way.CODED
        if course.trials_left:
            course.trials_left -= 1
            return other
        if course.trial_cost > TRIAL_SHARE * course.steps:
            return None
        if other is Way.CODED and not promising:
            return Way.PROBE if course.probe_age >= REMEASURE_STEPS else None
        if course.compared_at is None:
            course.compared_at = pace
        faster = used is Way.CODED and pace * SHIFT < course.compared_at
        if not faster and course.arm(other).age < course.patience:
            return None
        course.compared_at = pace
        course.patience = min(2 * course.patience, REMEASURE_STEPS)
        course.trials_left = TRIALS - 1
        return other

    def _promise(self, course: _Course, sharing: int) -> tuple[float, float]:
        """Share to encode and the speed-up that the formula promises."""
        if not course.link.samples or self._encode is None:
            return 0.0, 1 / max(course.changed, 1e-9)
        encode = self._encode * self._threads / max(1, sharing)
        link = 1 / min(course.link.samples)
        return best_fraction(link=link, encode=encode, ratio=course.ratio or 1.0, changed=course.changed)

    def _course(self, route: Route) -> _Course:
        course = self._courses.setdefault(route, _Course())
        self._courses.move_to_end(route)
        if len(self._courses) > _COURSES_MAX:
            self._courses.popitem(last=False)
        return course


def _blend(known: float | None, sample: float) -> float:
    return sample if known is None else (1 - _NEWEST) * known + _NEWEST * sample
