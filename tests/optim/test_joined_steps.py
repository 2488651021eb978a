"""Values that arrive one step at a time: each step once, in order, also for ranks that take no value."""

from lightning_holmes.optim.joined_steps import JoinedSteps


def test_a_step_runs_when_something_of_it_is_taken_and_the_rest_at_the_end() -> None:
    ran: list[int] = []

    def step(number: int, *names: str) -> dict[str, dict[str, int]]:
        ran.append(number)
        return {name: {"exp_avg": number, "step": 7} for name in names}

    states = JoinedSteps([lambda: step(0, "a", "b"), lambda: step(1), lambda: step(2, "c"), lambda: step(3, "d")])
    assert ran == []
    assert states.take("b", "exp_avg") == 0 and ran == [0]
    assert states.take("c", "exp_avg") == 2 and states.take("c", "step") == 7 and ran == [0, 1, 2]
    assert states.take("a", "step") == 7, "what has come waits"
    states.finish()
    assert ran == [0, 1, 2, 3]
    states.finish()
    assert ran == [0, 1, 2, 3]
