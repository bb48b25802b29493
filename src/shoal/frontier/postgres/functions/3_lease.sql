-- Who may work on what.

-- Leases that ran out or are given back unused, and requests that have waited long enough, are ready again in their old
-- place, or dead. The caller has locked them, their hosts and lanes, and settles the ledgers from what this returns.
CREATE OR REPLACE FUNCTION give_back(_tokens bigint[], _released boolean, _contacted boolean, _now double precision)
RETURNS TABLE (run integer, ready bigint, waiting bigint, leased bigint, dead bigint) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    _gone record;
BEGIN
    WITH gone AS (
        DELETE FROM held h USING unnest(_tokens) u(token) WHERE h.token = u.token RETURNING h.*
    ), judged AS MATERIALIZED (
        SELECT g.*, g.state = 2 AND NOT _released AND g.attempts >= r.max_attempts AS dies,
            'its worker was lost while working on it, '
            || CASE g.attempts WHEN 1 THEN 'once' ELSE g.attempts || ' times' END AS reason
        FROM gone g JOIN run r ON r.id = g.run
    ), back AS (
        INSERT INTO ready (rank, id, at, lane, attempts, status, items)
            SELECT j.rank, j.id, CASE j.state WHEN 2 THEN _now ELSE j.at END, j.lane,
                j.attempts - _released::integer, j.status, j.items
            FROM judged j WHERE NOT j.dies
    ), died AS (
        INSERT INTO outcome (id, at, run, status, items, attempts, state, kind, reason)
            SELECT j.id, _now, j.run, j.status, j.items, least(j.attempts, 32767), 4, 'worker lost', j.reason
            FROM judged j WHERE j.dies
    ), told AS (
        INSERT INTO event (request, at, what, detail)
            SELECT j.id, _now, 'lease lost', j.reason FROM judged j WHERE j.state = 2 AND NOT _released
    )
    SELECT array_agg(j.lane) FILTER (WHERE NOT j.dies) AS lanes, array_agg(j.rank) FILTER (WHERE NOT j.dies) AS ranks,
        array_agg(j.id) FILTER (WHERE NOT j.dies) AS ids,
        array_agg(j.host) FILTER (WHERE j.state = 2) AS hosts,
        array_agg(_contacted) FILTER (WHERE j.state = 2) AS contacted,
        array_agg(j.run) AS runs, array_agg(j.state) AS states, array_agg(j.dies) AS dies
        INTO _gone FROM judged j;
    PERFORM free_hosts(_gone.hosts, _gone.contacted, _now);
    PERFORM fill_lanes(_gone.lanes, _gone.ranks, _gone.ids);
    RETURN QUERY
        SELECT u.run, count(*) FILTER (WHERE NOT u.dies), count(*) FILTER (WHERE u.state = 1),
            count(*) FILTER (WHERE u.state = 2), count(*) FILTER (WHERE u.dies)
        FROM unnest(_gone.runs, _gone.states, _gone.dies) u(run, state, dies) GROUP BY u.run;
END
$$;

