-- Leasing.

-- One lease call at a time for each run: a second one would choose the same lanes and find them empty.
CREATE FUNCTION lock_run(_run integer) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_advisory_xact_lock('ledger'::regclass::oid::integer, _run);
END
$$;

-- The hosts of candidate lanes of a run, enough to contain its best _limit requests. Some of them cannot be leased from.
-- overdue: whether a lease or a wait of any run has ended. halted: whether the run leases nothing now.
CREATE FUNCTION near_lanes(
    _run integer, _limit integer, _now double precision, OUT hosts integer[], OUT overdue boolean, OUT halted boolean
) LANGUAGE plpgsql AS $$
DECLARE
    _width integer := least(greatest(_limit, 8), 20000);
    _fit integer;
    _open integer;
BEGIN
    LOOP  -- until enough are due: another run may have filled the hosts of open lanes
        SELECT array_agg(n.host), count(*) FILTER (WHERE n.place = {OPEN}), EXISTS (SELECT FROM held h WHERE h.due <= _now),
            (SELECT r.state IN ({HALTED}) FROM run r WHERE r.id = _run LIMIT 1)
            INTO hosts, _open, overdue, halted
            FROM (
                (SELECT l.host, l.place FROM lane l WHERE l.run = _run AND l.place = {OPEN}
                 ORDER BY l.run, l.best_rank, l.best_id LIMIT _width)
                UNION ALL
                (SELECT l.host, l.place FROM lane l WHERE l.run = _run AND l.place = {LATER} AND l.due <= _now
                 ORDER BY l.run, l.due LIMIT 1000)
                UNION ALL
                (SELECT l.host, l.place FROM lane l WHERE l.run = _run AND l.place = {FULL} AND l.due <= _now
                 ORDER BY l.run, l.due LIMIT 200)
            ) n;
        EXIT WHEN _open < _width OR _width >= 20000;
        SELECT count(*) INTO _fit
            FROM (SELECT delay, concurrency FROM run WHERE id = _run LIMIT 1) r
            CROSS JOIN (SELECT delay, concurrency, ended_at FROM host WHERE id = 0 LIMIT 1) e
            CROSS JOIN unnest(hosts[:_open]) u(host)  -- the open lanes come first
            CROSS JOIN LATERAL (SELECT * FROM host WHERE id = u.host LIMIT 1) h
            CROSS JOIN LATERAL (SELECT {DELAY} AS delay) d
            WHERE {CONCURRENCY} > h.in_flight AND {DUE_AT} <= _now;
        EXIT WHEN _fit >= _limit;
        _width := _width * 4;
    END LOOP;
END
$$;

-- Lock these hosts. Returns how many requests each may have now, and what a lease needs to know of it, in order. shared:
-- those that another run uses, or has used last.
CREATE FUNCTION hosts_for_lease(
    _run integer, _hosts integer[], _now double precision,
    OUT hosts integer[], OUT rooms integer[], OUT learned double precision[], OUT tids tid[], OUT shared integer[]
) LANGUAGE plpgsql AS $$
BEGIN
    SELECT array_agg(h.id), array_agg(CASE WHEN {DUE_AT} <= _now THEN {CONCURRENCY} - h.in_flight ELSE 0 END),
        array_agg(coalesce(h.learned_delay, 0)), array_agg(h.tid),
        array_agg(h.id) FILTER (WHERE h.shared OR h.last_run <> _run)
        INTO hosts, rooms, learned, tids, shared
        FROM (SELECT delay, concurrency FROM run WHERE id = _run LIMIT 1) r
        CROSS JOIN (SELECT delay, concurrency, ended_at FROM host WHERE id = 0 LIMIT 1) e
        CROSS JOIN (
            SELECT h.*, h.ctid AS tid FROM host h WHERE h.id = ANY(_hosts) ORDER BY h.id FOR NO KEY UPDATE
        ) h
        CROSS JOIN LATERAL (SELECT {DELAY} AS delay) d;
END
$$;

