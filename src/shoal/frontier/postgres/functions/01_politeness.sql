-- Which lanes may be leased from. The rules are in shoal/frontier/host_policy.py; a name in braces stands for a value from
-- shoal/frontier/postgres/constants.py.

-- All functions read tables row by row with LATERAL (... LIMIT 1). That always uses the index, whatever size the planner
-- assumes: a table that was empty at the last ANALYZE may have a million rows a minute later. Rows that are locked are
-- updated by their ctid. A row that is not locked could move and be skipped, so the number of updated rows is checked.

CREATE FUNCTION lane_key(_run integer, _host integer) RETURNS bigint LANGUAGE sql IMMUTABLE AS $$
    SELECT (_run::bigint << 32) + _host
$$;

-- A lane with the politeness in force for its host. After a rewind nobody knows when a host was last contacted: it counts
-- as contacted at the time of the rewind, which is the ended_at of host 0.
CREATE VIEW politeness AS
SELECT l.id AS lane, l.run, l.host, l.place, l.best_rank, l.best_id, l.due, l.ctid AS tid,
       {CONCURRENCY} - h.in_flight AS room, {DUE_AT} AS due_at,
       CASE WHEN h.longest > r.delay THEN {RECHECK} END AS recheck, CASE WHEN h.shared THEN {PAUSE} ELSE 2 END AS pause
FROM lane l
CROSS JOIN LATERAL (SELECT * FROM host WHERE id = l.host LIMIT 1) h
CROSS JOIN LATERAL (SELECT delay, concurrency FROM run WHERE id = l.run LIMIT 1) r
CROSS JOIN LATERAL (SELECT delay, concurrency, ended_at FROM host WHERE id = 0 LIMIT 1) e
CROSS JOIN LATERAL (SELECT {DELAY} AS delay) d;

CREATE FUNCTION place_of(_best_id bigint, _room integer, _due_at double precision, _now double precision)
RETURNS smallint LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN _best_id IS NULL THEN {EMPTY} WHEN _room <= 0 THEN {FULL} WHEN _due_at > _now THEN {LATER}
        ELSE {OPEN} END::smallint
$$;

-- When to check a lane again: see full_lanes(). _pause: seconds until then, if its host is full.
CREATE FUNCTION due_of(_place smallint, _due_at double precision, _now double precision, _pause double precision)
RETURNS double precision LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE _place WHEN {LATER} THEN _due_at WHEN {FULL} THEN _now + _pause END
$$;

-- Move lanes to where they belong after their hosts changed. The caller has locked both. (Helpers are in plpgsql because
-- it caches plans.)
CREATE FUNCTION place_lanes(_lanes bigint[], _now double precision) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    UPDATE lane SET place = s.place, due = due_of(s.place, s.due_at, _now, s.pause)
        FROM (
            SELECT p.tid, place_of(p.best_id, p.room, p.due_at, _now) AS place, least(p.due_at, _now + p.recheck) AS due_at,
                p.pause
            FROM unnest(_lanes) u(lane) CROSS JOIN LATERAL (SELECT * FROM politeness WHERE lane = u.lane LIMIT 1) p
        ) s
        WHERE lane.ctid = s.tid
            AND (lane.place <> s.place OR lane.due IS DISTINCT FROM due_of(s.place, s.due_at, _now, s.pause));
END
$$;

-- Some lanes that wait for these hosts: for each host, those that were not checked for the longest time. _hosts has each
-- host once. A call that frees a host checks these lanes. They are few, because thousands of runs may wait for one host.
-- Any other lane is checked by the next lease of its run after its due time.
CREATE FUNCTION full_lanes(_hosts integer[]) RETURNS bigint[] LANGUAGE plpgsql AS $$
BEGIN
    RETURN ARRAY(
        SELECT f.id FROM unnest(_hosts) u(host)
        CROSS JOIN LATERAL (
            SELECT l.id FROM lane l WHERE l.host = u.host AND l.place = {FULL} ORDER BY l.host, l.due LIMIT {MAX_FULL_LANES}
        ) f);
END
$$;

