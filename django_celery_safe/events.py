"""
The events of this app: each is declared once, here, with its level, text and fields.

The fields of an event are those in its text, and ``more``. An event whose name is in
``signals`` is also sent as that signal; the others are only logged.

The comment above a declaration says when it happens. docs/reference/signals.md is made of these
declarations and comments, by ``python -m tests.docs``.
"""

from __future__ import annotations

from logging import DEBUG, ERROR, INFO, WARNING

from .emitting import Event

# Locks.

#: This process held a lock, and lost it: its lease ended, or an operator or the store freed it.
#: Here and below, `holder` is a text that names the holder; it is empty if the holder is unknown.
LOCK_LOST = Event(
    "lock_lost",
    ERROR,
    "The lock %(name)r was lost while its holder worked; holder now: %(holder)s.",
)

#: A lock could not be released, extended or renewed, because its store did not answer; a failed
#: renewal is tried again.
#: It is also logged if the lease of an `idempotent` claim, a carried task or a step could not be
#: renewed, and if a `with` block ends inside a transaction on the lock database, since its lock
#: can't be released there.
#: If several renewals failed together, `leases` is their number and `name` names one of them.
#: The record is at ERROR if the cause was an unexpected error.
LOCK_NOT_RELEASED = Event(
    "lock_backend_failed",
    WARNING,
    "The lock %(name)r could not be released or extended and ends by its lease: %(reason)s",
    more="leases",
)
LEASES_NOT_RENEWED = LOCK_NOT_RELEASED.also(
    "%(leases)d lease(s), such as that of %(name)r, could not be renewed and will be tried again: "
    "%(reason)s"
)
LEASES_NOT_RENEWED_BY_A_BUG = LEASES_NOT_RENEWED.also(level=ERROR)

#: An operator freed a held lock, with `celery_locks release`, the admin or `release_lock()`.
#: `holder` is its former holder, whose own process emits `lock_lost`.
LOCK_FREED = Event("lock_freed", WARNING, "Freed the lock %(name)r, held by %(holder)s.")

# Single instances.

#: A run of a task found its lock held by another run, and now does what its `on_conflict` says.
#: With `wait`, the event is emitted when the wait begins.
#: `task_id` is the id of the run that found the lock held; it is `None` for a direct call.
TASK_CONFLICT = Event(
    "task_conflict",
    INFO,
    "Task %(task_id)s met the lock %(name)r, held by %(holder)s: %(on_conflict)s.",
)

#: A message arrived, but another run stood in its way: a run with the same task id held the task's
#: lock, another run held the claim of the message's [`idempotent`](../how-to/do-once.md)
#: work, or another run of the same [step of stages](../how-to/run-tasks-in-stages.md) had not
#: ended.
#: `name` is that lock, key or step.
#: The message is sent again as a copy, and `delay` is the number of seconds until that copy
#: arrives; see [its own copy](../explanation/how-it-works.md).
TASK_OWN_COPY = Event(
    "task_own_copy",
    INFO,
    "Task %(task)s[%(task_id)s] was delivered while %(name)r is held by %(holder)s: a copy "
    "arrives in %(delay).3g s.",
)

#: A task with `unique_until` was sent while an earlier send still counted.
#: `task_id` is the id of this send, and `sent_id` is the id of the earlier one; `published` says
#: whether this send was published nevertheless, because a canvas waits for it.
TASK_DUPLICATE = Event(
    "task_duplicate",
    INFO,
    "Task %(task)s[%(task_id)s] is a duplicate: %(name)r was sent before, as task %(sent_id)s; "
    "nothing was sent.",
    more="published",
)
TASK_DUPLICATE_PUBLISHED = TASK_DUPLICATE.also(
    "Task %(task)s[%(task_id)s] is a duplicate: %(name)r was sent before, as task %(sent_id)s; "
    "published all the same, since a canvas waits for it."
)

# Sending.

