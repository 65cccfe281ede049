"""Checks of private answers: one unit moves one vote, and each release is paid for before it is
made, once. They use no chance.
"""

from __future__ import annotations

from collections.abc import Callable

from dpfy.audit.bench import Bench, Bug


def one_vote(bench: Bench, bug: Bug) -> str | None:
    """An owner who leaves moves one vote: one count falls by 1, another rises by 1."""
    moved = bench.votes_moved(bug)
    return (
        None
        if moved <= 2
        else f"one owner moves counts by {moved} in all, where one vote moves them by 2"
    )


def paid_before(bench: Bench, bug: Bug) -> str | None:
    """When noise is drawn the disk says so already; over restarts no more is released than was paid
    for.
    """
    most, seen = bench.answer_bills(bug)
    for number, durable in seen:
        if durable < number:
            return (
                f"noise of release {number} was drawn while the disk said that {durable} may have "
                f"been made"
            )
    return None if len(seen) <= most else f"{len(seen)} releases were made, {most} were paid for"


def checks_paid(bench: Bench, bug: Bug) -> str | None:
    """Whether voters agree is a release too, also where the answer is none."""
    asked, counted = bench.checks_counted(bug)
    return (
        None
        if counted == asked
        else f"{asked} questions were checked for agreement, {counted} checks were paid for"
    )


def asked_again(bench: Bench, bug: Bug) -> str | None:
    """The same question is answered alike, and paid for once."""
    different, paid = bench.asked_again(bug)
    if different > 1 and paid < different:
        return f"one question had {different} different answers, {paid} of them paid for"
    return None if paid == 1 else f"one question was paid for {paid} times"


def published(bench: Bench, bug: Bug) -> str | None:
    """The card of a service is the same whatever its voters know, until an answer was given."""
    one, other = bench.cards_of_answers(bug)
    return (
        None
        if one == other
        else "the card says something that depends on the votes and was not made private"
    )


def smooth_bill(bench: Bench, bug: Bug) -> str | None:
    """What gets noise in the bill of the votes at hand is moved by one voter by at most what the
    noise is made for.
    """
    moved, made_for = bench.bill_moved(bug)
    return (
        None
        if moved <= made_for
        else f"one voter moves the bill of votes by {moved:.3g}, its noise is made for "
        f"{made_for:.3g}"
    )


def stated_bill(bench: Bench, bug: Bug) -> str | None:
    """What is stated about the votes at hand is not below the truth (the chance that it is, one in
    a million, does not show).
    """
    stated, below = bench.bills_stated(bug)
    return None if not below else f"{below} of {stated} bills of votes were stated below the truth"


def student(bench: Bench, bug: Bug) -> str | None:
    """A student is the same whatever the private records are, where its teachers answer alike."""
    one, other, alike = bench.students(bug)
    if not alike:
        return "teachers that must agree did not, so that nothing could be compared"
    return (
        None
        if one == other
        else "the student depends on private records beside the answers that were paid for"
    )


CHECKS: dict[str, Callable[[Bench, Bug], str | None]] = {
    "one vote": one_vote,
    "paid before": paid_before,
    "checks paid": checks_paid,
    "asked again": asked_again,
    "published epsilon": published,
    "smooth bill": smooth_bill,
    "stated bill": stated_bill,
    "student": student,
}
