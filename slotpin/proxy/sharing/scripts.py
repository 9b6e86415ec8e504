"""What Redis does in one step each. Times are Redis's own, in milliseconds.

Keys of one llama-server, all under one hash tag:

| key | holds |
| --- | --- |
| `era` | `run` (of the Redis process that all below belongs to) and `opens` (from when on slots may be claimed) |
| `alive` | leases: of each slotpin, and of each place in the queue |
| `claims` | by slot: `OWNER TOKEN`, or `! SINCE` where its last request may still run; by `r` and a slot: when free |
| `queue` | places `SLOT OWNER TOKEN` in their order |
| `flights` | by `OWNER TOKEN`: `KIND SLOT WIDTH SENT` of a request at the server; kind `p`: pinned, `s`: the server |
|   | chose its slot, `g`: as `s`, and its client has left |
| `meta` | `epoch`, `high` (last task number in it), `begun`, `strays`; by `ran` and a slot: who was there |
| `lefts` | by conversation: what its last turn left, the counts at that moment, and when it was |
| `table` | by conversation: its entry; `log` has the version of each |
"""

from __future__ import annotations

KEYS = ("era", "alive", "claims", "queue", "flights", "meta", "lefts", "table", "log")

# Every script begins with this. ARGV: me, lease, the run that this slotpin knew last, its epoch, the highest task
# number that it has seen there; what follows is in `given`.
_HEAD = """
local era, alive, claims, queue, flights, meta, lefts, tbl, log = unpack(KEYS)
local me, lease, known, epoch, high = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4], tonumber(ARGV[5])
local given = {}
for at = 6, #ARGV do given[at - 5] = ARGV[at] end
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
local function text(number) return string.format('%.0f', number) end
local info = redis.call('INFO', 'server')
local run = string.match(info, 'run_id:(%w+)')
local found = redis.call('HMGET', era, 'run', 'opens')
local opens = tonumber(found[2] or 0)
if found[1] ~= run then
  -- What was claimed before is not known here, or an old copy. Where nobody can have claimed anything yet in this life
  -- of Redis, there is nothing to wait for.
  opens = now + lease
  if not found[1] and known == '' then
    local up = tonumber(string.match(info, 'uptime_in_seconds:(%d+)')) * 1000
    opens = math.max(now, now - up + lease)
  end
  redis.call('DEL', alive, claims, queue, flights)
  redis.call('HSET', era, 'run', run, 'opens', text(opens))
end
redis.call('ZADD', alive, now + lease, me)
local function lives(name)
  local ends = redis.call('ZSCORE', alive, name)
  return ends and tonumber(ends) > now
end
local current = redis.call('HGET', meta, 'epoch')
if not current then
  current = epoch
  redis.call('HSET', meta, 'epoch', epoch)
end
local highest = tonumber(redis.call('HGET', meta, 'high') or -1)
if current == epoch and high > highest then
  highest = high
  redis.call('HSET', meta, 'high', text(high))
end
local function state() return {run, math.max(0, opens - now), current, highest, text(now)} end
local function number(key) return tonumber(redis.call('HGET', meta, key) or 0) end
local function counts() return {number('begun'), number('strays')} end
-- Requests of which nobody can say that they keep out of this one's slot: every `KIND`, without those that are excused.
local function others(kinds, own, excused)
  local all = {}
  local flown = redis.call('HGETALL', flights)
  for at = 1, #flown, 2 do
    local name = flown[at]
    if name ~= own and not excused[name] then
      local kind, slot, width, sent = string.match(flown[at + 1], '^(%S+) (%S+) (%S+) (%S+)$')
      if string.find(kinds, kind, 1, true) then all[#all + 1] = {name, kind, slot, width, text(now - sent)} end
    end
  end
  return all
end
local function width(own)
  local sum = 0
  for _, flight in ipairs(others('ps', own, {})) do sum = sum + flight[4] end
  return sum
end
"""

