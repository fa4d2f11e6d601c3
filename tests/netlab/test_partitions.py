"""What a cut network does to a job, told as incidents: five machines, three of them voters.

Whatever is cut: a committed step is never lost and the newest one never goes back; a side without a majority commits
nothing; a majority goes on by itself; nobody whom a majority hears is called DOWN; and a healed network needs nobody's
help.
"""

import contextlib
import threading
import time

import pytest
from tests.cluster.harness import Job, leader, until
from tests.netlab.lab import Lab

from fastcheck import Checkpointer, FastCheckError
from fastcheck.admin import AdminClient
from fastcheckd.config import Config

pytestmark = pytest.mark.timeout(300)

#: Longer than elections, verdicts and quarantines together.
BOUND_S = 40.0


class Incident:
    """A lab with a job of its own on it, what was committed, and what is known of the nodes' lives."""

    def __init__(self, lab, name):
        self.lab = lab
        self.name = name
        self.job = None
        self.leader = until(lambda: leader(lab, "node-4"), "a leader")
        self.followers = [v for v in lab.voters if v != self.leader]
        self.others = [n for n in lab.node_ids if n not in lab.voters]
        self.newest = 0

    def train_on(self, *nodes):
        self.job = Job(self.lab, list(nodes), self.name)
        for _ in range(2):
            self.commit()
        self.lives = self.lab.members(nodes[0])

    def commit(self):
        """Saves go on committing: within a bounded time one of the next ones is, and nothing older is the newest."""
        step = self.newest

        def a_step_commits():
            nonlocal step
            step += 1
            handles = self.job.save(step)
            until(
                lambda: all(h.done for h in handles) or any(h.exception() for h in handles),
                f"an end of {step}",
            )
            return all(h.committed for h in handles)

        until(a_step_commits, f"a step newer than {self.newest} to be committed", BOUND_S)
        self.newest = step
        for rank in self.job.ranks:
            assert rank.steps()[-1] == step

    def states(self, ask):
        return {node: state for node, (state, _) in self.lab.members(ask).items()}

    def commit_while_suspected(self, suspect, ask):
        """Saves go on, for longer than it takes to call somebody DOWN after the leader has missed the suspect."""
        until(lambda: self.states(ask).get(suspect) == "SUSPECT", f"the leader to miss {suspect}")
        enough = time.monotonic() + 3 * Config().down_after_s
        while time.monotonic() < enough:
            self.commit()

    def nobody_was_down(self, ask):
        """All nodes are in the lives they had: whoever is called DOWN comes back in another one.

        SUSPECT is the leader's opinion of whom it does not hear itself, and takes nothing from anybody.
        """
        found = until(lambda: self.lab.members(ask), "an answer")
        assert all(state in {"UP", "SUSPECT"} for state, _ in found.values()), found
        assert {n: life for n, (_, life) in found.items()} == {n: life for n, (_, life) in self.lives.items()}

    def heal(self):
        """Nobody helps: all nodes are UP again, saves go on, and every rank loads what was committed, bit for bit."""
        self.lab.network.heal()
        for node in self.lab.node_ids:
            until(
                lambda node=node: set(self.states(node).values()) == {"UP"},
                f"{node} to see all nodes UP after the cut",
                BOUND_S,
            )
        self.commit()
        self.commit()
        assert self.load_on(*self.job.nodes) == self.newest
        for step in self.job.ranks[0].steps():
            assert self.job.load(step) == step

    def load_on(self, *nodes):
        """The ranks start on these machines and load; again, if a node was just about to begin a new life."""

        def started():
            self.job.start(list(nodes))
            return loaded(self.job)

        return until(started, f"ranks on {', '.join(nodes)} to load", BOUND_S)


def loaded(job):
    with contextlib.suppress(FastCheckError):
        return job.load()


@pytest.fixture(scope="module")
def lab(tmp_path_factory, network_namespaces):
    """One for all incidents: after each the network is healed, and all nodes are UP again by themselves."""
    with Lab(tmp_path_factory.mktemp("partitions"), 5) as lab:
        yield lab


@pytest.fixture
def incident(lab, request):
    lab.network.heal()
    lab.wait_up(lab.node_ids)
    made = Incident(lab, request.node.name.removeprefix("test_").replace("_", "-")[:60].strip("-"))
    yield made
    if made.job is not None:
        made.job.stop()


def test_the_leader_is_cut_off_from_everybody(incident):
    incident.train_on(*incident.others)
    incident.lab.network.isolate(incident.leader)
    incident.commit()
    witness = incident.others[0]
    until(lambda: leader(incident.lab, witness) in incident.followers, "another leader", BOUND_S)
    until(lambda: incident.states(witness)[incident.leader] == "DOWN", "the old leader to be DOWN")
    for node in incident.others + incident.followers:
        assert incident.states(witness)[node] == "UP"
    incident.commit()
    incident.heal()
    assert incident.load_on(incident.leader, incident.others[0]) == incident.newest
    incident.commit()


