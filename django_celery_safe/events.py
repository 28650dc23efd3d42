"""
The events of this app: each is declared once, here, with its level, text and fields.

The comment above a declaration says when it happens. docs/reference/signals.md is made of these
declarations and comments, by ``python -m tests.docs.events``.
"""

from __future__ import annotations

from logging import DEBUG, ERROR, INFO, WARNING

from .emitting import Event, LoggedEvent

# Locks.

#: A lock was acquired: a `cache_lock`, or that of a run of a task.
#: `fence` is `None` where the store has none.
LOCK_ACQUIRED = Event("lock_acquired", DEBUG, "Acquired the lock %(name)r.", "name fence")

#: A lock was wanted and someone else holds it; sent for each try, so a waiter sends it many times.
#: `holder` is a text that says who, here and below, and empty if that is not known.
LOCK_CONTENDED = Event(
    "lock_contended", DEBUG, "The lock %(name)r is held by %(holder)s.", "name holder"
)

#: A lock was given back by its holder.
LOCK_RELEASED = Event("lock_released", DEBUG, "Released the lock %(name)r.", "name")

#: A lock was ours and is no longer: its lease ended, or it was freed or forgotten by the store.
#: `holder` is who holds it now, empty if nobody does or it is not known.
LOCK_LOST = Event(
    "lock_lost",
    ERROR,
    "The lock %(name)r was lost while its holder worked; holder now: %(holder)s.",
    "name holder",
)

#: A lock could not be given back or renewed, because its store did not answer; a renewal is tried
#: again.
#: Claims of `idempotent` and steps of stages are among what is renewed.
#: Also when a `with` block ends inside a transaction on the lock database, so that its lock can't
#: be given back.
#: Where several leases failed together, `leases` is their number and `name` one of them; at ERROR
#: it is an error that nobody foresaw.
LOCK_NOT_RELEASED = Event(
    "lock_backend_failed",
    WARNING,
    "The lock %(name)r could not be released and ends by its lease: %(reason)s",
    "name reason leases",
)
SENT_LOCK_NOT_MOVED = LOCK_NOT_RELEASED.also(
    WARNING, "The lock %(name)r could not be freed or extended and ends by its lease: %(reason)s"
)
LEASES_NOT_RENEWED = LOCK_NOT_RELEASED.also(
    WARNING,
    "%(leases)d lease(s), such as that of %(name)r, could not be renewed and will be tried again: "
    "%(reason)s",
)
LEASES_NOT_RENEWED_BY_A_BUG = LOCK_NOT_RELEASED.also(
    ERROR,
    "%(leases)d lease(s), such as that of %(name)r, could not be renewed and will be tried again: "
    "%(reason)s",
)

#: An operator freed a lock that was held, by `celery_locks release`, the admin or `release_lock()`.
#: `holder` is who had it, whose own process emits `lock_lost`.
LOCK_FREED = Event(
    "lock_freed", WARNING, "Freed the lock %(name)r, held by %(holder)s.", "name holder"
)

# Single instances.

#: The lock that a message holds since it was sent, of a task with `unique_until="end"`, ended while
#: the task ran, so that the same may be sent again.
#: `holder` is who holds it now, empty if nobody does or it is not known.
SENT_LOCK_LOST = LoggedEvent(
    "sent_lock_lost",
    INFO,
    "The lock %(name)r ended while its task runs, so the same may be sent again; holder now: "
    "%(holder)s.",
    "name holder",
)

#: A run of a task met another run that holds its lock, and does what `on_conflict` says, such as
#: `skip`.
#: With `wait` it is emitted when the wait begins.
#: `task_id` is the id of the run that steps aside, `None` for a direct call.
TASK_CONFLICT = Event(
    "task_conflict",
    INFO,
    "Task %(task_id)s met the lock %(name)r, held by %(holder)s: %(on_conflict)s.",
    "name task_id holder on_conflict",
)

#: A message met the lock of its own task id, anybody's claim of the
#: [`idempotent`](../how-to/do-once-by-key.md) work that it is for, or another run of its own
#: [step of stages](../how-to/run-tasks-in-stages.md); `name` is the lock, the key or the step.
#: `delay` is the number of seconds until its copy comes; `None`: it was dropped, because another
#: copy is on its way.
#: [Why](../explanation/its-own-copy.md).
#:
#: With Redis and RabbitMQ, which mark what they deliver again, the WARNING is for a message without
#: that mark: two sends under one id of your own count as one message, and the second does not run.
TASK_OWN_COPY = LoggedEvent(
    "task_own_copy",
    INFO,
    "Task %(task)s[%(task_id)s] was delivered while %(name)r is held by %(holder)s: a copy comes "
    "back in %(delay).3g s.",
    "name task task_id holder delay",
)
TASK_OWN_COPY_DROPPED = TASK_OWN_COPY.also(
    INFO,
    "Task %(task)s[%(task_id)s] was delivered while %(name)r is held by %(holder)s: another copy "
    "is on its way.",
)
TASK_OWN_COPY_OR_SECOND_SEND = TASK_OWN_COPY.also(
    WARNING,
    "Task %(task)s[%(task_id)s] was delivered while %(name)r is held by %(holder)s: a copy comes "
    "back in %(delay).3g s. The broker does not say that it delivered the message again. If this "
    "id was given to two sends, they count as one message, and the second does not run: let "
    "Celery make the ids, or give each send its own.",
)