# given: slot, token, width, conversation or role, whether a look showed the slot busy, how long ago (-1: no look).
# Answers 'settling', 'wait' or 'mine'; then when a look can show that the slot is free (-1: it is), who ran there last,
# what the conversation left, the counts, and the flights that could be in the slot.
CLAIM = (
    _HEAD
    + """
local slot, token, wide, who = given[1], given[2], given[3], given[4]
local busy, age = given[5] == '1', tonumber(given[6])
if now < opens then return {'settling', state()} end
local mine = me .. ' ' .. token
local place = slot .. ' ' .. mine
local holder = redis.call('HGET', claims, slot)
local since = nil
local held = false
if holder and holder ~= mine then
  local owner, what = string.match(holder, '^(%S+) (%S+)$')
  if owner == '!' then since = tonumber(what)
  elseif lives(owner) then held = true
  else since = now end
end
local first = nil
for _, waiting in ipairs(redis.call('ZRANGE', queue, 0, -1)) do
  if string.sub(waiting, 1, #slot + 1) == slot .. ' ' then
    if waiting == place or lives(waiting) then
      first = first or waiting
    else
      redis.call('ZREM', queue, waiting)
    end
  end
end
if held or (first and first ~= place) then
  if not redis.call('ZSCORE', queue, place) then
    redis.call('ZADD', queue, redis.call('HINCRBY', meta, 'places', 1), place)
  end
  redis.call('ZADD', alive, now + lease, place)
  return {'wait', state()}
end
redis.call('ZREM', queue, place)
redis.call('ZREM', alive, place)
redis.call('HSET', claims, slot, mine)
local seen = age >= 0 and now - age or 0
if since and not busy and seen >= since + 1100 then since = nil end
if not since and busy and seen > tonumber(redis.call('HGET', claims, 'r' .. slot) or 0) then since = now - 1100 end
local left, ran = redis.call('HGET', lefts, who), redis.call('HGET', meta, 'ran' .. slot)
local before = counts()
redis.call('HSET', meta, 'ran' .. slot, who)
redis.call('HINCRBY', meta, 'begun', 1)
redis.call('HSET', flights, mine, 'p ' .. slot .. ' ' .. wide .. ' ' .. text(now))
return {'mine', state(), since and math.max(0, since + 1100 - now) or -1, ran or '', left or '', before,
  others('sg', mine, {})}
"""
)

# given: kind, slot, token, width, conversation or role, then the flights that it has been shown not to meet (*: all).
# Answers 'go' or 'wait'; then the flights that it might meet, how wide all are, what the conversation left, the counts.
FLY = (
    _HEAD
    + """
local kind, slot, token, wide, who = given[1], given[2], given[3], given[4], given[5]
local mine = me .. ' ' .. token
local excused = {}
for at = 6, #given do excused[given[at]] = true end
local met = {}
if not excused['*'] then met = others(kind == 'p' and 'sg' or 'p', mine, excused) end
local left, before = '', counts()
if #met == 0 then
  if kind == 's' then
    left = redis.call('HGET', lefts, who) or ''
    redis.call('HINCRBY', meta, 'begun', 1)
    redis.call('HINCRBY', meta, 'strays', 1)
  end
  redis.call('HSET', flights, mine, kind .. ' ' .. slot .. ' ' .. wide .. ' ' .. text(now))
end
return {#met == 0 and 'go' or 'wait', state(), met, width(mine), left, before}
"""
)

# given: slot (empty: none), token, 1 if the server is done with it. Nothing of it is left, also of its place.
RELEASE = (
    _HEAD
    + """
local slot, token, settled = given[1], given[2], given[3] == '1'
local mine = me .. ' ' .. token
if slot ~= '' then
  local place = slot .. ' ' .. mine
  redis.call('ZREM', queue, place)
  redis.call('ZREM', alive, place)
  if redis.call('HGET', claims, slot) == mine then
    if settled then
      redis.call('HDEL', claims, slot)
      redis.call('HSET', claims, 'r' .. slot, text(now))
    else
      redis.call('HSET', claims, slot, '! ' .. text(now))
    end
  end
end
local flight = redis.call('HGET', flights, mine)
if flight then
  local kind, at, wide = string.match(flight, '^(%S+) (%S+) (%S+)')
  if kind == 's' and not settled then
    redis.call('HSET', flights, mine, 'g ' .. at .. ' ' .. wide .. ' ' .. text(now))
  else
    redis.call('HDEL', flights, mine)
  end
end
return {'ok', state()}
"""
)

# given: conversation, what its turn has left.
LEAVE = (
    _HEAD
    + """
redis.call('HSET', lefts, given[1], given[2] .. ' ' .. table.concat(counts(), ' ') .. ' ' .. text(now))
return {'ok', state()}
"""
)

