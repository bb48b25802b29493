-- Runs.

-- False if a run of this name exists. One at a time until the commit: whoever sees a run also sees all runs with a smaller
-- number.
CREATE FUNCTION create_run(
    _run_id text, _spider text, _state text, _created_at double precision, _settings bytea, _project text,
    _ended_at double precision
) RETURNS boolean LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    _id integer;
BEGIN
    PERFORM pg_advisory_xact_lock('run'::regclass::oid::integer, 0);
    INSERT INTO run (run_id, spider, state, created_at, settings, project, ended_at)
        VALUES (_run_id, _spider, _state, _created_at, _settings, _project, _ended_at)
        ON CONFLICT (run_id) DO NOTHING RETURNING id INTO _id;
    INSERT INTO ledger (run, trimmed) SELECT _id, 0 WHERE _id IS NOT NULL;
    RETURN _id IS NOT NULL;
END
$$;

CREATE FUNCTION find_run(_run_id text)
RETURNS TABLE (
    id integer, run_id text, spider text, state text, created_at double precision, settings bytea, project text,
    ended_at double precision
) LANGUAGE plpgsql AS $$
BEGIN
    RETURN QUERY
        SELECT r.id, r.run_id, r.spider, r.state, r.created_at, r.settings, r.project, r.ended_at FROM run r
        WHERE r.run_id = _run_id AND NOT r.deleting;
END
$$;

-- All runs, or those of a spider, a project or in some states; newest first. A dashboard calls it every two seconds, so the
-- plan is kept, and only small rows are sorted: settings may be long.
CREATE FUNCTION runs(_spider text, _project text, _states text[], _limit integer)
RETURNS TABLE (
    id integer, run_id text, spider text, state text, created_at double precision, settings bytea, project text,
    ended_at double precision
) LANGUAGE plpgsql SET search_path FROM CURRENT SET plan_cache_mode = force_generic_plan SET jit = off AS $$
BEGIN
    RETURN QUERY
        SELECT r.id, r.run_id, r.spider, r.state, r.created_at, r.settings, r.project, r.ended_at
        FROM (
            SELECT n.id, n.number FROM run n
            WHERE (_spider IS NULL OR n.spider = _spider) AND (_project IS NULL OR n.project = _project)
                AND (_states IS NULL OR n.state = ANY(_states)) AND NOT n.deleting
            ORDER BY n.number DESC LIMIT _limit
        ) n CROSS JOIN LATERAL (SELECT * FROM run r WHERE r.id = n.id LIMIT 1) r
        ORDER BY n.number DESC;
END
$$;

