"""The Lua scripts for locks in Redis: each step of a lock is one script."""

from __future__ import annotations

import hashlib


class Script:
    """A Lua script and its digest."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()


# A command that the server refuses (because of an ACL, or a key of another type) aborts the
# script there, and nothing is rolled back. So a lock is taken last, when nothing can fail any more,
# or taken back, and commands after the end of a lock (for the list, the waiter) use pcall: they may
# fail. Each command takes as long as a tenth of a request: the fewer, the better.
#
# The fence is the larger of last + 1 and the server's time in µs, so it grows
# even if the counter was lost with the server's memory. It is stored as text of
# 16 digits (until the year 2286), which sorts like the number: converting
# numbers to text is the most expensive part of a script as short as this. A failed
# try uses up a number, which is harmless, and writes, so on a replica it is refused at once.
# About one in a hundred acquisitions removes keys that were never released from the list.
#
# KEYS: the lock, the counter of fences, the list. ARGV: the token, the lease in ms, the holder's
# text, and how long a waiter's mark lasts, ms; "": no one waits.
#
# With a limit, the other places are the further keys. A place's number goes into the text at
# ARGV[5], behind the lock's name; ARGV[6] is the task id in JSON. All places are read before one is
# taken. The first of these is: the place that the token has already, because the request may be a
# repeat; that of the same task, whose message was delivered twice; a free one; the one that ends
# first. A host or a task may have the id as its name, so a text that contains it is decoded.
#
# Without a limit, KEYS[4], if any, is a lock that this request carries along: ARGV[7] is its token,
# and ARGV[8] its new lease, ms; 0: it is freed. In RELEASE, which frees it, they are KEYS[3] and
# ARGV[3].
ACQUIRE = Script("""
local time = redis.call('TIME')
local micros = time[2]
if #micros < 6 then micros = string.sub('00000' .. micros, -6) end
local fence = time[1] .. micros
local last = redis.call('GETSET', KEYS[2], fence)
if last and last >= fence then
    fence = string.format('%.0f', last + 1)
    redis.call('SET', KEYS[2], fence)
end
local index, key, place, holder = KEYS[3], KEYS[1], 1, ARGV[3]
if #ARGV == 6 then
    local places, best = {key}, math.huge
    local quoted, task = ',' .. ARGV[6] .. ',', cjson.decode('[' .. ARGV[6] .. ']')[1]
    for i = 4, #KEYS do places[i - 2] = KEYS[i] end
    for i, one in ipairs(places) do
        local value, rank = redis.call('GET', one), -3
        if value then
            local in_text = task and string.find(value, quoted, 49, true)
            rank = redis.call('PTTL', one)
            if string.sub(value, 1, 32) == ARGV[1] then
                rank = -5
            elseif in_text and cjson.decode(string.sub(value, 49))[7] == task then
                rank = -4
            end
        end
        if rank < best then key, place, best = one, i, rank end
    end
    if place > 1 then
        local cut = tonumber(ARGV[5])
        holder = string.sub(holder, 1, cut) .. ':place:' .. place .. string.sub(holder, cut + 1)
    end
end
if not redis.call('SET', key, ARGV[1] .. fence .. holder, 'PX', ARGV[2], 'NX') then
    if (ARGV[4] or '') ~= '' then
        redis.call('SET', KEYS[1] .. ' waiting', '', 'PX', ARGV[4])
    end
    return {place, redis.call('GET', key), redis.call('PTTL', key)}
end
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local listed = redis.pcall('ZADD', index, now + ARGV[2], key)
if type(listed) == 'table' then
    if type(redis.pcall('DEL', key)) == 'table' then redis.call('SET', key, '', 'PX', 1) end
    return listed
end
if string.sub(fence, -2) == '00' then
    -- An acquisition does not fail for this: the doctor reports a user who lacks the permission.
    redis.pcall('ZREMRANGEBYSCORE', index, '-inf', time[1] * 1000)
end
if ARGV[7] then
    local other = redis.pcall('GET', KEYS[4])
    if type(other) == 'string' and string.sub(other, 1, 32) == ARGV[7] then
        if ARGV[8] == '0' then
            redis.pcall('DEL', KEYS[4])
            redis.pcall('ZREM', index, KEYS[4])
        else
            redis.pcall('PEXPIRE', KEYS[4], ARGV[8])
            redis.pcall('ZADD', index, now + ARGV[8], KEYS[4])
        end
    end
end
return {place, fence}
""")

# KEYS: the lock and the list. ARGV: the token, and the key of the lock that this lock, judging by
# its name, may be a place of; both may have waiters, because the name may also be a separate
# lock's; "": of none. Names contain no space, so no lock's key is a mark or wake list.
RELEASE = Script("""
local key, of = KEYS[1], ARGV[2]
if KEYS[3] then
    local other = redis.pcall('GET', KEYS[3])
    if type(other) == 'string' and string.sub(other, 1, 32) == ARGV[3] then
        redis.pcall('DEL', KEYS[3])
        redis.pcall('ZREM', KEYS[2], KEYS[3])
    end
end
local found = redis.call('MGET', key, key .. ' waiting')
local value = found[1]
if not value or string.sub(value, 1, 32) ~= ARGV[1] then return 0 end
redis.call('DEL', key)
-- Also when it is handed on: the waiter may be gone.
redis.pcall('ZREM', KEYS[2], key)
if not found[2] and (of or '') == '' then return 1 end
for _, line in ipairs({key, of}) do
    if line ~= '' and redis.pcall('GET', line .. ' waiting') then
        local wake = line .. ' wake'
        -- As many as there are places; the limit ends what says who held it.
        local limit = string.match(value, ',(%d+)%]$') or 1
        if redis.pcall('RPUSH', wake, '') ~= 1 then redis.pcall('LTRIM', wake, 0, limit - 1) end
        redis.pcall('PEXPIRE', wake, 1000)
    end
end
return 1
""")

# KEYS: the list, then the locks. ARGV: all tokens joined without a separator, and all leases
# joined with spaces, because each argument costs a client time; the last lease is also that of
# all further locks. Returns the positions, from 0, of the locks that were not extended.
EXTEND = Script("""
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local each_lease, lease = string.gmatch(ARGV[2], '%d+'), nil
local lost = {}
for i = 2, #KEYS do
    local token = string.sub(ARGV[1], 32 * i - 63, 32 * i - 32)
    lease = each_lease() or lease
    -- A key of another type must not cost the other leases.
    local value = redis.pcall('GET', KEYS[i])
    if type(value) == 'string' and string.sub(value, 1, 32) == token then
        redis.call('PEXPIRE', KEYS[i], lease)
        -- Nor must the list, which is for people.
        redis.pcall('ZADD', KEYS[1], now + lease, KEYS[i])
    else
        lost[#lost + 1] = i - 2
    end
end
return lost
""")

PEEK = Script("return {redis.call('GET', KEYS[1]), redis.call('PTTL', KEYS[1])}")

TIME = Script("return redis.call('TIME')")

# One page of the list, and the time. A lock that stays on the list during the whole scan is on
# one of the pages, whatever is added, removed or renewed in between.
PAGE_OF_LOCKS = Script("""
local time = redis.call('TIME')
local page = redis.call('ZSCAN', KEYS[1], ARGV[1], 'COUNT', ARGV[2])
return {time[1] * 1000 + math.floor(time[2] / 1000), page[1], page[2]}
""")