#: A message that waited for a commit was published.
#: `relayed` is True if a relay published it, and not its sender.
TASK_SENT = Event("task_sent", DEBUG, "Sent task %(task)s[%(task_id)s] on commit.", more="relayed")
TASK_RELAYED = TASK_SENT.also("Sent task %(task)s[%(task_id)s] from the outbox.")

#: A message that waited for a commit could not be published.
#: `kept` says whether [the outbox](../how-to/send-through-the-outbox.md) has the message, and a
#: relay tries again; if not, the message is lost.
#: A relay also sends this signal after each failed attempt but the last, which is `message_dead`;
#: that the broker is unavailable is no attempt, and only logged.
#: `attempts` is the number of attempts of relays so far, and `error` is the exception.
TASK_LOST = Event(
    "task_send_failed",
    ERROR,
    "Task %(task)s[%(task_id)s] could not be sent after its transaction committed, and is lost: "
    "%(error)s",
    more="kept attempts",
)
TASK_KEPT = TASK_LOST.also(
    "Task %(task)s[%(task_id)s] could not be sent right after its commit; the outbox keeps it: "
    "%(error)s",
    level=WARNING,
)
#: The same of a further message of that commit, for the same reason.
TASK_KEPT_TOO = TASK_KEPT.also(level=INFO)
TASK_NOT_RELAYED = TASK_LOST.also(
    "Task %(task)s[%(task_id)s] could not be sent from the outbox in attempt %(attempts)d: "
    "%(error)s",
    level=WARNING,
)

#: A message of the outbox could not be sent in 20 attempts, and now waits until you
#: [decide](../how-to/send-through-the-outbox.md).
#: `error` is the exception, and `kept` is always True.
MESSAGE_DEAD = Event(
    "message_dead",
    ERROR,
    "Task %(task)s[%(task_id)s] could not be sent from the outbox in attempt %(attempts)d; it is "
    "dead, see manage.py celery_outbox list: %(error)s",
    more="kept",
)

#: A [carried task](../how-to/carry-a-task-until-it-is-done.md) succeeded, and its row now says so,
#: or has been deleted.
MESSAGE_DONE = Event("message_done", DEBUG, "Task %(task)s[%(task_id)s] is done.")

#: A [carried task](../how-to/carry-a-task-until-it-is-done.md) ended in an error, after retries.
#: The outbox keeps it for 30 days (`RETENTION`), unless it is retried or discarded before.
MESSAGE_FAILED = Event(
    "message_failed",
    WARNING,
    "Task %(task)s[%(task_id)s] failed, and is kept; see manage.py celery_outbox list: %(error)s",
)

#: A task is not run any more, because [the maximum number of processes](settings.md#max_deaths) has
#: died in it.
TASK_POISONED = Event(
    "task_poisoned", ERROR, "Task %(task)s[%(task_id)s] is not run again: %(error)s"
)

#: A message reached a worker and its task's function was not called; `reason` says why.
#: A carried task or a step has ended, or another process runs it; an earlier run of a redelivered
#: message [has ended](../explanation/how-it-works.md); or the message was a duplicate when it was
#: sent, and was published only because a canvas waits for it.
TASK_NOT_RUN = Event("task_not_run", INFO, "Task %(task)s[%(task_id)s] is not run: %(reason)s.")

#: A relay re-sends a message of a carried task.
#: `reason` says why: the task's process died, or no worker started the task.
MESSAGE_BROUGHT_BACK = Event(
    "message_brought_back", WARNING, "Task %(task)s[%(task_id)s] is sent again: %(reason)s."
)

#: An operator let a relay try a failed message again, with `celery_outbox retry`, the admin or
#: `revive()`.
MESSAGE_RETRIED = Event(
    "message_retried", INFO, "Task %(task)s[%(task_id)s] is to be sent again, as decided."
)

#: An operator deleted a message, with `celery_outbox discard`, the admin or `discard()`; its task
#: does not run, or does not run again.
MESSAGE_DISCARDED = Event(
    "message_discarded",
    WARNING,
    "Task %(task)s[%(task_id)s] was discarded, as decided; it is never sent.",
)

