from autosplit.measuring.steps import Progress, Step, Steps


def test_progress_rises_to_one_and_names_what_is_done() -> None:
    seen: list[Progress] = []
    steps = Steps(seen.append)
    steps.plan([Step("first", 1.0), Step("second", 3.0)])
    steps.done()
    steps.done()
    steps.finish()
    assert [progress.done for progress in seen] == [0.0, 0.25, 1.0, 1.0]
    assert [progress.what for progress in seen] == ["first", "second", "done", "done"]
    assert seen[0].left_s == 4.0 and seen[-1].left_s == 0.0


def test_without_work_all_is_done() -> None:
    assert Steps().progress == Progress(1.0, 0.0, "done")


def test_more_steps_than_planned_do_no_harm() -> None:
    steps = Steps()
    steps.plan([Step("only", 1.0)])
    steps.done(5)
    assert steps.progress.done == 1