-- The best _limit requests of these lanes, in order, each with the index of its lane; at most _rooms from each lane.
CREATE FUNCTION best_requests(
    _limit integer, _lanes bigint[], _rooms integer[], _ranks double precision[], _ids bigint[],
    OUT nths integer[], OUT ranks double precision[], OUT ids bigint[], OUT tids tid[]
) LANGUAGE plpgsql AS $$
DECLARE
    _each integer := 4 + (2 * _limit) / cardinality(_lanes);
BEGIN
    IF cardinality(_lanes) = 1 THEN           -- a crawl of one host needs no merge
        SELECT array_agg(1), array_agg(b.rank), array_agg(b.id), array_agg(b.tid) INTO nths, ranks, ids, tids
            FROM (
                SELECT r.rank, r.id, r.ctid AS tid FROM ready r
                WHERE r.lane = _lanes[1] AND (r.rank, r.id) >= (_ranks[1], _ids[1])
                ORDER BY r.rank, r.id LIMIT least(_rooms[1], _limit)
            ) b;
        RETURN;
    END IF;
    LOOP  -- read deeper until no lane can have more of the best
        SELECT array_agg(b.nth), array_agg(b.rank), array_agg(b.id), array_agg(b.tid) INTO nths, ranks, ids, tids
            FROM (
                SELECT f.nth::integer, q.rank, q.id, q.tid
                FROM unnest(_lanes) WITH ORDINALITY f(lane, nth)
                CROSS JOIN LATERAL (
                    SELECT r.rank, r.id, r.ctid AS tid FROM ready r
                    WHERE r.lane = f.lane AND (r.rank, r.id) >= (_ranks[f.nth], _ids[f.nth])
                    ORDER BY r.rank, r.id LIMIT least(_rooms[f.nth], _each)
                ) q
                ORDER BY q.rank, q.id LIMIT _limit
            ) b;
        EXIT WHEN _each >= _limit;            -- alone, as an expression with a subquery costs more
        EXIT WHEN NOT EXISTS (SELECT FROM unnest(nths) n(nth) GROUP BY n.nth HAVING count(*) >= _each);
        _each := _each * 2;
    END LOOP;
END
$$;

-- When a lease call may find more; null if time alone brings nothing. _open_at: when to ask again for hosts that are due.
CREATE FUNCTION next_moment(_run integer, _now double precision, _open_at double precision, _is_sharing boolean)
RETURNS double precision LANGUAGE plpgsql AS $$
BEGIN
    RETURN least(
        (SELECT h.due FROM held h WHERE h.run = _run ORDER BY h.run, h.due LIMIT 1),
        (SELECT l.due FROM lane l WHERE l.run = _run AND l.place = {LATER} ORDER BY l.run, l.due LIMIT 1),
        CASE WHEN _is_sharing THEN (
            SELECT l.due FROM lane l WHERE l.run = _run AND l.place = {FULL} ORDER BY l.run, l.due LIMIT 1) END,
        (SELECT _open_at FROM lane l WHERE l.run = _run AND l.place = {OPEN}
         ORDER BY l.run DESC, l.best_rank DESC, l.best_id DESC LIMIT 1));
END
$$;

-- Whether a lease call of a run without open lanes would find nothing to do.
CREATE FUNCTION is_idle(_run integer, _now double precision) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    RETURN NOT EXISTS (SELECT FROM lane l WHERE l.run = _run AND l.place = {LATER} AND l.due <= _now)
        AND NOT EXISTS (SELECT FROM lane l WHERE l.run = _run AND l.place = {FULL} AND l.due <= _now)
        AND NOT EXISTS (SELECT FROM held h WHERE h.due <= _now);
END
$$;

-- Seconds after which an idle client should poll again, so that all idle clients together poll 100 times a second. Polls
-- are counted from a sample of one in 16, so that most polls write nothing.
CREATE FUNCTION spread_polls(_now double precision) RETURNS double precision LANGUAGE plpgsql AS $$
DECLARE
    _state record;
    _span double precision;
