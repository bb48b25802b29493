-- Which lanes may be leased from. The rules are in shoal/frontier/host_policy.py; a name in braces stands for a value from
-- shoal/frontier/postgres/constants.py.

-- All functions read tables row by row with LATERAL (... LIMIT 1). That always uses the index, whatever size the planner
-- assumes: a table that was empty at the last ANALYZE may have a million rows a minute later. Rows that are locked are
-- updated by their ctid. A row that is not locked could move and be skipped, so the number of updated rows is checked.

-- A lane with the politeness in force for its host. After a rewind nobody knows when a host was last contacted: it counts
-- as contacted at the time of the rewind, which is the ended_at of host 0.
CREATE VIEW politeness AS
SELECT l.id AS lane, l.run, l.host, l.place, l.best_rank, l.best_id, l.due, l.ctid AS tid,
       {CONCURRENCY} - h.in_flight AS room, {DUE_AT} AS due_at
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

-- When to check a lane again: see full_lanes().
CREATE FUNCTION due_of(_place smallint, _due_at double precision, _now double precision)
RETURNS double precision LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE _place WHEN {LATER} THEN _due_at WHEN {FULL} THEN _now + 2 END
$$;

-- Move lanes to where they belong after their hosts changed. The caller has locked both. (Helpers are in plpgsql because
-- it caches plans.)
CREATE FUNCTION place_lanes(_lanes integer[], _now double precision) RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
BEGIN
    UPDATE lane SET place = s.place, due = due_of(s.place, s.due_at, _now)
        FROM (
            SELECT p.tid, place_of(p.best_id, p.room, p.due_at, _now) AS place, p.due_at
            FROM unnest(_lanes) u(lane) CROSS JOIN LATERAL (SELECT * FROM politeness WHERE lane = u.lane LIMIT 1) p
        ) s
        WHERE lane.ctid = s.tid
            AND (lane.place <> s.place OR lane.due IS DISTINCT FROM due_of(s.place, s.due_at, _now));
END
$$;

-- Some lanes that wait for these hosts: for each host, those that were not checked for the longest time. Who frees a host
-- checks them. They are few, since thousands of runs may wait for one host; the next lease of its run after its due time
-- checks any other lane.
CREATE FUNCTION full_lanes(_hosts integer[]) RETURNS integer[] LANGUAGE plpgsql AS $$
BEGIN
    RETURN ARRAY(
        SELECT f.id FROM (SELECT DISTINCT u.host FROM unnest(_hosts) u(host)) u
        CROSS JOIN LATERAL (
            SELECT l.id FROM lane l WHERE l.host = u.host AND l.place = {FULL} ORDER BY l.host, l.due LIMIT 8
        ) f);
END
$$;

CREATE FUNCTION lock_hosts(_hosts integer[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM 1 FROM host WHERE id = ANY(_hosts) ORDER BY id FOR NO KEY UPDATE;
END
$$;

CREATE FUNCTION lock_lanes(_lanes integer[]) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM 1 FROM lane WHERE id = ANY(_lanes) ORDER BY id FOR NO KEY UPDATE;
END
$$;

-- Count ended leases of these hosts, one for each entry (-1: none). The caller has locked the hosts.
CREATE FUNCTION free_hosts(_hosts integer[], _contacted boolean[], _now double precision)
RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    _rows integer;
BEGIN
    UPDATE host SET in_flight = in_flight - s.n, ended_at = CASE WHEN s.contacted THEN _now ELSE ended_at END
        FROM (
            SELECT x.tid, e.n, e.contacted
            FROM (
                SELECT u.host, count(*) AS n, bool_or(u.contacted) AS contacted
                FROM unnest(_hosts, _contacted) u(host, contacted) GROUP BY u.host
            ) e
            CROSS JOIN LATERAL (SELECT h.ctid AS tid FROM host h WHERE h.id = e.host LIMIT 1) x
        ) s
        WHERE host.ctid = s.tid;
    GET DIAGNOSTICS _rows = ROW_COUNT;
    IF _rows <> (SELECT count(DISTINCT u.host) FROM unnest(_hosts) u(host) WHERE u.host > 0) THEN
        PERFORM refuse({CONFLICT}, 'a row was changed that was not locked');
    END IF;
END
$$;

-- Count ready requests in these lanes, and open lanes that were empty. The caller has locked the lanes.
CREATE FUNCTION fill_lanes(_lanes integer[], _ranks double precision[], _ids bigint[])
RETURNS void LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    _rows integer;
BEGIN
    UPDATE lane SET
        ready = ready + s.n,
        place = CASE WHEN place = {EMPTY} THEN {OPEN} ELSE place END,
        best_rank = CASE WHEN best_id IS NULL OR (s.rank, s.id) < (best_rank, best_id) THEN s.rank ELSE best_rank END,
        best_id = CASE WHEN best_id IS NULL OR (s.rank, s.id) < (best_rank, best_id) THEN s.id ELSE best_id END
        FROM (
            SELECT x.tid, f.rank, f.id, f.n
            FROM (
                SELECT DISTINCT ON (u.lane) u.lane, u.rank, u.id, count(*) OVER (PARTITION BY u.lane) AS n
                FROM unnest(_lanes, _ranks, _ids) u(lane, rank, id) ORDER BY u.lane, u.rank, u.id
            ) f
            CROSS JOIN LATERAL (SELECT l.ctid AS tid FROM lane l WHERE l.id = f.lane LIMIT 1) x
        ) s
        WHERE lane.ctid = s.tid;
    GET DIAGNOSTICS _rows = ROW_COUNT;
    IF _rows <> (SELECT count(DISTINCT u.lane) FROM unnest(_lanes) u(lane)) THEN
        PERFORM refuse({CONFLICT}, 'a row was changed that was not locked');
    END IF;
END
$$;