#: The copy of a message came, and did nothing, because the run for which it waited has ended by
#: itself.
COPY_DROPPED = LoggedEvent(
    "copy_dropped",
    INFO,
    "Task %(task)s[%(task_id)s] was delivered again while it ran, and has ended since: its copy "
    "is dropped.",
    "task task_id",
)

#: A task with `unique_until` was sent while the one before it had not started, or not ended.
#: `task_id` is the id of this send, `sent_id` that of the one before; `published` says whether it
#: was sent all the same, because a canvas waits for it.
TASK_DUPLICATE = Event(
    "task_duplicate",
    INFO,
    "Task %(task)s[%(task_id)s] is a duplicate: %(name)r was sent before, as task %(sent_id)s; "
    "nothing was sent.",
    "name task task_id sent_id published",
)
TASK_DUPLICATE_PUBLISHED = TASK_DUPLICATE.also(
    INFO,
    "Task %(task)s[%(task_id)s] is a duplicate: %(name)r was sent before, as task %(sent_id)s; "
    "published all the same, since a canvas waits for it.",
)

#: A message that was a duplicate when it was sent, and was published for its canvas, returned
#: `None`.
DUPLICATE_SKIPPED = LoggedEvent(
    "duplicate_skipped",
    INFO,
    "Task %(task)s[%(task_id)s] was a duplicate of %(sent_id)s when it was sent; it returns None.",
    "task task_id sent_id",
)

# Sending.

#: A message that waited for a commit was published.
#: `relayed` is False if its sender did it, right after the commit, and True if a relay did it
#: later; a relay emits it once the row is recorded as sent.
TASK_SENT = Event(
    "task_sent", DEBUG, "Sent task %(task)s[%(task_id)s] on commit.", "task task_id relayed"
)
TASK_RELAYED = TASK_SENT.also(DEBUG, "Sent task %(task)s[%(task_id)s] from the outbox.")

#: A message that waited for a commit could not be published.
#: `kept` says whether [the outbox](../how-to/send-through-the-outbox.md) has it, so that a relay
#: tries again; if not, it is lost.
#: A relay sends it too, for each attempt that failed, `attempts` so far (0: no relay tried); what
#: it puts off or gives back uses no attempt, and is only logged.
#: `error` is the exception.
TASK_LOST = Event(
    "task_send_failed",
    ERROR,
    "Task %(task)s[%(task_id)s] could not be sent after its transaction committed, and is lost: "
    "%(error)s",
    "task task_id error kept attempts",
)
TASK_KEPT = TASK_LOST.also(
    WARNING,
    "Task %(task)s[%(task_id)s] could not be sent right after its commit; the outbox keeps it: "
    "%(error)s",
)
TASK_NOT_RELAYED = TASK_LOST.also(
    WARNING,
    "Task %(task)s[%(task_id)s] could not be sent from the outbox in attempt %(attempts)d: "
    "%(error)s",
)

#: A message of the outbox failed 20 times while the broker was there, and is set aside until
#: somebody [decides](../how-to/send-through-the-outbox.md#decide-about-a-message-that-fails).
#: `error` is the exception, and `kept` is always True.
MESSAGE_DEAD = Event(
    "message_dead",
    ERROR,
    "Task %(task)s[%(task_id)s] could not be sent from the outbox in attempt %(attempts)d; it is "
    "dead, see manage.py celery_outbox list: %(error)s",
    "task task_id error kept attempts",
)

#: A task that is [carried until done](../how-to/carry-a-task-until-it-is-done.md) ended in an
#: error, after its retries.
#: The error stays in the outbox until the task is retried or discarded, or for
#: `OUTBOX_FAILED_RETENTION`.
MESSAGE_FAILED = Event(
    "message_failed",
    WARNING,
    "Task %(task)s[%(task_id)s] failed, and is kept; see manage.py celery_outbox list: %(error)s",
    "task task_id error",
)