CREATE FUNCTION run_state(_run_id text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
    RETURN (SELECT r.state FROM run r WHERE r.run_id = _run_id AND NOT r.deleting);
END
$$;

CREATE FUNCTION run_states(_spider text, _project text)
RETURNS TABLE (run_id text, state text) LANGUAGE sql SET search_path FROM CURRENT AS $$
    SELECT r.run_id, r.state FROM run r
    WHERE r.spider = _spider AND (_project IS NULL OR r.project = _project) AND NOT r.deleting
    ORDER BY r.number
$$;

-- False if its state is not _from. When it returns, no lease of a halted run is under way: what is pushed then stays.
CREATE FUNCTION set_state(_run integer, _from text, _to text, _ended_at double precision)
RETURNS boolean LANGUAGE sql SET search_path FROM CURRENT AS $$
    SELECT lock_run(_run);
    WITH changed AS (
        UPDATE run r SET state = _to, ended_at = _ended_at
        WHERE r.id = _run AND r.state = _from AND NOT r.deleting RETURNING 1)
    SELECT EXISTS (SELECT FROM changed)
$$;

-- Begin to delete a run. Returns its number, or null if there is none. From now on the run is hidden. Without its ledger no
-- worker can commit changes to it.
CREATE FUNCTION begin_delete(_run_id text) RETURNS integer LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    _run integer;
BEGIN
    SELECT r.id INTO _run FROM run r WHERE r.run_id = _run_id;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    PERFORM lock_run(_run);
    PERFORM 1 FROM ledger g WHERE g.run = _run FOR UPDATE;
    UPDATE run r SET deleting = true WHERE r.id = _run AND NOT r.deleting;
    DELETE FROM ledger g WHERE g.run = _run;
    RETURN _run;
END
$$;

-- Delete some requests of a run, after this fingerprint. Returns the last fingerprint of this step; null if there are no
-- more requests. If the client dies, deleting the run again continues.
CREATE FUNCTION delete_requests(_run integer, _offset double precision, _after bytea, _limit integer)
RETURNS bytea LANGUAGE plpgsql AS $$
DECLARE
    _gone record;
    _held record;
    _lanes bigint[];
BEGIN
    SELECT array_agg(h.token) AS tokens, coalesce(array_agg(h.host) FILTER (WHERE h.state = {LEASED}), '{}') AS hosts
        INTO _held
        FROM (SELECT * FROM held h WHERE h.run = _run ORDER BY h.token LIMIT _limit FOR UPDATE) h;
    IF _held.tokens IS NOT NULL THEN
        _lanes := full_lanes((free_hosts(_held.hosts, NULL, clock(_offset))).hosts);
        PERFORM lock_lanes(_lanes);
        PERFORM place_lanes(_lanes, clock(_offset));
        DELETE FROM held h WHERE h.token = ANY(_held.tokens);
        RETURN _after;
    END IF;
    SELECT array_agg(q.id) AS ids, array_agg(lane_key(_run, q.host)) AS lanes, array_agg(coalesce(q.rank, 0)) AS ranks,
        (array_agg(q.fingerprint ORDER BY q.fingerprint DESC))[1] AS last
        INTO _gone
        FROM (
            SELECT q.* FROM request q WHERE q.run = _run AND q.fingerprint > _after
            ORDER BY q.run, q.fingerprint LIMIT _limit
        ) q;
    DELETE FROM ready r USING unnest(_gone.lanes, _gone.ranks, _gone.ids) u(lane, rank, id)
        WHERE r.lane = u.lane AND r.rank = u.rank AND r.id = u.id;
    DELETE FROM outcome o WHERE o.id = ANY(_gone.ids);
    DELETE FROM event e WHERE e.request = ANY(_gone.ids);
    DELETE FROM request q WHERE q.id = ANY(_gone.ids);
    RETURN _gone.last;
END
$$;

-- Delete some items of a run, after this one. Returns the last one; null if there are no more.
CREATE FUNCTION delete_items(_run integer, _after bigint, _limit integer) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
    _last bigint;
BEGIN
    SELECT max(i.seq) INTO _last FROM (
        SELECT i.seq FROM item i WHERE i.run = _run AND i.seq > _after ORDER BY i.run, i.seq LIMIT _limit) i;
    DELETE FROM item i WHERE i.run = _run AND i.seq > _after AND i.seq <= _last;
    RETURN _last;
END
$$;

-- Delete some chunks and lanes of a run. False if there are no more.
CREATE FUNCTION delete_lanes(_run integer, _limit integer) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    _chunks integer;
    _rows integer;
BEGIN
    DELETE FROM chunk c WHERE (c.token, c.number) IN (
        SELECT d.token, d.number FROM chunk d WHERE d.run = _run LIMIT greatest(_limit / 100, 1));
    GET DIAGNOSTICS _chunks = ROW_COUNT;
    DELETE FROM lane l WHERE l.id = ANY(ARRAY(
        SELECT k.id FROM lane k WHERE k.id > lane_key(_run, 0) AND k.id < lane_key(_run + 1, 0)
        ORDER BY k.id LIMIT _limit FOR UPDATE));
    GET DIAGNOSTICS _rows = ROW_COUNT;
    RETURN _chunks + _rows > 0;
END
$$;

-- Delete the rest, and the run itself.
CREATE FUNCTION end_delete(_run integer) RETURNS void LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
BEGIN
    DELETE FROM document d USING run r WHERE r.id = _run
        AND d.key >= convert_to('run/' || r.run_id || '/', 'UTF8') AND d.key < convert_to('run/' || r.run_id || '0', 'UTF8');
    DELETE FROM inventory i USING run r WHERE r.id = _run AND i.run = 0 AND i.kind = 'document'
        AND i.name >= 'run/' || r.run_id || '/' AND i.name < 'run/' || r.run_id || '0';
    DELETE FROM inventory i WHERE i.run = _run;
    DELETE FROM role r WHERE r.run = _run;
    DELETE FROM holder h WHERE h.run = _run;
    DELETE FROM worker w WHERE w.run = _run;
    DELETE FROM stage s WHERE s.run = _run;
    DELETE FROM rewind w WHERE w.run = _run;
    DELETE FROM turn t WHERE t.run = _run;
    DELETE FROM presence p WHERE p.run = _run;
    DELETE FROM cookie_version v WHERE v.run = _run;
    DELETE FROM run r WHERE r.id = _run AND r.deleting;
END
$$;
