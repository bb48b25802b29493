-- Workers that send heartbeats.

-- Record a heartbeat. FENCED if the worker was fenced with a later epoch. Returns the seconds until another worker is dead
-- if it stays silent; null if there is no other worker. Not durable at once: after a crash, silence begins anew.
CREATE FUNCTION beat(
    _run integer, _offset double precision, _worker text, _epoch bigint, _session double precision, _pid integer,
    _machine text
) RETURNS double precision LANGUAGE plpgsql AS $$
DECLARE
    _now double precision;
    _heard record;
    _due double precision;
BEGIN
    PERFORM set_config('synchronous_commit', 'off', true);
    PERFORM check_run(_run);
    _now := clock(_offset);
    INSERT INTO worker AS w (run, name, epoch, session, beat_at, pid, machine)
        VALUES (_run, _worker, _epoch, _session, _now, _pid, _machine)
        ON CONFLICT (run, name) DO UPDATE SET epoch = excluded.epoch, session = excluded.session,
            beat_at = greatest(w.beat_at, excluded.beat_at), pid = excluded.pid, machine = excluded.machine;
    PERFORM check_fence(_run, _worker, _epoch);  -- with the row locked: nobody fences the worker until the commit
    SELECT h.at, h.since INTO _heard FROM heard h WHERE h.run = _run;
    IF NOT FOUND THEN
        INSERT INTO heard (run, at, since) VALUES (_run, _now, _now) ON CONFLICT DO NOTHING;
        _heard.since := _now;
    ELSIF _now - _heard.at > _session * {HEARD_GAP} / 4 THEN  -- one call updates the row, the others skip it
        PERFORM 1 FROM heard h WHERE h.run = _run FOR NO KEY UPDATE SKIP LOCKED;
        IF FOUND THEN
            UPDATE heard h SET at = greatest(h.at, _now),
                since = CASE WHEN _now - h.at > _session * {HEARD_GAP} THEN _now ELSE h.since END
                WHERE h.run = _run RETURNING h.at, h.since INTO _heard;
        END IF;
    END IF;
    SELECT min(greatest(w.beat_at, _heard.since) + w.session) - _now INTO _due
        FROM worker w WHERE w.run = _run AND w.name <> _worker;
    RETURN CASE WHEN _due IS NOT NULL THEN greatest(_due, 0) END;
END
$$;

-- Fence a dead worker of a run, under the epoch after its own. Returns it and how many leases it had; nothing if none is
-- dead.
CREATE FUNCTION fence_silent(_run integer, _offset double precision)
RETURNS TABLE (worker text, leases integer) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    _now double precision;
    _dead record;
BEGIN
    PERFORM lock_run(_run);
    _now := clock(_offset);
    SELECT w.name, w.epoch INTO _dead FROM worker w JOIN heard h ON h.run = w.run
        WHERE w.run = _run AND _now - greatest(w.beat_at, h.since) >= w.session
            AND _now - h.at <= w.session * {HEARD_GAP}
        ORDER BY w.beat_at LIMIT 1 FOR UPDATE OF w SKIP LOCKED;
    IF FOUND THEN
        RETURN QUERY SELECT _dead.name, fence(_run, _offset, _dead.name, _dead.epoch + 1);
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