#: A task that is carried until done is not run any more, since so many processes died in it.
TASK_POISONED = Event(
    "task_poisoned", ERROR, "Task %(task)s[%(task_id)s] is not run again: %(error)s",
    "task task_id error",
)  # fmt: skip

#: A message of a task that is carried until done does nothing, since the task has ended, or
#: another process runs it.
MESSAGE_NOT_RUN = LoggedEvent(
    "message_not_run", INFO, "Task %(task)s[%(task_id)s] is not run: %(reason)s.",
    "task task_id reason",
)  # fmt: skip

#: A relay sends a message again of a task that is carried until done.
#: `reason` says why: its process died, or no worker began it.
MESSAGE_BROUGHT_BACK = Event(
    "message_brought_back",
    WARNING,
    "Task %(task)s[%(task_id)s] is sent again: %(reason)s.",
    "task task_id reason",
)

#: A task that is carried until done was ours and is no longer: its lease ended, and another run has
#: it, or had it.
#: `holder` is who runs it now, empty if nobody is known.
MESSAGE_LOST = Event(
    "message_lost",
    ERROR,
    "The message %(attempt)s was lost while this process ran its task; holder now: %(holder)s.",
    "attempt holder",
)

#: An operator let a message that failed be tried again, by `celery_outbox retry`, the admin or
#: `revive()`.
MESSAGE_RETRIED = Event(
    "message_retried",
    INFO,
    "Task %(task)s[%(task_id)s] is to be sent again, as decided.",
    "task task_id",
)

#: An operator deleted a message that was not sent, by `celery_outbox discard`, the admin or
#: `discard()`; its task never runs.
MESSAGE_DISCARDED = Event(
    "message_discarded",
    WARNING,
    "Task %(task)s[%(task_id)s] was discarded, as decided; it is never sent.",
    "task task_id",
)

#: A `SafeTask` was sent inside `atomic()` without waiting for its commit, while
#: [`WARN_IN_ATOMIC`](settings.md#warn_in_atomic) is on.
#: `using` is the alias of the database in `atomic()`, `place` is where in the code, such as
#: `/srv/shop/accounts/views.py:44 in sign_up`.
SENT_IN_ATOMIC = Event(
    "sent_in_atomic",
    WARNING,
    "Task %(task)s is sent inside atomic() of %(using)r, by %(place)s: it may run before the "
    "commit, and after a rollback. Use .delay_on_commit(...), or send_on_commit=True.",
    "task using place",
)

#: A `SafeTask` was sent with an `eta` or `countdown` beyond the broker's `visibility_timeout`, so
#: that [it will run several times](../explanation/redelivery.md#the-visibility-timeout).
#: It is sent all the same.
#: `delay` and `visibility_timeout` are seconds, `place` is where in the code, or `Celery itself` if
#: no code of the project sends it: a retry by `autoretry_for`, the next task of a chain, an entry
#: of beat.
SENT_BEYOND_VISIBILITY = LoggedEvent(
    "sent_beyond_visibility",
    WARNING,
    "Task %(task)s is sent by %(place)s to run in %(delay).0f s, but after a visibility_timeout of "
    "%(visibility_timeout).0f s the broker delivers it again, to every worker that waits: it runs "
    "several times. Raise visibility_timeout in broker_transport_options above that, or use "
    "RabbitMQ with a consumer_timeout above that.",
    "task delay visibility_timeout place",
)

# Once.

#: `do_once` did it; under `"at_most_once"` when the block ended well, and with `durable=False` when
#: the outer transaction is committed.
#: `model` is a label such as `accounts.User`.
DONE_ONCE = Event("done_once", INFO, "%(flag)s of %(model)s pk=%(pk)s was done.", "model pk flag")

#: `do_once` found it done, and yielded `None`.
ALREADY_DONE = Event(
    "already_done", INFO, "%(flag)s of %(model)s pk=%(pk)s was done already.", "model pk flag"
)

#: A block of `do_once` failed under `"at_most_once"`: its flag is set, and it is not done again.
#: `error` is the exception.
#: Nothing is sent if the process was killed.
ONCE_FAILED = Event(
    "once_failed",
    ERROR,
    "%(flag)s of %(model)s pk=%(pk)s was set before its block failed, and stays so: it is not done "
    "again. %(error)s",
    "model pk flag error",
)

#: The work that `idempotent` guards was done, and its record says so.
#: `task_id` is `None` outside tasks.
CLAIM_FINISHED = Event("claim_finished", INFO, "%(key)r was done.", "key task_id")

#: The work that `idempotent` guards was done before, and the repeat got its result.
CLAIM_REPEATED = Event("claim_repeated", INFO, "%(key)r was done before.", "key task_id")