BEGIN
    IF random() < 0.0625 AND current_setting('transaction_read_only') = 'off' THEN
        SELECT * INTO _state FROM poll_state p WHERE p.id = 1 FOR NO KEY UPDATE SKIP LOCKED;
        IF FOUND THEN
            _span := _now - _state.since;
            IF _span BETWEEN 0 AND 3 THEN
                UPDATE poll_state p SET polls = p.polls + 16 WHERE p.id = 1;
            ELSE  -- an idle client polls every half second, or after poll_after
                UPDATE poll_state p SET since = _now, polls = 0, poll_after = least(
                    (_state.polls + 16) / nullif(_span, 0) * greatest(_state.poll_after, 0.5) / 100, 30)
                    WHERE p.id = 1 AND _span >= 0;
                UPDATE poll_state p SET since = _now, polls = 0, poll_after = 0 WHERE p.id = 1 AND _span < 0;
            END IF;
        END IF;
    END IF;
    SELECT p.poll_after, p.since INTO _state FROM poll_state p WHERE p.id = 1;
    IF _state.poll_after < 0.6 OR _now - _state.since > 60 THEN
        RETURN 0;
    END IF;
    RETURN _state.poll_after * (0.75 + random() / 2);  -- spread, not all at once
END
$$;

-- Lease up to _limit requests, best first, under tokens that follow _base. The first _used tokens are skipped.
-- _not_after: nobody waits for an answer after this time of the server, so nothing is leased.
-- _slot, _epoch: leases belong to this worker or slot of a cluster.
-- _begun: the attempt counts now, else when the lease is reissued.
-- _repeat: the client may have called with this _base before; then it gets the same leases again, and no others.
-- Returns one row, with an array for each property of the leases; they are null if there is none. late: the call came too
-- late. at: the server's time. wait: seconds until there may be more. incoming: staged links. poll_after: seconds after
-- which to poll again. cookies: the version of the run's cookies, not older than the leases.
CREATE FUNCTION lease(
    _run integer, _offset double precision, _receipt bigint, _receipt_token bigint,
    _limit integer, _ttl double precision, _base bigint, _used integer, _repeat boolean, _not_after double precision,
    _slot text, _epoch bigint, _begun boolean,
    OUT tokens bigint[], OUT fingerprints bytea[], OUT urls text[], OUT payloads bytea[], OUT attempts integer[],
    OUT learned_delays double precision[], OUT late boolean, OUT at double precision, OUT wait double precision,
    OUT incoming bigint, OUT poll_after double precision, OUT cookies bigint
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    _now double precision;
    _at double precision;
    _real double precision;
    _seen double precision;                   -- these are parts of clock()
    _skew double precision;
    _ahead double precision;                  -- clock() minus real_clock()
    _until double precision;                  -- until then it may share hosts with other runs
    _may_lease boolean;
    _has_open boolean;
    _knows boolean;
    _restarted boolean;
    _overdue bigint[];
    _overdue_hosts integer[];
    _lanes bigint[];
    _near record;
    _back record;                             -- counts of requeued requests, by run
    _hosts record;                            -- of the candidate lanes, locked
    _from record;                             -- lanes to lease from
    _misplaced bigint[];
    _best record;                             -- requests to lease, in order
    _again bigint[];                          -- tokens of an earlier call with this _base
    _worker integer := 0;                     -- the number of _slot
    _count integer := 0;
    _rows integer;
    _lanes_taken integer;
    _hosts_taken integer;
    _shares boolean;                          -- with other runs, lately
    _shared integer[];                        -- hosts that others want too
    _leasts double precision[];               -- the smallest use of each
    _alone integer[];                         -- runs that have used hosts alone
    _waits boolean := false;                  -- it is the turn of another run
    _each record;
    _moment double precision;
BEGIN
    -- One statement, as a statement costs more than a lookup.
    SELECT _limit > 0 AND r.state NOT IN ({HALTED}),
        -- Looks for the worst lane: in front of the best one, the index may have dead entries of thousands of lanes. EXISTS
        -- would ignore the order.
        (SELECT true FROM lane l WHERE l.run = _run AND l.place = {OPEN}
         ORDER BY l.run DESC, l.best_rank DESC, l.best_id DESC LIMIT 1) IS NOT NULL,
        _receipt IS NULL OR EXISTS (
            SELECT FROM outcome o WHERE o.id = _receipt AND o.token = _receipt_token AND o.state = {DONE}),
        c.boot IS DISTINCT FROM pg_postmaster_start_time(), c.seen, c.skew,
        (SELECT p.until FROM presence p WHERE p.run = _run)
        INTO _may_lease, _has_open, _knows, _restarted, _seen, _skew, _until
        FROM run r LEFT JOIN clock_state c ON c.id = 1 WHERE r.id = _run AND NOT r.deleting;
    IF _knows IS NOT TRUE THEN                -- null: there is no such run
        PERFORM check_run(_run);
        PERFORM check_receipt(_run, _receipt, _receipt_token);
    END IF;
    IF _restarted AND current_setting('transaction_read_only') = 'off' THEN
        PERFORM note_restart(_offset);
    END IF;
    _real := real_clock(_offset);
    _now := CASE WHEN _real BETWEEN _seen AND _seen + 1 THEN _real + _skew ELSE clock(_offset) END;  -- mostly without a call
    _ahead := _now - _real;
    _shares := coalesce(_until > _now, false);
    at := _real - _offset;
    late := coalesce(at > _not_after, false);
    IF NOT (_has_open OR _repeat OR late) AND is_idle(_run, _now) THEN  -- without a lock, so that many clients can poll
        IF _slot IS NOT NULL THEN
            PERFORM check_fence(_run, _slot, _epoch);
        END IF;
        _moment := CASE WHEN _may_lease THEN next_moment(_run, _now, _now, _shares) END;
        IF _shares AND _may_lease AND current_setting('transaction_read_only') = 'off' THEN
            PERFORM set_config('synchronous_commit', 'off', true), note_call(_run, _now, true, NULL, NULL);
        END IF;
        wait := greatest(_moment - _now, CASE WHEN _moment IS NOT NULL THEN 0 END);
        SELECT g.incoming, v.version INTO incoming, cookies
            FROM ledger g LEFT JOIN cookie_version v ON v.run = g.run WHERE g.run = _run;
        poll_after := spread_polls(_now);
        RETURN;
    END IF;
    PERFORM lock_run(_run);
    IF _slot IS NOT NULL THEN
        _worker := check_fence(_run, _slot, _epoch);
    END IF;
    _at := real_clock(_offset);
    _now := _at + _ahead;
    at := _at - _offset;
    late := coalesce(at > _not_after, false);
    _may_lease := _may_lease AND NOT late;

    IF _repeat AND NOT late THEN
        _again := ARRAY(
            SELECT h.token FROM held h WHERE h.token > _base AND h.token <= _base + {MAX_LEASES} AND h.run = _run AND h.state = {LEASED}
            ORDER BY h.token FOR NO KEY UPDATE);
        IF cardinality(_again) > 0 THEN
            UPDATE held h SET due = _now + _ttl WHERE h.token = ANY(_again);
            SELECT array_agg(g.token), array_agg(g.fingerprint), array_agg(g.url), array_agg(g.payload),
                array_agg(g.attempts), array_agg(g.learned_delay)
                INTO tokens, fingerprints, urls, payloads, attempts, learned_delays
                FROM (
                    SELECT h.token, h.fingerprint, q.url, q.payload, h.attempts, coalesce(o.learned_delay, 0) AS learned_delay
                    FROM unnest(_again) WITH ORDINALITY u(token, nth)
                    CROSS JOIN LATERAL (SELECT * FROM held h WHERE h.token = u.token LIMIT 1) h
                    CROSS JOIN LATERAL (SELECT q.url, q.payload FROM request q WHERE q.id = h.id LIMIT 1) q
                    CROSS JOIN LATERAL (SELECT o.learned_delay FROM host o WHERE o.id = h.host LIMIT 1) o
                    ORDER BY u.nth
                ) g;
            wait := 0;
            SELECT g.incoming, v.version INTO incoming, cookies
                FROM ledger g LEFT JOIN cookie_version v ON v.run = g.run WHERE g.run = _run;
            poll_after := 0;
            RETURN;
        END IF;
    END IF;

    _near := near_lanes(_run, CASE WHEN _may_lease THEN _limit ELSE 0 END, _now);
    _may_lease := _may_lease AND NOT _near.halted;  -- paused while it waited for the lock
    IF NOT _may_lease THEN
        _near.hosts := NULL;
    END IF;
    IF _near.overdue THEN
        SELECT array_agg(o.token), array_agg(DISTINCT o.host), array_agg(DISTINCT lane_key(o.run, o.host))
            INTO _overdue, _overdue_hosts, _lanes
            FROM (
                SELECT h.token, h.host, h.run FROM held h
                WHERE h.due <= _now AND EXISTS (SELECT FROM ledger g WHERE g.run = h.run)
                ORDER BY h.due LIMIT 500 FOR UPDATE SKIP LOCKED
            ) o;
    END IF;

    IF _overdue IS NOT NULL THEN
        PERFORM lock_hosts(_overdue_hosts || _near.hosts);
        _lanes := ARRAY(
            SELECT unnest(_lanes) UNION SELECT lane_key(_run, u.host) FROM unnest(_near.hosts) u(host)
            UNION SELECT unnest(full_lanes(_overdue_hosts)));
        PERFORM lock_lanes(_lanes);
        _at := real_clock(_offset);
        _now := _at + _ahead;
        SELECT array_agg(b.run) AS runs, array_agg(b.ready) AS ready, array_agg(b.waiting) AS waiting,
            array_agg(b.leased) AS leased, array_agg(b.dead) AS dead
            INTO _back FROM requeue(_overdue, false, true, _now, _at) b;
        PERFORM place_lanes(_lanes, _now);
        IF _may_lease THEN                    -- some of these lanes may have requests now
            _near.hosts := ARRAY(
                SELECT DISTINCT (u.lane & 4294967295)::integer FROM unnest(_lanes) u(lane) WHERE u.lane >> 32 = _run);
        END IF;
    END IF;

    IF _near.hosts IS NOT NULL THEN
        _hosts := hosts_for_lease(_run, _near.hosts, _now);
        IF _hosts.shared IS NOT NULL THEN
            _alone := note_uses(_run, _hosts.shared, _now);
            FOR _each IN SELECT * FROM share_hosts(_run, _hosts.shared, _now) LOOP
                _rows := width_bucket(_each.host, _hosts.hosts);
                _hosts.rooms[_rows] := _each.room;
                _hosts.tids[_rows] := _each.tid;
                _waits := _waits OR _each.waits;
                IF _each.shared THEN
                    _shared := _shared || _each.host;
                    _leasts := _leasts || _each.least_used;
                END IF;
            END LOOP;
        END IF;
        -- The lanes of a run have the order of their hosts, and each host has one.
        SELECT array_agg(l.id) FILTER (WHERE l.fits) AS lanes, array_agg(l.nth) FILTER (WHERE l.fits) AS nths,
            array_agg(_hosts.rooms[l.nth]) FILTER (WHERE l.fits) AS rooms,
            array_agg(l.best_rank) FILTER (WHERE l.fits) AS ranks, array_agg(l.best_id) FILTER (WHERE l.fits) AS ids,
            array_agg(l.tid) FILTER (WHERE l.fits) AS tids,
            array_agg(l.id) FILTER (WHERE NOT l.fits OR l.place <> {OPEN}) AS misplaced
            INTO _from
            FROM (
                SELECT l.*, l.best_id IS NOT NULL AND _hosts.rooms[l.nth] > 0 AS fits
                FROM (
                    SELECT l.*, l.ctid AS tid, width_bucket(l.host, _hosts.hosts) AS nth FROM lane l
                    WHERE l.id = ANY(ARRAY(SELECT lane_key(_run, u.host) FROM unnest(_hosts.hosts) u(host)))
                    ORDER BY l.id FOR NO KEY UPDATE
                ) l
            ) l;
        _at := real_clock(_offset);
        _now := _at + _ahead;
        IF _from.lanes IS NOT NULL THEN
            _best := best_requests(_limit, _from.lanes, _from.rooms, _from.ranks, _from.ids);
            _count := cardinality(_best.ids);
        END IF;
        _misplaced := _from.misplaced;
    END IF;

    IF _count > 0 THEN
        IF _worker IS NULL THEN
            _worker := add_holder(_run, _slot);
        END IF;
        WITH gone AS (
            DELETE FROM ready r USING unnest(_best.tids) WITH ORDINALITY u(tid, place)
                WHERE r.ctid = u.tid
                RETURNING _base + _used + u.place AS token, _best.nths[u.place] AS nth, r.id, r.rank, coalesce(r.attempts, 0) + 1 AS attempt,
                    coalesce(r.status, 0) AS status, coalesce(r.items, 0) AS items
        ), given AS MATERIALIZED (
            SELECT g.*, q.fingerprint, q.url, q.payload
            FROM gone g
            CROSS JOIN LATERAL (SELECT q.fingerprint, q.url, q.payload FROM request q WHERE q.id = g.id LIMIT 1) q
            ORDER BY g.token
        ), kept AS (
            INSERT INTO held (token, id, rank, due, at, run, host, attempts, status, items, state, fingerprint, worker,
                              epoch, begun)
                SELECT g.token, g.id, g.rank, _now + _ttl, _at, _run, _hosts.hosts[_from.nths[g.nth]], g.attempt,
                    g.status, g.items, {LEASED}, g.fingerprint, _worker, _epoch, _begun
                FROM given g
        )
        SELECT array_agg(g.token), array_agg(g.fingerprint), array_agg(g.url), array_agg(g.payload),
            array_agg(g.attempt), array_agg(_hosts.learned[_from.nths[g.nth]])
            INTO tokens, fingerprints, urls, payloads, attempts, learned_delays FROM given g;
        IF cardinality(_from.lanes) = 1 THEN  -- nothing to group
            UPDATE host SET in_flight = in_flight + _count, last_run = _run WHERE host.ctid = _hosts.tids[_from.nths[1]];
            GET DIAGNOSTICS _hosts_taken = ROW_COUNT;
            UPDATE lane SET ready = ready - _count, best_rank = s.rank, best_id = s.id, place = s.place,
                due = due_of(s.place, 0, _now, 2)
                FROM (
                    SELECT b.rank, b.id, place_of(b.id, _from.rooms[1] - _count, 0, 0) AS place
                    FROM (SELECT) one LEFT JOIN LATERAL (
                        SELECT r.rank, r.id FROM ready r
                        WHERE r.lane = _from.lanes[1] AND (r.rank, r.id) > (_best.ranks[_count], _best.ids[_count])
                        ORDER BY r.rank, r.id LIMIT 1
                    ) b ON true
                ) s
                WHERE lane.ctid = _from.tids[1];
            GET DIAGNOSTICS _rows = ROW_COUNT;
            _rows := _rows + _hosts_taken;
            _lanes_taken := 1;
        ELSE
            WITH taken AS MATERIALIZED (
                SELECT u.nth, count(*)::integer AS n, max(u.place) AS last
                FROM unnest(_best.nths) WITH ORDINALITY u(nth, place) GROUP BY u.nth
            ), counted AS (
                UPDATE host SET in_flight = in_flight + t.n, last_run = _run FROM taken t WHERE host.ctid = _hosts.tids[_from.nths[t.nth]]
                    RETURNING 1
            ), moved AS (
                UPDATE lane SET ready = ready - s.n, best_rank = s.rank, best_id = s.id, place = s.place,
                    due = due_of(s.place, 0, _now, 2)
                    FROM (
                        SELECT t.nth, t.n, b.rank, b.id, place_of(b.id, _from.rooms[t.nth] - t.n, 0, 0) AS place
                        FROM taken t
                        LEFT JOIN LATERAL (
                            SELECT r.rank, r.id FROM ready r
                            WHERE r.lane = _from.lanes[t.nth] AND (r.rank, r.id) > (_best.ranks[t.last], _best.ids[t.last])
                            ORDER BY r.rank, r.id LIMIT 1
                        ) b ON true
                    ) s
                    WHERE lane.ctid = _from.tids[s.nth]
                    RETURNING 1
            )
            SELECT count(*), (SELECT count(*) FROM counted) + (SELECT count(*) FROM moved) INTO _lanes_taken, _rows FROM taken;
        END IF;
        IF _rows <> 2 * _lanes_taken OR cardinality(tokens) <> _count THEN
            PERFORM refuse({CONFLICT}, 'a row was changed that was not locked');
        END IF;
    END IF;
    IF _misplaced IS NOT NULL THEN
        PERFORM place_lanes(_misplaced, _now);
    END IF;
    IF _shared IS NOT NULL AND _count > 0 THEN
        PERFORM take_turns(
            _run, ARRAY(SELECT _hosts.hosts[_from.nths[u.nth]] FROM unnest(_best.nths) u(nth)), _shared, _leasts, _now);
    END IF;
    IF _may_lease AND (_shares OR _shared IS NOT NULL) THEN
        IF _count = 0 AND _overdue IS NULL THEN  -- nothing that has to last
            PERFORM set_config('synchronous_commit', 'off', true);
        END IF;
        PERFORM note_call(_run, _now, _count < _limit, _shared, _alone);
    END IF;

    IF _overdue IS NOT NULL THEN
        PERFORM 1 FROM ledger g WHERE g.run = ANY(_back.runs || _run) ORDER BY g.run FOR NO KEY UPDATE;
        GET DIAGNOSTICS _rows = ROW_COUNT;
        IF _rows <> (SELECT count(DISTINCT u.run) FROM unnest(_back.runs || _run) u(run)) THEN
            PERFORM refuse({CONFLICT}, 'a row was changed that was not locked');  -- a run is being deleted: retry without it
        END IF;
        UPDATE ledger g SET ready = g.ready + b.ready, waiting = g.waiting - b.waiting,
            leased = g.leased - b.leased, dead = g.dead + b.dead
            FROM unnest(_back.runs, _back.ready, _back.waiting, _back.leased, _back.dead)
                b(run, ready, waiting, leased, dead)
            WHERE g.run = b.run;
    END IF;
    UPDATE ledger g SET ready = g.ready - _count, leased = g.leased + _count WHERE g.run = _run AND _count > 0
        RETURNING g.incoming, (SELECT v.version FROM cookie_version v WHERE v.run = _run) INTO incoming, cookies;
    IF NOT FOUND THEN
        SELECT g.incoming, v.version INTO incoming, cookies
            FROM ledger g LEFT JOIN cookie_version v ON v.run = g.run WHERE g.run = _run;
        IF _count > 0 THEN
            PERFORM refuse({NO_RUN}, 'the run was deleted');
        END IF;
    END IF;

    IF _may_lease THEN
        _moment := CASE WHEN _count = _limit THEN _now ELSE next_moment(
            _run, _now, _now + CASE WHEN _waits THEN {SHORT_PAUSE} ELSE 0 END, _shares OR _shared IS NOT NULL) END;
    END IF;
    wait := CASE WHEN _moment IS NOT NULL THEN greatest(_moment - _now, 0) END;
    at := real_clock(0);
    IF _count = 0 THEN
        poll_after := spread_polls(_now);
    END IF;
END
$$;