CREATE FUNCTION lock_hosts(_hosts integer[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM 1 FROM host WHERE id = ANY(_hosts) ORDER BY id FOR NO KEY UPDATE;
END
$$;

CREATE FUNCTION lock_lanes(_lanes bigint[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM 1 FROM lane WHERE id = ANY(_lanes) ORDER BY id FOR NO KEY UPDATE;
END
$$;

-- Count ended leases of these hosts, one for each entry. Without _contacted, all hosts were contacted. Locks the hosts, in
-- order, and returns each of them once. is_shared: whether other runs want one of them.
CREATE FUNCTION free_hosts(
    _hosts integer[], _contacted boolean[], _now double precision, OUT hosts integer[], OUT is_shared boolean
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    _freed record;
    _count integer := cardinality(_hosts);
    _rows integer;
BEGIN
    IF _count > 0 AND _hosts[1] = ALL(_hosts) THEN  -- a small batch of one host is frequent
        UPDATE host h SET in_flight = h.in_flight - _count,
            ended_at = CASE WHEN coalesce(cardinality(_contacted), 0) < _count OR true = ANY(_contacted)
                THEN greatest(h.ended_at, _now) ELSE h.ended_at END
            WHERE h.id = _hosts[1] RETURNING h.shared INTO is_shared;
        IF NOT FOUND THEN
            PERFORM refuse({CONFLICT}, 'a host is missing');
        END IF;
        hosts := _hosts[:1];
        RETURN;
    END IF;
    SELECT array_agg(e.host) AS hosts, array_agg(e.n) AS counts, array_agg(e.contacted) AS contacted INTO _freed
        FROM (
            SELECT u.host, count(*)::integer AS n, bool_or(coalesce(_contacted[u.nth], true)) AS contacted
            FROM unnest(_hosts) WITH ORDINALITY u(host, nth) GROUP BY u.host ORDER BY u.host
        ) e;
    -- The index makes this lock the rows in order. width_bucket() finds a place in a sorted array.
    WITH freed AS (
        UPDATE host h SET in_flight = h.in_flight - _freed.counts[width_bucket(h.id, _freed.hosts)],
            ended_at = CASE WHEN _freed.contacted[width_bucket(h.id, _freed.hosts)] THEN greatest(h.ended_at, _now)
                ELSE h.ended_at END
            WHERE h.id = ANY(_freed.hosts) RETURNING h.shared
    )
    SELECT count(*), bool_or(f.shared) INTO _rows, is_shared FROM freed f;
    IF _rows <> cardinality(_freed.hosts) THEN
        PERFORM refuse({CONFLICT}, 'a host is missing');
    END IF;
    hosts := _freed.hosts;
END
$$;

-- Count ready requests in these lanes, create lanes that are missing, and open empty ones. Locks the lanes, in order. A lane
-- without an id is only locked.
CREATE FUNCTION fill_lanes(_lanes bigint[], _ranks double precision[], _ids bigint[])
RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    INSERT INTO lane AS l (id, run, host, place, ready, best_rank, best_id)
        SELECT f.lane, (f.lane >> 32)::integer, (f.lane & 4294967295)::integer,
            CASE WHEN f.n > 0 THEN {OPEN} ELSE {EMPTY} END, f.n, f.rank, f.id
        FROM (
            SELECT DISTINCT ON (u.lane) u.lane, u.rank, u.id, count(u.id) OVER (
                PARTITION BY u.lane ORDER BY u.rank, u.id  -- so one sort is enough
                ROWS BETWEEN UNBOUNDED PRECEDING AND UNBOUNDED FOLLOWING) AS n
            FROM (SELECT u.lane, _ranks[u.nth] AS rank, _ids[u.nth] AS id FROM unnest(_lanes) WITH ORDINALITY u(lane, nth)) u
            ORDER BY u.lane, u.rank, u.id
        ) f
        ORDER BY f.lane
        ON CONFLICT (id) DO UPDATE SET
            ready = l.ready + excluded.ready,
            place = CASE WHEN l.place = {EMPTY} THEN excluded.place ELSE l.place END,
            best_rank = CASE WHEN l.best_id IS NULL OR (excluded.best_rank, excluded.best_id) < (l.best_rank, l.best_id)
                THEN excluded.best_rank ELSE l.best_rank END,
            best_id = CASE WHEN l.best_id IS NULL OR (excluded.best_rank, excluded.best_id) < (l.best_rank, l.best_id)
                THEN excluded.best_id ELSE l.best_id END;
END
$$;
