-- The statements of the hot path, for PostgreSQL, SQLite, MariaDB and MySQL; see queries.py.
--
-- :name        a parameter; :ids stands for the keys themselves
-- NOW          the server's clock
-- AFTER(:s)    in s seconds; NULL: NULL
-- UNTIL(at)    seconds until a column's moment; NULL: NULL
-- MICROS       the server's clock, µs since the epoch; it goes on inside a transaction
-- changed      the condition by which MySQL and MariaDB read what they do not return
--
-- The SET of MySQL sees what stands before it in the same SET: what reads a column comes before
-- what changes it.

-- add_messages --
INSERT INTO django_celery_safe_outboxmessage (
    task, task_id, properties, body, attempt, token, created_at, due_at, state, attempts, starts,
    deaths, resent, error, error_type, traceback, holder, last_death, result, "cursor"
) VALUES (
    :task, :task_id, :properties, _binary :body, :attempt, :token, NOW, AFTER(:held), 'pending', 0,
    0, 0, 0, '', '', '', '', '', '', ''
)
RETURNING id

-- rewrite_message --
UPDATE django_celery_safe_outboxmessage
SET "cursor" = COALESCE(:result, CASE WHEN "cursor" = '' OR body = _binary :body THEN "cursor"
        ELSE '[null]' END),
    task = :task, body = _binary :body, properties = :properties, attempt = :attempt,
    due_at = AFTER(:held), token = :sender, state = 'pending', attempts = 0,
    result = COALESCE(:result, result)
WHERE attempt = :name AND token = :token
RETURNING id
-- changed: attempt = :attempt AND token = :sender

-- find_written --
SELECT id FROM django_celery_safe_outboxmessage WHERE id IN (:ids) AND token = :token

-- hold_messages --
UPDATE django_celery_safe_outboxmessage
SET due_at = AFTER(:held)
WHERE id IN (:ids) AND token = :token
RETURNING id
-- changed: id IN (:ids) AND token = :token

-- claim_due --
UPDATE django_celery_safe_outboxmessage
SET deaths = CASE WHEN state = 'running' THEN deaths + 1 ELSE deaths END,
    last_death = CASE WHEN state = 'running' THEN holder ELSE last_death END,
    resent = CASE WHEN state = 'sent' THEN resent + 1 ELSE resent END,
    state = 'pending', token = :token, due_at = AFTER(:lease)
WHERE id IN (:ids)
RETURNING id, task, task_id, body, properties, attempts, sent_at, attempt, starts, deaths, resent
-- changed: id IN (:ids)

-- erase_sent --
DELETE FROM django_celery_safe_outboxmessage WHERE id IN (:ids) AND token = :token

-- keep_sent --
UPDATE django_celery_safe_outboxmessage
SET state = 'sent', due_at = AFTER(:wait), token = '', sent_at = NOW, attempts = 0,
    error = COALESCE(:error, error)
WHERE id IN (:ids) AND token = :token

-- await_eta --
UPDATE django_celery_safe_outboxmessage
SET due_at = AFTER(:wait), sent_at = AFTER(:wait), token = ''
WHERE id IN (:ids) AND token = :token

-- give_back --
UPDATE django_celery_safe_outboxmessage
SET due_at = AFTER(:wait), token = '', error = COALESCE(:error, error)
WHERE id IN (:ids) AND token = :token

-- claim_message --
UPDATE django_celery_safe_outboxmessage
SET deaths = CASE WHEN state = 'running' THEN deaths + 1 ELSE deaths END,
    last_death = CASE WHEN state = 'running' THEN holder ELSE last_death END,
    state = 'running', token = :token, due_at = AFTER(:lease), holder = :holder,
    started_at = NOW, starts = starts + 1, resent = 0
WHERE attempt = :attempt
    AND (state IN ('pending', 'sent') OR (state = 'running' AND due_at < NOW))
RETURNING deaths, last_death, result, starts
-- changed: attempt = :attempt AND token = :token

-- move_messages --
UPDATE django_celery_safe_outboxmessage
SET "cursor" = COALESCE(:cursor, "cursor"), checkpoint_at = NOW, due_at = AFTER(:lease),
    deaths = CASE WHEN :moved THEN 0 ELSE deaths END
WHERE attempt = :attempt AND token = :token

-- end_message --
UPDATE django_celery_safe_outboxmessage
SET state = 'done', ended_at = NOW, due_at = NULL, token = '', error = '', error_type = '',
    result = COALESCE(:result, result)
WHERE attempt = :attempt AND token = :token

-- erase_message --
DELETE FROM django_celery_safe_outboxmessage WHERE attempt = :attempt AND token = :token

-- find_record --
SELECT state, token, holder, digest, result, error, UNTIL(ends_at),
    state = 'failed' OR COALESCE(expires_at < NOW, FALSE) OR (state = 'running' AND ends_at < NOW)
