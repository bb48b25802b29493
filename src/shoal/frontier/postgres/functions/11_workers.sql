-- Workers that send heartbeats. Those of all runs watch each other.

-- The workers of all runs: late_at is when the last heartbeat is half a session old, dead_at when the worker is dead if it
-- stays silent. heard_until: without another heartbeat of any worker until then, the store may have been away.
CREATE VIEW session AS
SELECT w.run, w.name, w.epoch, w.session, w.beat_at + w.session * {HEARD_GAP} AS late_at,
       greatest(w.beat_at, h.since) + w.session AS dead_at, h.at + w.session * {HEARD_GAP} AS heard_until
FROM worker w
CROSS JOIN LATERAL (SELECT * FROM heard WHERE session = w.session LIMIT 1) h
WHERE EXISTS (SELECT FROM run r WHERE r.id = w.run AND NOT r.deleting);

-- Record a heartbeat. FENCED if the worker was fenced with a later epoch. Returns the seconds until a late worker of any run
-- is dead; null if no other worker is late. Not durable at once: after a crash, silence begins anew.
CREATE FUNCTION beat(
    _run integer, _offset double precision, _worker text, _epoch bigint, _session double precision, _pid integer,
    _machine text
) RETURNS double precision LANGUAGE plpgsql AS $$
DECLARE
    _now double precision;
    _heard record;
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true);
    PERFORM check_run(_run);
    _now := clock(_offset);
    INSERT INTO worker AS w (run, name, epoch, session, beat_at, pid, machine)
        VALUES (_run, _worker, _epoch, _session, _now, _pid, _machine)
        ON CONFLICT (run, name) DO UPDATE SET epoch = excluded.epoch, session = excluded.session,
            beat_at = greatest(w.beat_at, excluded.beat_at), pid = excluded.pid, machine = excluded.machine;
    PERFORM check_fence(_run, _worker, _epoch);  -- with the row locked: nobody fences the worker until the commit
    SELECT bool_or(h.session = _session) AS is_known, bool_or(_now - h.at > h.session * {HEARD_GAP} / 4) AS is_old
        INTO _heard FROM heard h;
    IF _heard.is_known IS NOT TRUE THEN
        INSERT INTO heard (session, at, since) VALUES (_session, _now, _now) ON CONFLICT DO NOTHING;
    END IF;
    IF _heard.is_old THEN
        UPDATE heard h SET at = greatest(h.at, _now),
            since = CASE WHEN _now - h.at > h.session * {HEARD_GAP} THEN _now ELSE h.since END
            WHERE h.session IN (  -- one call updates a row, the others skip it
                SELECT o.session FROM heard o WHERE _now - o.at > o.session * {HEARD_GAP} / 4
                ORDER BY o.session FOR NO KEY UPDATE SKIP LOCKED);
    END IF;
    -- Until a late worker is dead, heartbeats must come often enough for its session.
    RETURN (
        SELECT min(CASE WHEN s.dead_at <= _now THEN 0 ELSE least(s.dead_at - _now, s.session * {HEARD_GAP} / 2) END)
        FROM session s WHERE s.late_at <= _now);
END
$$;

-- Fence a dead worker of any run, under the epoch after its own. Returns its run, its name and how many leases it had; nothing
-- if none is dead, or another call fences it.
CREATE FUNCTION fence_silent(_offset double precision)
RETURNS TABLE (run_id text, worker text, leases integer) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    _now double precision;
    _dead record;
    _epoch bigint;
BEGIN
    _now := clock(_offset);
    SELECT s.run, s.name INTO _dead FROM session s
        WHERE s.late_at <= _now AND s.dead_at <= _now AND s.heard_until >= _now LIMIT 1;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    PERFORM lock_run(_dead.run);              -- before all other locks
    PERFORM 1 FROM worker w WHERE w.run = _dead.run AND w.name = _dead.name FOR UPDATE SKIP LOCKED;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    SELECT s.epoch INTO _epoch FROM session s
        WHERE s.run = _dead.run AND s.name = _dead.name AND s.dead_at <= _now AND s.heard_until >= _now;
    IF FOUND THEN
        RETURN QUERY
            SELECT r.run_id, _dead.name, fence(_dead.run, _offset, _dead.name, _epoch + 1)
            FROM run r WHERE r.id = _dead.run;
    END IF;
END
$$;

CREATE FUNCTION leave(_run integer, _worker text, _epoch bigint) RETURNS void LANGUAGE sql SET search_path FROM CURRENT AS $$
    DELETE FROM worker w WHERE w.run = _run AND w.name = _worker AND w.epoch <= _epoch
$$;

-- Workers that send heartbeats, and all others that hold leases; these have no session. The clock is read once, and leases
-- are counted by number before names are looked up: a run has many more leases than workers.
CREATE FUNCTION workers(_run integer, _offset double precision)
RETURNS TABLE (
    worker text, machine text, pid integer, session double precision, silent_for double precision, leases bigint
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    _now double precision := clock(_offset);
BEGIN
    RETURN QUERY
        SELECT coalesce(w.name, h.name), coalesce(w.machine, ''), coalesce(w.pid, 0), coalesce(w.session, 0),
            coalesce(greatest(_now - w.beat_at, 0), 0), coalesce(h.leases, 0)
        FROM (SELECT * FROM worker w WHERE w.run = _run) w
        FULL JOIN (
            SELECT n.name, c.leases FROM (
                SELECT h.worker AS number, count(*) AS leases FROM held h
                WHERE h.run = _run AND h.state = {LEASED} AND h.worker > 0 GROUP BY h.worker
            ) c JOIN holder n ON n.run = _run AND n.number = c.number
        ) h ON h.name = w.name
        ORDER BY 1;
END
$$;