-- Up to _limit requests in order, and one row more that has only the hint.
CREATE OR REPLACE FUNCTION lease(_run integer, _offset double precision, _limit integer, _ttl double precision)
RETURNS TABLE (
    token bigint, fingerprint bytea, payload bytea, attempt integer, host text, learned_delay double precision,
    wait double precision
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    _now double precision := clock(_offset);
    _gives boolean;
    _overdue bigint[];
    _lost integer[];                          -- hosts of leases that ran out
    _lanes integer[];
    _hosts integer[];
    _near record;                             -- lanes that may be leased from
    _width integer := least(greatest(_limit, 8), 20000);
    _from record;
    _each integer;
    _taken_lanes integer[];                   -- what is leased, in order
    _taken_ranks double precision[];
    _taken_ids bigint[];
    _count integer := 0;
    _back record;
    _moment double precision;
BEGIN
    SELECT r.state NOT IN ('paused', 'cancelled') INTO _gives FROM run r WHERE r.id = _run;
    IF NOT FOUND THEN
        PERFORM no_run();
    END IF;
    -- One at a time for each run: a second one would only choose the same lanes, and find them empty.
    PERFORM pg_advisory_xact_lock('ledger'::regclass::oid::integer, _run);
    _now := clock(_offset);

    SELECT array_agg(o.token), array_agg(DISTINCT o.host) FILTER (WHERE o.state = 2), array_agg(DISTINCT o.lane)
        INTO _overdue, _lost, _lanes
        FROM ledger g CROSS JOIN LATERAL (
            SELECT h.token, h.host, h.lane, h.state FROM held h
            WHERE h.run = g.run AND h.due <= _now ORDER BY h.due LIMIT 500 FOR UPDATE SKIP LOCKED
        ) o
        WHERE g.leased + g.waiting > 0;

    IF _gives AND _limit > 0 THEN
        LOOP  -- past lanes that are open no more, since another run took the last place of their host
            SELECT array_agg(n.lane) AS lanes, array_agg(n.host) AS hosts,
                count(*) FILTER (WHERE n.place = 1 AND n.room > 0 AND n.due_at <= _now) AS fit,
                count(*) FILTER (WHERE n.place = 1) AS open
                INTO _near
                FROM (
                    (SELECT p.lane, p.host, p.place, p.room, p.due_at FROM politeness p
                     WHERE p.run = _run AND p.place = 1 ORDER BY p.best_rank, p.best_id LIMIT _width)
                    UNION ALL
                    (SELECT p.lane, p.host, p.place, p.room, p.due_at FROM politeness p
                     WHERE p.run = _run AND p.place = 2 AND p.due <= _now ORDER BY p.due LIMIT 1000)
                ) n;
            EXIT WHEN _near.fit >= _limit OR _near.open < _width OR _width >= 20000;
            _width := _width * 4;
        END LOOP;
        _lanes := _lanes || _near.lanes;
        _hosts := _near.hosts;
    END IF;

    PERFORM lock_hosts(_lost || _hosts);
    IF _lost IS NOT NULL THEN
        _lanes := _lanes || ARRAY(SELECT l.id FROM lane l WHERE l.host = ANY(_lost) AND l.place = 3);
    END IF;
    PERFORM lock_lanes(_lanes);
    _now := clock(_offset);

    IF _overdue IS NOT NULL THEN
        SELECT array_agg(b.run ORDER BY b.run) AS runs, array_agg(b.ready ORDER BY b.run) AS ready,
            array_agg(b.waiting ORDER BY b.run) AS waiting, array_agg(b.leased ORDER BY b.run) AS leased,
            array_agg(b.dead ORDER BY b.run) AS dead
            INTO _back FROM give_back(_overdue, false, true, _now) b;
        PERFORM place_lanes(_lanes, _now);
    END IF;

    IF _gives AND _limit > 0 AND _lanes IS NOT NULL THEN
        SELECT array_agg(p.lane) AS lanes, array_agg(p.room) AS rooms, array_agg(p.best_rank) AS ranks,
            array_agg(p.best_id) AS ids
            INTO _from FROM politeness p
            WHERE p.lane = ANY(_lanes) AND p.run = _run AND p.best_id IS NOT NULL AND p.room > 0 AND p.due_at <= _now;
        _each := 2 + (3 * _limit) / (2 * coalesce(cardinality(_from.lanes), 1));
        LOOP  -- deeper into the lanes, until no lane could have more of the best
            SELECT array_agg(t.lane), array_agg(t.rank), array_agg(t.id)
                INTO _taken_lanes, _taken_ranks, _taken_ids
                FROM (
                    SELECT f.lane, q.rank, q.id
                    FROM unnest(_from.lanes, _from.rooms, _from.ranks, _from.ids) f(lane, room, rank, id)
                    CROSS JOIN LATERAL (
                        SELECT r.rank, r.id FROM ready r WHERE r.lane = f.lane AND (r.rank, r.id) >= (f.rank, f.id)
                        ORDER BY r.rank, r.id LIMIT least(f.room, _each)
                    ) q
                    ORDER BY q.rank, q.id LIMIT _limit
                ) t;
            EXIT WHEN _each >= _limit OR NOT EXISTS (
                SELECT FROM unnest(_taken_lanes) t(lane) GROUP BY t.lane HAVING count(*) >= _each);
            _each := _each * 4;
        END LOOP;
        _count := coalesce(cardinality(_taken_ids), 0);
    END IF;

    IF _count > 0 THEN
        RETURN QUERY
            WITH gone AS (
                DELETE FROM ready r USING unnest(_taken_lanes, _taken_ranks, _taken_ids) u(lane, rank, id)
                WHERE r.lane = u.lane AND r.rank = u.rank AND r.id = u.id RETURNING r.*
            ), given AS MATERIALIZED (
                SELECT nextval('token') AS token, g.*, q.fingerprint, q.payload, l.host
                FROM gone g JOIN request q ON q.id = g.id JOIN lane l ON l.id = g.lane
            ), kept AS (
                INSERT INTO held (token, id, rank, due, at, run, lane, host, attempts, status, items, state, fingerprint)
                    SELECT g.token, g.id, g.rank, _now + _ttl, _now, _run, g.lane, g.host, g.attempts + 1, g.status,
                        g.items, 2, g.fingerprint
                    FROM given g
            )
            SELECT g.token, g.fingerprint, g.payload, g.attempts + 1, h.name, coalesce(h.learned_delay, 0),
                NULL::double precision
            FROM given g JOIN host h ON h.id = g.host ORDER BY g.rank, g.id;
        UPDATE host SET in_flight = in_flight + s.n
            FROM (
                SELECT l.host, count(*) AS n FROM unnest(_taken_lanes) t(lane) JOIN lane l ON l.id = t.lane
                GROUP BY l.host
            ) s
            WHERE id = s.host;
        UPDATE lane SET ready = ready - s.n, best_rank = s.rank, best_id = s.id, place = s.place,
            due = CASE WHEN s.place = 2 THEN s.due_at END
            FROM (
                SELECT t.lane, t.n, b.rank, b.id, p.due_at, place_of(b.id, p.room, p.due_at, _now) AS place
                FROM (
                    SELECT u.lane, count(*) AS n, max(u.nth) AS last
                    FROM unnest(_taken_lanes) WITH ORDINALITY u(lane, nth) GROUP BY u.lane
                ) t
                JOIN politeness p ON p.lane = t.lane
                LEFT JOIN LATERAL (
                    SELECT r.rank, r.id FROM ready r
                    WHERE r.lane = t.lane AND (r.rank, r.id) > (_taken_ranks[t.last], _taken_ids[t.last])
                    ORDER BY r.rank, r.id LIMIT 1
                ) b ON true
            ) s
            WHERE lane.id = s.lane;
    END IF;
    IF _gives AND _limit > 0 THEN
        _lanes := ARRAY(SELECT unnest(_lanes) EXCEPT SELECT unnest(_taken_lanes));
        IF cardinality(_lanes) > 0 THEN
            PERFORM place_lanes(_lanes, _now);
        END IF;
    END IF;

    IF _overdue IS NOT NULL THEN
        PERFORM 1 FROM ledger g WHERE g.run = ANY(_back.runs || _run) ORDER BY g.run FOR NO KEY UPDATE;
        UPDATE ledger g SET ready = g.ready + b.ready, waiting = g.waiting - b.waiting,
            leased = g.leased - b.leased, dead = g.dead + b.dead
            FROM unnest(_back.runs, _back.ready, _back.waiting, _back.leased, _back.dead)
                b(run, ready, waiting, leased, dead)
            WHERE g.run = b.run;
    END IF;
    IF _count > 0 THEN
        UPDATE ledger g SET ready = g.ready - _count, leased = g.leased + _count WHERE g.run = _run;
        IF NOT FOUND THEN
            PERFORM no_run();
        END IF;
    END IF;

    IF _gives AND (_count < _limit OR _limit = 0) THEN
        SELECT least(
            (SELECT h.due FROM held h WHERE h.run = _run ORDER BY h.due LIMIT 1),
            (SELECT l.due FROM lane l WHERE l.run = _run AND l.place = 2 ORDER BY l.due LIMIT 1),
            (SELECT _now FROM lane l WHERE l.run = _run AND l.place = 1 AND _limit > 0 LIMIT 1)
        ) INTO _moment;
    ELSIF _gives THEN
        _moment := _now;
    END IF;
    RETURN QUERY SELECT NULL::bigint, NULL::bytea, NULL::bytea, NULL::integer, NULL::text, NULL::double precision,
        greatest(_moment - _now, 0) WHERE _moment IS NOT NULL;
END
$$;

CREATE OR REPLACE FUNCTION renew(
    _run integer, _offset double precision, _token bigint[], _fingerprint bytea[], _ttl double precision
) RETURNS TABLE (nth bigint) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    _now double precision;
BEGIN
    PERFORM 1 FROM held h WHERE h.token = ANY(_token) ORDER BY h.token FOR NO KEY UPDATE;
    _now := clock(_offset);
    RETURN QUERY
        UPDATE held h SET due = _now + _ttl
            FROM unnest(_token, _fingerprint) WITH ORDINALITY u(token, fingerprint, nth)
            WHERE h.token = u.token AND h.fingerprint = u.fingerprint AND h.run = _run AND h.state = 2
            RETURNING u.nth;
END
$$;

-- Returns which of them were given back, counted from 1.
CREATE OR REPLACE FUNCTION release(
    _run integer, _offset double precision, _token bigint[], _fingerprint bytea[], _contacted boolean
) RETURNS TABLE (nth bigint) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    _held record;
    _lanes integer[];
    _now double precision;
BEGIN
    PERFORM 1 FROM held h WHERE h.token = ANY(_token) ORDER BY h.token FOR UPDATE;
    SELECT array_agg(h.token) AS tokens, array_agg(u.nth) AS nths, array_agg(h.host) AS hosts,
        array_agg(h.lane) AS lanes
        INTO _held
        FROM unnest(_token, _fingerprint) WITH ORDINALITY u(token, fingerprint, nth)
        JOIN held h ON h.token = u.token AND h.fingerprint = u.fingerprint AND h.run = _run AND h.state = 2;
    IF _held.tokens IS NULL THEN
        RETURN;
    END IF;
    PERFORM lock_hosts(_held.hosts);
    _lanes := _held.lanes || ARRAY(SELECT l.id FROM lane l WHERE l.host = ANY(_held.hosts) AND l.place = 3);
    PERFORM lock_lanes(_lanes);
    _now := clock(_offset);
    PERFORM give_back(_held.tokens, true, _contacted, _now);
    PERFORM place_lanes(_lanes, _now);
    UPDATE ledger g SET ready = g.ready + cardinality(_held.tokens), leased = g.leased - cardinality(_held.tokens)
        WHERE g.run = _run;
    RETURN QUERY SELECT unnest(_held.nths);
END
$$;
