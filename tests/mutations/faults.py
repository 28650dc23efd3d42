"""
The mutations, by room, as :func:`tests.mutations.read` understands them.

Each has a place with what a user would see, the text that is there once, and the fault.
"""

FAULTS = r"""
[leases]
leases.lease:Lease.remaining: a forked child believes that it holds its parent's lock
-self.lost or self.pid != process.pid
+self.lost
leases.lease:Lease.remaining: a holder trusts a lease in memcached beyond its end
- - self.store.early
leases.lease:Lease.began: an extended lease is trusted from the answer on, not from the request
-self.asked_at = asked_at
+self.asked_at = clock.now()
leases.renewer:Lane._renew: a renewed lease is trusted from the answer on, not from the request
-lease.asked_at, lease.renew_at = asked_at,
+lease.asked_at, lease.renew_at = clock.now(),
leases.lease:RENEW_AFTER: a lease is renewed only when it is over
-1 / 3
+1 / 1
leases.lease:Lease.find_end: the lock of a thread that ended is renewed for ever
-self.thread() is None:
+False:
leases.renewer:Lane._take_due: the lock of a task that ended unreleased is renewed for ever
-(end := lease.find_end()) is None:
+(end := None) is None:
leases.renewer:Lane._renew: a holder never hears that its lease was lost
-lost.append(lease)
+pass
leases.renewer:Lane._renew: after one failed renewal a lease expires
-lease.renew_at = asked_at + lease.seconds * RETRY_AFTER
+lease.renew_at = asked_at + lease.seconds
leases.renewer:Lane._run: an error of a signal's receiver ends the renewal of all leases
-except BaseException:
+except LockBackendError:
leases.renewer:Lane._renew: a lock that was released during a renewal is reported as lost
-elif lease.lane is not self:
+elif False:
leases.claim:Claim.end_by: work whose end was recorded is reported as lost if the answer was lost
-or (connection.connection is not session and is_written())
leases.claim:Claim.ask: after a restart of the database no outcome can be recorded
-connection.close()
+pass
leases.claim:Claim.check_committed: work that a rollback undid counts as done
-if not self.is_done():
+if False:
leases.claim:Claim.prepare: work begins inside a transaction, where no other process sees its claim
-if is_transaction_open(connections[alias]):
+if False:
leases.claim:Claim.check_unfinished: a forked child finishes its parent's work
-if self.is_of_parent():
+if False:
[locks]
locks.stores.redis_scripts:RELEASE: a release frees the lock of the next holder
-if not value or string.sub(value, 1, 32) ~= ARGV[1] then
+if not value then
locks.stores.redis_scripts:EXTEND: a renewal extends the lock of another holder
-and string.sub(value, 1, 32) == token then
+then
locks.stores.redis_scripts:ACQUIRE: two processes hold one lock
-ARGV[2], 'NX') then
+ARGV[2]) then
locks.stores.redis_scripts:ACQUIRE: a fence falls when the server's clock was set back
-if last and last >= fence then
+if false then
locks.stores.redis_scripts:ACQUIRE: a redelivered message takes two places of a limit
-elseif in_text and
+elseif false and
locks.stores.redis:RedisStore.release_along: a release without an answer is reported as a lost lock
-or (is_repeat and remaining is not None and remaining > 0)
locks.stores.redis:RedisStore._run: no lock works after a SCRIPT FLUSH
-("EVAL", script.source, number
+("EVALSHA", script.sha, number
locks.stores.redis_connections:Connections._use: a request gets the late answer of an earlier one
-            connection.disconnect()
-            raise
+            self.idle.append(connection)
+            raise
locks.lock:CacheLock._try: a slow greeting of a server is a part of the lease
-store.connect()
+pass
locks.stores.redis:_milliseconds: a lease ends a little before its holder stops trusting it
-math.ceil
+math.floor
queries.sql:free_lock: a release in a database frees the lock of the next holder
- AND token = :token
queries.sql:take_lock: a lock in a database is taken although it is held
-WHERE held.ends_at_us <= MICROS
queries.sql:take_lock: a fence in a database falls when the clock was set back
-GREATEST(held.fence + 1, excluded.fence)
+excluded.fence
locks.stores.database:DatabaseStore._take_any_place: a redelivered message takes two places
-if not self._has_twin(names, request):
+if True:
locks.stores.database:DatabaseStore.errors: a lock is taken inside a transaction that hides it
-if is_transaction_open(connection):
+if False:
locks.stores.memcached:MemcachedStore._replace: a release in memcached frees another holder's lock
-if found is None or not found.startswith(token.encode()):
+if found is None:
locks.stores.memcached:_expiry: a lease in memcached ends up to a second early
- + TICK
locks.stores.portable:PortableStore.release: a late release deletes the next holder's lock
-if remaining is None or remaining > NO_DELETE:
+if True:
locks.stores.local:_Memory.find: a release in local memory frees the lock of the next holder
-token in (None, lock.token)
+True
locks.lock:PerThread: a thread can release a lock that another one holds through the same object
-class PerThread(Mine, threading.local):
+class PerThread(Mine):
locks.lock:CacheLock.__exit__: a store that does not answer hides the error of a block
-except CelerySafeError as failure:
+except LockLost as failure:
locks.lock:CacheLock.acquire: a waiter gives up at its first try
-if left <= 0:
+if True:
locks.lock:CacheLock._try: a lock whose lease was over before the answer came counts as held
-if took < seconds - store.early:
+if True:
locks.lock:CacheLock._try: a soft time limit during an acquisition leaves a lock that nobody holds
-give_back(store, token, *place_names(name, limit))
+pass
[concurrency]
concurrency.keys:encode: calls with True and 1 share a lock
-return "T" if value else "F"
+return f"i{int.__format__(value, 'x')};"
concurrency.keys:encode: calls with other arguments share a lock
-return f"s{len(value)}:{str.__str__(value)}"
+return str.__str__(value)
concurrency.keys:call_key: the sender and the worker compute different keys for one call
-call.arguments[name] = to_wire(value, serializer)
+call.arguments[name] = value
concurrency.guard:Run._is_held_by_own: a message that meets its own killed run's lock is lost
-contender.holder.task_id == own
+False
concurrency.guard:Run._step_aside: on_conflict="retry" drops the task
-copies.resend_later(self.task, self.message, delay)
+return
concurrency.guard:_run: a duplicate that a canvas waits for does the work again
-if request is not None and "duplicate" in header:
+if False:
concurrency.guard:Run._step_aside: a direct call that must raise on a conflict is skipped silently
-if way == "skip":
+if way == "skip" or self.message is None:
concurrency.sent:SentLock._begin_run: with unique_until="start" a send during the run is refused
-self.move(0)
+pass
concurrency.sent:SentLock.end_run: a send's lock that was not freed along stays for its lease
-lock.along is not self.freed
+True
concurrency.guard:Run.run_and_settle: with unique_until="end" a task can be sent while it runs
-0.0 if self.options.unique_until == "start" else math.inf
+0.0
concurrency.sent:SentLock.after: a unique task can't be sent again after it has ended
-if error is None:
+if False:
concurrency.sent:SentLock.claim: a send whose answer was lost keeps later sends out for an hour
-store.release(self.name, self.token)
+pass
concurrency.sent:SentLock.lease: a unique task with a countdown can be sent twice before it runs
-max(0.0, seconds_until(eta) or 0.0)
+0.0
concurrency.message_endings:settle: the lock of a killed run is held for a whole lease
-outcome.pid not in (None, os.getpid())
+False
concurrency.message_endings:_free_after_death: a killed process frees the lock of a living one
-and not outcome.ended(held.holder)
+and False
sending.deduplicate:publish_once: a send that the broker refused keeps later sends out
-            sent.move(0)
-            raise
+            raise
[delivery]
delivery.header:read_header: a header that was copied to another task's message acts on that task
-if found.get("task") != task:
+if False:
delivery.header:is_token: a forged token of another length cuts a lock's value in the wrong place
-isinstance(value, str) and _TOKEN.fullmatch(value) is not None
+isinstance(value, str)
delivery.call:wrap_run: a carried run ends its row inside of its lock
-in reversed(wanted)
+in wanted
delivery.endings:_on_prerun: a run that a time limit ended is still there for the next one
-_running.set(())
+pass
delivery.call:run_for: a function that calls itself counts as another delivery of its message
-_running.set((*before, (request.id, id(function))))
+pass
delivery.copies:resending: every later send of the process counts as a retry and is not held back
-context.run(_resent.set, Resent(task_id, unchanged))
+_resent.set(Resent(task_id, unchanged))
delivery.copies:_send: a message that waits beyond the visibility timeout multiplies
-delay = min(delay, _longest_delay(task))
+pass
concurrency.guard:_run: a run longer than the visibility timeout is followed by another, for ever
-if "copy" in header or (message.delivery_info or {}).get("redelivered"):
+if False:
delivery.copies:run_and_mark: a copy that replaces a run that gave up is dropped
-if not isinstance(error, WillBeRedelivered | LockLost) and not is_requeued(error):
+if True:
delivery.copies:_send: a message that can't be re-sent now is lost although the broker has it
-raise Rejected(error, requeue=True) from error
+raise
[sending]
sending.commit:must_wait: a task is sent before the commit
-return bool(connection.in_atomic_block)
+return False
sending.commit:must_wait: a task for another database's transaction is sent at once
-if not is_open and (
+if False and (
sending.commit:Sender._send: an error of one send skips the other callbacks of the commit
-except Exception as error:  # noqa: BLE001 - other callbacks of the commit must run
+except ArithmeticError as error:
sending.relay:Relay._claim: a row whose transaction committed late is never relayed
-if not rows:
+if not rows and self._since is None:
sending.relay:Relay._publish: a relay publishes a batch twice
-if self._next.get(one.row.pk) != NOT_REACHED:
-                continue
+if False:
+                continue
sending.relay:ClaimedMessage.is_expired: a message that expired is sent again
-return left is not None and left <= 0
+return False
sending.relay:Relay._settle: what a relay could not send waits a minute for another one
-record_sent(self._token, self._next)
+record_sent(self._token, {k: n for k, n in self._next.items() if n != NOT_REACHED})
sending.carried_ends:_follow_death: a carried task of a killed process waits for its lease's end
-.update(due_at=Now())
sending.carried_run:Run._record: a carried task that is retried or requeued counts as done
-return self._put_back(error, DATABASE_AWAY if isinstance(error, NoAnswer) else later)
+return self.end()
sending.carried_run:claim_message: a carried task that runs already is run a second time
-return copies.refuse_run(task, request, reason)
+return Run(task, request.id or "", claim, found)
sending.task:SafeTaskMixin._waits_for_commit: the next link of a carried chain is not carried
-carried = outbox == UNTIL_DONE and ours.get("outbox") is None
+carried = False
sending.task:SafeTaskMixin.retry: a rollback drops a retry that was sent in its transaction
-resending(self.request.id,
+resending('other',
sending.capture:capture: every later send of the process is swallowed
-context.run(CAPTURED.set, messages)
+CAPTURED.set(messages)
[idempotency]
queries.sql:claim_record: two processes do the work of one key
-(state = 'running' AND ends_at < NOW)
+state = 'running'
idempotency.records:RecordClaim._read: a key used for other arguments returns its result
-if self._digest and row.digest and self._digest != row.digest:
+if False:
idempotency.records:RecordClaim._read: a result that could not be stored is returned as None
-if row.error:
+if False:
leases.claim:Claim.prepare: nested work of one key waits for itself
-if (self.name, self.table) in work:
+if False:
idempotency.records:RecordClaim.fail: a failure is not reported
-not isinstance(error, TaskPredicate)
+False
[stages]
stages.engine:StepFollower._is_stage_open: a run stops after its first stage
-return bool(
+return not bool(
stages.engine:go_on: a stage begins before the one before it has ended
-if not found:
+if False:
stages.engine:fail: the rest of a run goes on after a step has failed
-stop(store, active, Status.FAILED)
+pass
stages.engine:fail: a run stands still whose last step's process was killed after that had succeeded
-go_on(store, active)
+pass
stages.engine:stop: relays send for ever what aborted steps left
-drop_messages(store, waiting.filter(stage=run.stage))
+pass
stages.engine:start: a second run with a key fails with IntegrityError instead of AlreadyStarted
-if not key:
+if True:
stages.engine:_restart: a process that stood still ends a step that was resumed meanwhile
-drop_messages(store, rows, claimed=True)
+pass
stages.engine:StepFollower.begin: a succeeded step whose message returns is called
-if found.status != Status.RUNNING:
+if False:
stages.engine:StepFollower.begin: a step of an aborted run is run
-if found.run_status in Status.STOPPED:
+if False:
stages.engine:StepFollower.wait: an attempt that lost its step puts it back for the winner
-self._row().held(*held)
+self._row()
stages.engine:succeed: an attempt that lost its step ends it under the one that has it
-held is None
+True
stages.step_tasks:run_step: a step that was finished and then fails counts as both
-elif not outcome.success:
+elif False:
sending.carried_run:_call: a step that kills its worker is run again for ever
-_refuse_after_deaths(run.task, request.id, found)
+pass
[ground]
values:encode: a result that is too long is stored
-if len(text) <= longest:
+if True:
transactions:in_atomic: inside a TestCase nothing is sent on commit
-not _is_of_testcase(block)
+True
transactions:Attempts.__exit__: a transaction that has begun its work is repeated, with the work
-if self.is_won or not
+if not
sending.housekeeping:prune_some: only the first batch of old rows is deleted
-range(most // batch)
+range(1)
conf:retentions: a misspelt retention is ignored
-if kind not in RETENTIONS:
+if False:
emitting:emit_in_background: a slow receiver of a signal delays the renewal of locks
-_waiting.put((emit, args))
+emit(*args)
[models]
models.outbox:OutboxMessages.pending: a relay gives back a message that a worker runs
-state=State.PENDING)
+state__in=[State.PENDING, State.RUNNING])
models.outbox:OutboxMessages.due: the newest messages are sent first
-.order_by("due_at", "pk")
+.order_by("-due_at", "pk")
queries.sql:end_message: a run that lost its claim ends the row of the run that has it
- AND token = :token
models.outbox:OutboxMessages.fail_task: a run that lost its claim fails the row of another
-self.claimed(token).update(**sets, **kept)
+self.update(**sets, **kept)
models.outbox:OutboxMessages.discardable: an operator discards a message whose task runs
-carried = Q(state=State.SENT, due_at__isnull=False)
+carried = Q(state__in=[State.SENT, State.RUNNING])
models.outbox:OutboxMessages.put_back: a task that kills its workers is never set aside
-sets |= DIED
+pass
stages.engine:stop: aborting a run changes steps that have succeeded
-.filter(run=run.pk).waiting()
+.filter(run=run.pk)
[resuming]
resuming.loop:Rows.read: the last row of a chunk is walked again
-__gt
+__gte
resuming.loop:Chunk.commit: a loop whose work another process does goes on
-lost.raise_lost()
+pass
resuming.loop:Chunk.open: a chunk that a traceback keeps stays open behind the end of its task
-self._claim.abandon_chunk = self.abandon
+pass
resuming.checkpoints:begin_walk: the cursor of one loop is taken for that of another
-cursor.of != of
+False
resuming.checkpoints:record: a task goes on at the place of a key inside it
-text if one is claim else None
+text
resuming.checkpoints:record: a task that kills its processes at one place is run for ever
-moved = text != claim.place
+moved = True
resuming.checkpoints:hand_over_if_told: a task that catches all errors is done when handed over
-one.handed_over = HandedOver
+raise HandedOver
queries.sql:move_messages: a long task that dies now and then is given up although it goes on
-CASE WHEN :moved THEN 0 ELSE deaths END
+deaths
[outer]
testing.deliveries:deliver_twice: the test kit does not show a redelivery as one
-redelivered=True
+redelivered=False
testing.locks:hold_lock: the test kit's held lock is free
-yield
+lock.release(); yield
"""