FROM django_celery_safe_idempotencyrecord WHERE "key" = :key

-- add_record --
INSERT INTO django_celery_safe_idempotencyrecord (
    "key", state, token, holder, digest, claims, claimed_at, ends_at, result, error, "cursor"
) VALUES (:key, 'running', :token, :holder, :digest, 1, NOW, AFTER(:lease), '', '', '')
ON CONFLICT DO NOTHING

-- claim_record --
UPDATE django_celery_safe_idempotencyrecord
SET "cursor" = CASE WHEN digest = :digest THEN "cursor" ELSE '' END, state = 'running',
    token = :token, holder = :holder, digest = :digest, claims = claims + 1, claimed_at = NOW,
    ends_at = AFTER(:lease), ended_at = NULL, expires_at = NULL, result = '', error = ''
WHERE "key" = :key
    AND (state = 'failed' OR expires_at < NOW OR (state = 'running' AND ends_at < NOW))

-- move_records --
UPDATE django_celery_safe_idempotencyrecord
SET "cursor" = COALESCE(:cursor, "cursor"), ends_at = AFTER(:lease)
WHERE "key" = :key AND token = :token AND state = 'running'

-- end_record --
UPDATE django_celery_safe_idempotencyrecord
SET state = :state, result = :result, error = :error, ended_at = NOW, expires_at = AFTER(:keep),
    "cursor" = COALESCE(:cursor, "cursor")
WHERE "key" = :key AND token = :token AND state = 'running'

-- lock_run --
UPDATE django_celery_safe_stagerun SET stage = stage WHERE id = :pk
RETURNING id, "key", name, status, stage, stages, params
-- changed: id = :pk

-- begin_run --
UPDATE django_celery_safe_stagerun SET status = 'running' WHERE id = :pk AND status = 'waiting'

-- begin_step --
UPDATE django_celery_safe_stagestep
SET status = 'running', started_at = NOW
WHERE id = :pk AND task_id = :task_id AND status IN ('waiting', 'running')
RETURNING status, run_id, stage, arguments,
    (SELECT r.status FROM django_celery_safe_stagerun r WHERE r.id = run_id),
    (SELECT r.params FROM django_celery_safe_stagerun r WHERE r.id = run_id)
-- changed: id = :pk AND task_id = :task_id

-- succeed_step --
UPDATE django_celery_safe_stagestep
SET status = 'succeeded', params = :params, ended_at = NOW, error_type = '', error = '',
    traceback = ''
WHERE id = :pk AND task_id = :task_id AND status IN ('waiting', 'running')
    AND (:is_sure OR EXISTS (
        SELECT 1 FROM django_celery_safe_outboxmessage WHERE attempt = :attempt AND token = :token
    ))

-- find_unfinished_step --
SELECT id FROM django_celery_safe_stagestep
WHERE run_id = :run AND stage = :stage AND status <> 'succeeded' LIMIT 1

-- hand_over --
SELECT id, run_id, stage, task, arguments, task_id, params
FROM django_celery_safe_stagestep
WHERE run_id = :run AND stage IN (:stage, :stage + 1) AND NOT EXISTS (
    SELECT 1 FROM django_celery_safe_stagestep u
    WHERE u.run_id = :run AND u.stage = :stage AND u.status <> 'succeeded'
)
ORDER BY stage, position

-- take_lock --
INSERT INTO django_celery_safe_databaselock AS held ("key", token, holder, fence, ends_at_us)
VALUES (:key, :token, :holder, GREATEST(MICROS, :after), MICROS + :lease)
ON CONFLICT ("key") DO UPDATE SET token = excluded.token, holder = excluded.holder,
    fence = GREATEST(held.fence + 1, excluded.fence), ends_at_us = excluded.ends_at_us
WHERE held.ends_at_us <= MICROS RETURNING fence

-- take_lock_of_mysql --
INSERT INTO django_celery_safe_databaselock ("key", token, holder, fence, ends_at_us)
VALUES (:key, :token, :holder, GREATEST(MICROS, :after), MICROS + :lease)
ON DUPLICATE KEY UPDATE token = IF(ends_at_us <= MICROS, :token, token),
    holder = IF(ends_at_us <= MICROS, :holder, holder),
    fence = IF(ends_at_us <= MICROS, GREATEST(fence + 1, MICROS, :after), fence),
    ends_at_us = IF(ends_at_us <= MICROS, MICROS + :lease, ends_at_us)

-- free_lock --
UPDATE django_celery_safe_databaselock SET token = '', holder = '', ends_at_us = 0
WHERE "key" = :key AND token = :token

-- drop_old_locks --
DELETE FROM django_celery_safe_databaselock WHERE "key" > :after AND "key" <= :last
    AND ends_at_us < MICROS - :kept AND fence < MICROS - :kept

-- read_clock --
SELECT MICROS