# given: the epoch that has ended. `epoch` is the next.
END_EPOCH = (
    _HEAD
    + """
if current == given[1] then
  current, highest = epoch, -1
  redis.call('HSET', meta, 'epoch', epoch)
  redis.call('HDEL', meta, 'high')
end
return {'ok', state()}
"""
)

# given: how many claims, their slots, tokens and whether they were granted (1), then the flights: token, kind, slot,
# width, age. All that this slotpin has; while nothing may be claimed what is not known yet is taken over, and what it
# no longer has is dropped.
BEAT = (
    _HEAD
    + """
local had, flown = {}, {}
local count = tonumber(given[1])
for at = 2, 3 * count, 3 do
  local mine = me .. ' ' .. given[at + 1]
  had[mine] = given[at]
  if now < opens and given[at + 2] == '1' then redis.call('HSETNX', claims, given[at], mine) end
end
for at = 3 * count + 2, #given, 5 do
  local value = given[at + 1] .. ' ' .. given[at + 2] .. ' ' .. given[at + 3] .. ' ' .. text(now - given[at + 4])
  flown[me .. ' ' .. given[at]] = value
end
if now < opens then
  for mine, flight in pairs(flown) do redis.call('HSETNX', flights, mine, flight) end
end
local held = redis.call('HGETALL', claims)
for at = 1, #held, 2 do
  if string.sub(held[at + 1], 1, #me + 1) == me .. ' ' and not had[held[at + 1]] then
    redis.call('HSET', claims, held[at], '! ' .. text(now))
  end
end
local all = redis.call('HGETALL', flights)
for at = 1, #all, 2 do
  local kind, sent = string.match(all[at + 1], '^(%S+) %S+ %S+ (%S+)$')
  local owner = string.match(all[at], '^(%S+)')
  if kind == 'g' or not lives(owner) then
    if now - sent > 60000 then redis.call('HDEL', flights, all[at]) end
  elseif owner == me and not flown[all[at]] then
    redis.call('HDEL', flights, all[at])
  end
end
redis.call('ZREMRANGEBYSCORE', alive, '-inf', now - 60000)
for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, 604800000) end
local others = 0
for _, name in ipairs(redis.call('ZRANGEBYSCORE', alive, '(' .. text(now), '+inf')) do
  if name ~= me and not string.find(name, ' ', 1, true) then others = others + 1 end
end
return {'ok', state(), others}
"""
)

# What this slotpin had is free; what it could not end the next one looks for.
BYE = (
    _HEAD
    + """
redis.call('ZREM', alive, me)
local held = redis.call('HGETALL', claims)
for at = 1, #held, 2 do
  if string.sub(held[at + 1], 1, #me + 1) == me .. ' ' then
    redis.call('HSET', claims, held[at], '! ' .. text(now))
  end
end
return {'ok', state()}
"""
)

# given: the version known, 1 to write whatever the version is, then conversations and their entries (empty: forget).
# Answers 'ok' or 'changed', the version, what was written since the one known, the slots that are claimed, and what the
# last of these conversations left.
COMMIT = (
    _HEAD
    + """
local newest = tonumber(redis.call('ZREVRANGE', log, 0, 0, 'WITHSCORES')[2] or 0)
local version = tonumber(given[1])
local again = version > newest and 1 or 0
if again == 1 then version = 0 end
local news = {}
if version < newest then
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', log, '(' .. text(version), '+inf')) do
    news[#news + 1] = name
    news[#news + 1] = redis.call('HGET', tbl, name) or ''
  end
end
local slots = {}
local held = redis.call('HGETALL', claims)
for at = 1, #held, 2 do
  if string.sub(held[at], 1, 1) ~= 'r' and string.sub(held[at + 1], 1, 1) ~= '!' then slots[#slots + 1] = held[at] end
end
local left = #given > 2 and redis.call('HGET', lefts, given[#given - 1]) or ''
if (version < newest or again == 1) and given[2] ~= '1' then
  return {'changed', state(), newest, again, news, slots, left}
end
for at = 3, #given, 2 do
  newest = newest + 1
  redis.call('ZADD', log, newest, given[at])
  redis.call('HSET', tbl, given[at], given[at + 1])
end
for _, old in ipairs(redis.call('ZRANGE', log, 0, -257)) do
  redis.call('ZREM', log, old)
  redis.call('HDEL', tbl, old)
  redis.call('HDEL', lefts, old)
end
return {'ok', state(), newest, again, news, slots, left}
"""
)