#: The work that `idempotent` guards failed, and the next caller may do it; `error` is a text.
#: At INFO it is a retry, `Ignore` or `Reject`.
CLAIM_FAILED = Event(
    "claim_failed", WARNING, "%(key)r was not done (%(error)s).", "key task_id error"
)
CLAIM_PUT_BACK = CLAIM_FAILED.also(INFO, "%(key)r was not done (%(error)s).")

#: A claim was ours and is no longer: its lease ended and somebody else claimed it, or its record
#: was forgotten or changed.
#: `holder` is who has it now, empty if nobody is known.
CLAIM_LOST = Event(
    "claim_lost",
    ERROR,
    "The claim of %(key)r was lost while its holder worked; holder now: %(holder)s.",
    "key holder",
)

#: An operator forgot a record of `idempotent`, by `celery_idempotency forget`, the admin or
#: `forget()`: the work is done again by the next who comes.
#: `state` is what the record said, `running`, `done` or `failed`.
RECORD_FORGOTTEN = Event(
    "record_forgotten",
    WARNING,
    "The record of %(key)r was forgotten, as decided; it was %(state)s.",
    "key state",
)

# Runs of stages.

#: A [run of stages](../how-to/run-tasks-in-stages.md) was started, and is committed.
#: `run` is its id, here and below; `stages` is how many it has.
#: This signal and those below, `step_lost` apart, are sent when what they are about is committed,
#: by the process that committed it; one that is killed right then sends nothing.
RUN_STARTED = Event(
    "run_started", INFO, "Started run %(run)s of %(stages)s stage(s).", "run stages"
)

#: A run that had failed or was aborted goes on, by `celery_stages resume`, the admin or
#: `run.resume()`.
#: `steps` is how many are done again or for the first time, in this stage and those after it.
RUN_RESUMED = Event("run_resumed", INFO, "Resumed run %(run)s, %(steps)s step(s).", "run steps")

#: A run's stage was begun, at its start, when the one before had ended, or by `resume()`: its steps
#: are sent.
#: `stage` is its number, from 1 on; `steps` is how many are sent.
STAGE_STARTED = Event(
    "stage_started",
    INFO,
    "Began stage %(stage)s of run %(run)s, %(steps)s step(s).",
    "run stage steps",
)

#: A step of a run succeeded.
#: `step` is its id, `task_id` that of the message that ran it.
STEP_SUCCEEDED = Event(
    "step_succeeded",
    DEBUG,
    "Step %(task)s[%(task_id)s] of run %(run)s succeeded.",
    "run step task task_id",
)

#: A step of a run failed, after its retries; `error` is a text.
STEP_FAILED = Event(
    "step_failed",
    WARNING,
    "Step %(task)s[%(task_id)s] of run %(run)s failed: %(error)s",
    "run step task task_id error",
)

#: A message of a step did nothing: its step has ended, belongs to another message by now, as after
#: `resume()`, or is gone.
#: `status` is that of the step, empty if it is gone.
STEP_SKIPPED = LoggedEvent(
    "step_skipped",
    INFO,
    "Task %(task)s[%(task_id)s] does nothing: its step is %(status)s, or another message's.",
    "step task task_id status",
)
STEP_GONE = STEP_SKIPPED.also(INFO, "Task %(task)s[%(task_id)s] does nothing: its step is gone.")

#: A step was ours and is no longer: its lease ended, and another delivery of its message, a sweep
#: or a resumed run has it, or had it.
#: `holder` is who runs it now, empty if nobody is known.
STEP_LOST = Event(
    "step_lost",
    ERROR,
    "The step %(step)s was lost while this process ran it; holder now: %(holder)s.",
    "step holder",
)

#: [A sweep](../how-to/run-tasks-in-stages.md#sweep) found that a run did not go on, and repaired
#: it.
#: `reason` says what it found and what it did; `task` and `task_id` are empty if it was about a
#: whole stage.
RUN_REPAIRED = Event("run_repaired", WARNING, "Run %(run)s: %(reason)s.", "run task task_id reason")
STEP_REPAIRED = RUN_REPAIRED.also(WARNING, "Run %(run)s, step %(task)s[%(task_id)s]: %(reason)s.")

#: A run of stages ended; `status` is `succeeded`, `failed` or `aborted`.
#: `error` says why it failed, and is empty if a step did, of which `step_failed` says more.
#: A run that is resumed ends again.
RUN_ENDED = Event("run_ended", INFO, "Run %(run)s ended: %(status)s.", "run status error")
RUN_FAILED = RUN_ENDED.also(WARNING, "Run %(run)s ended: %(status)s, %(error)s")