def test_a_minority_is_cut_off_and_commits_nothing(incident):
    """A voter and another node: they reach each other and a trainer on each, but no majority."""
    lab, minority = incident.lab, [incident.followers[0], incident.others[0]]
    incident.train_on(incident.followers[1], incident.others[1])
    apart = Job(lab, minority, name="apart")
    apart.commit(1)
    lab.network.isolate(*minority)
    handles = apart.save(2)
    incident.commit()
    witness = incident.others[1]
    until(lambda: [incident.states(witness)[n] for n in minority] == ["DOWN"] * 2, "the minority to be DOWN")
    incident.commit()
    assert not any(handle.committed for handle in handles), "without a quorum nothing is committed"
    with Checkpointer("apart", rank=0, world_size=2, address=lab.address(witness)) as elsewhere:
        assert elsewhere.steps() == [1]
    incident.heal()
    # The step that was saved without a quorum is committed now or a rank has given it up; the job goes on.
    until(lambda: all(h.done for h in handles) or any(h.exception() for h in handles), "an end of step 2")
    apart.start()
    newest = until(lambda: loaded(apart), "the job that was cut off to load", BOUND_S)
    assert newest == 2 or not any(handle.committed for handle in handles)
    newest = 2

    # If the leader changes again now, a step that was begun before the change is refused: the new leader cannot know
    # that it was begun after the load (docs/decisions/0002).
    def committed():
        nonlocal newest
        newest += 1
        return all(handle.exception(timeout=BOUND_S) is None for handle in apart.save(newest))

    until(committed, "a step after that to be committed", BOUND_S)
    assert apart.load() == newest


def test_one_link_between_two_nodes_is_cut(incident):
    """They are owner and holder of each other's copies; everything goes by the other nodes."""
    one, other = incident.others
    incident.train_on(one, other)
    incident.lab.network.cut(one, other)
    for _ in range(3):
        incident.commit()
    incident.nobody_was_down(one)
    incident.heal()
    incident.nobody_was_down(one)


def test_the_link_between_a_node_and_the_leader_is_cut(incident):
    """The other voters hear it: it stays UP, and its saves reach the leader by way of a follower."""
    cut_off, other = incident.others
    incident.train_on(cut_off, other)
    incident.lab.network.cut(cut_off, incident.leader)
    incident.commit_while_suspected(cut_off, other)
    assert leader(incident.lab, other) == incident.leader, "no election was needed"
    incident.nobody_was_down(other)
    incident.heal()
    incident.nobody_was_down(other)


def test_one_direction_between_a_node_and_the_leader_is_cut(incident):
    cut_off, other = incident.others
    incident.train_on(cut_off, other)
    incident.lab.network.cut_way(cut_off, incident.leader)
    incident.commit_while_suspected(cut_off, other)
    incident.nobody_was_down(other)
    incident.heal()
    incident.nobody_was_down(other)


def test_a_slow_and_distant_network_is_slow_and_nothing_else(incident):
    """20 ms each way between two nodes and 100 Mbit/s from one: nobody is suspected for long, nobody is DOWN."""
    one, other = incident.others
    incident.train_on(one, other)
    incident.lab.network.delay(one, incident.leader, 0.02)
    incident.lab.network.delay(one, other, 0.02)
    incident.lab.network.shape(other, 100)
    for _ in range(3):
        incident.commit()
    incident.nobody_was_down(other)
    incident.heal()
    incident.nobody_was_down(other)


def test_the_network_flaps_while_the_job_saves(incident):
    """Cut and healed again and again, faster than anybody can be DOWN for it."""
    one, other = incident.others
    incident.train_on(one, other)
    done = threading.Event()

    def flap():
        while not done.wait(0.3):
            incident.lab.network.cut(one, incident.leader)
            done.wait(0.2)
            incident.lab.network.heal()

    flapping = threading.Thread(target=flap)
    flapping.start()
    try:
        for _ in range(6):
            incident.commit()
    finally:
        done.set()
        flapping.join()
    incident.heal()


def test_a_trainer_on_the_machine_itself_loads_what_was_saved_across_the_cut(incident):
    """The SDK inside a node's namespace, which has no other way than the node's own daemon."""
    lab, node = incident.lab, incident.others[0]
    program = (
        "import sys, torch\n"
        "from fastcheck import Checkpointer\n"
        "from tests.cluster.harness import assert_same, make_state\n"
        "with Checkpointer('inside', rank=0, world_size=1) as ckpt:\n"
        "    state = make_state(99, 0, 0)\n"
        "    newest = ckpt.load(state) or 0\n"
        "    if newest:\n"
        "        assert_same(state, make_state(7, newest, 0))\n"
        "    ckpt.save(newest + 1, make_state(7, newest + 1, 0)).result(timeout=60)\n"
        "    print(newest)\n"
    )
    assert lab.train(node, program) == "0\n"
    lab.network.isolate(node)
    witness = incident.others[1]
    until(lambda: incident.states(witness)[node] == "DOWN", f"{node} to be DOWN")
    assert lab.train(witness, program) == "1\n"
    lab.network.heal()
    until(lambda: incident.states(witness)[node] == "UP", f"{node} to be UP", BOUND_S)
    assert lab.train(node, program) == "2\n"
    with AdminClient(lab.address(witness), timeout_s=5) as admin:
        assert admin.status()["leader"]
