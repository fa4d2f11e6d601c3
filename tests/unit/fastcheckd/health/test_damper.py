"""Nodes that come back again and again."""

from hypothesis import given
from hypothesis import strategies as st

from fastcheckd.health.detector import DAMPED_S_MAX, Returns


class Flapping:
    def __init__(self):
        self.returns = Returns()
        self.now = 0.0
        self.incarnation = 1
        self.returns.members([("a", 1), ("b", 2)], 0.0)

    def comes_back(self, after_s=1.0):
        self.now += after_s
        self.incarnation += 1
        self.returns.members([("a", self.incarnation), ("b", 2)], self.now)
        return self.returns.damped_s("a", self.now)


def test_each_return_from_the_third_on_costs_twice_as_much_up_to_five_minutes():
    node = Flapping()
    assert [node.comes_back() for _ in range(9)] == [0, 0, 10, 20, 40, 80, 160, 300, 300]
    assert node.returns.damped_s("b", node.now) == 0


def test_a_damped_node_is_free_again_when_its_time_is_over():
    node = Flapping()
    for _ in range(3):
        node.comes_back()
    assert node.returns.damped_s("a", node.now + 9.9) > 0
    assert node.returns.damped_s("a", node.now + 10.0) == 0


def test_returns_older_than_ten_minutes_are_forgiven():
    node = Flapping()
    node.comes_back()
    node.comes_back()
    assert node.comes_back(after_s=601) == 0
    assert node.returns.count("a") == 1
    assert node.comes_back() == 0
    assert node.comes_back() == 10


def test_a_first_life_and_the_same_life_seen_again_are_no_returns():
    returns = Returns()
    for now in range(20):
        returns.members([("new", 5)], float(now))
    assert returns.count("new") == 0 and returns.damped_s("new", 20.0) == 0


def test_a_forgotten_node_starts_with_a_clean_record():
    node = Flapping()
    for _ in range(5):
        node.comes_back()
    node.returns.members([("b", 2)], node.now)
    node.returns.members([("a", 99), ("b", 2)], node.now)
    assert node.returns.damped_s("a", node.now) == 0 and node.returns.count("a") == 0


def test_restarts_in_good_order_are_no_returns_and_a_crash_after_them_is_one():
    node = Flapping()
    for _ in range(5):
        node.returns.members([("a", node.incarnation), ("b", 2)], node.now, left=["a"])
        assert node.comes_back() == 0
    assert node.returns.count("a") == 0
    node.comes_back()
    assert node.returns.count("a") == 1


@given(st.lists(st.floats(0, 700), max_size=40))
def test_damping_is_bounded_and_never_hits_before_the_third_return(gaps):
    node, at = Flapping(), []
    for gap in gaps:
        damped_s = node.comes_back(gap)
        at.append(node.now)
        recent = sum(node.now - t <= 600 for t in at)
        assert damped_s <= DAMPED_S_MAX
        assert len(at) >= 3 or damped_s == 0
        assert recent < 3 or damped_s > 9.99, "an earlier sentence may still run when less would be due"