#: A `SafeTask` was sent inside `atomic()` without waiting for its commit, while
#: [`WARN_IN_ATOMIC`](settings.md#warn_in_atomic) is on.
#: `using` is the alias of the database; `place` is the place in the code, such as
#: `/srv/shop/accounts/views.py:44 in sign_up`.
SENT_IN_ATOMIC = Event(
    "sent_in_atomic",
    WARNING,
    "Task %(task)s is sent inside atomic() of %(using)r, by %(place)s: it may run before the "
    "commit, and after a rollback. Use .delay_on_commit(...), or send_on_commit=True.",
)

# Once.

#: `do_once` found that its work was already done, and yielded `None`.
ALREADY_DONE = Event("already_done", INFO, "%(flag)s of %(model)s pk=%(pk)s was done already.")

#: A block of `do_once` failed under `"at_most_once"`: its flag is set, so it is not done again.
#: `error` is the exception; a killed process can't send this signal.
ONCE_FAILED = Event(
    "once_failed",
    ERROR,
    "%(flag)s of %(model)s pk=%(pk)s was set before its block failed, and stays so: it is not done "
    "again. %(error)s",
)

#: Work that is guarded by `idempotent` had been done before, and the repeat got the stored result.
#: `task_id` is `None` outside of tasks.
CLAIM_REPEATED = Event("claim_repeated", INFO, "%(key)r was done before.", more="task_id")

#: Work that is guarded by `idempotent` failed, and the next caller may do it; `error` is a text.
#: Not logged if the work ended with `Retry`, `Ignore` or `Reject`.
CLAIM_FAILED = Event("claim_failed", WARNING, "%(key)r was not done (%(error)s).", more="task_id")

#: This process did the work of a row and lost its claim: the lease ended, and another process may
#: do the work now; or the row was deleted or changed.
#: `key` is the key of [`idempotent`](../how-to/do-once.md) work; for a
#: [carried task](../how-to/carry-a-task-until-it-is-done.md) or a step it is `<task>[<task id>]`.
CLAIM_LOST = Event(
    "claim_lost",
    ERROR,
    "The claim of %(key)r was lost while this process worked; holder now: %(holder)s.",
)

#: An operator deleted a record of `idempotent`, in the admin, by `forget_record()` or
#: `forget()`: the next caller does the work again.
#: `state` is the former state of the record, `running`, `done` or `failed`.
RECORD_FORGOTTEN = Event(
    "record_forgotten",
    WARNING,
    "The record of %(key)r was forgotten, as decided; it was %(state)s.",
)

# Runs of stages.

#: A [run of stages](../how-to/run-tasks-in-stages.md) was started, and its transaction has
#: committed.
#: `run` is its id, here and below; `name` is its name, or its key if it has none.
#: If a process is killed between a commit and the event that reports it, there is no event.
RUN_STARTED = Event(
    "run_started", INFO, "Started run %(run)s (%(name)s) of %(stages)s stage(s).", more="key"
)

#: A failed or aborted run was resumed, with `celery_stages resume`, the admin or `run.resume()`.
#: `steps` is the number of steps that will run, in this stage and the later ones.
RUN_RESUMED = Event(
    "run_resumed", INFO, "Resumed run %(run)s (%(name)s), %(steps)s step(s).", more="key"
)

#: A step of a run failed, after its retries; `error` is a text.
STEP_FAILED = Event(
    "step_failed",
    WARNING,
    "Step %(task)s[%(task_id)s] of run %(run)s failed: %(error)s",
    more="step",
)
#: A run of stages ended; `status` is `succeeded`, `failed` or `aborted`.
#: `error` says why the run failed; it is empty if a step failed, since `step_failed` has the error.
RUN_ENDED = Event("run_ended", INFO, "Run %(run)s (%(name)s) ended: %(status)s.", more="key error")
RUN_FAILED = RUN_ENDED.also("Run %(run)s (%(name)s) ended: %(status)s, %(error)s", level=WARNING)
