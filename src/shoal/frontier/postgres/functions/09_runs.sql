-- The runs of a store.

-- False when there is one of this name already.
CREATE OR REPLACE FUNCTION create_run(
    _run_id text, _spider text, _state text, _created_at double precision, _settings bytea
) RETURNS boolean LANGUAGE sql AS $$
    WITH made AS (
        INSERT INTO run (run_id, spider, state, created_at, settings)
            VALUES (_run_id, _spider, _state, _created_at, _settings) ON CONFLICT (run_id) DO NOTHING RETURNING id
    ), opened AS (
        INSERT INTO ledger (run) SELECT id FROM made
    )
    SELECT EXISTS (SELECT FROM made)
$$;

CREATE OR REPLACE FUNCTION get_run(_run_id text)
RETURNS TABLE (id integer, run_id text, spider text, state text, created_at double precision, settings bytea)
LANGUAGE sql AS $$
    SELECT r.id, r.run_id, r.spider, r.state, r.created_at, r.settings FROM run r WHERE r.run_id = _run_id
$$;

CREATE OR REPLACE FUNCTION run_state(_run_id text) RETURNS text LANGUAGE sql AS $$
    SELECT r.state FROM run r WHERE r.run_id = _run_id
$$;

CREATE OR REPLACE FUNCTION run_states(_spider text) RETURNS TABLE (run_id text, state text) LANGUAGE sql AS $$
    SELECT r.run_id, r.state FROM run r WHERE r.spider = _spider ORDER BY r.id
$$;

CREATE OR REPLACE FUNCTION list_runs(_spider text)
RETURNS TABLE (id integer, run_id text, spider text, state text, created_at double precision, settings bytea)
LANGUAGE sql AS $$
    SELECT r.id, r.run_id, r.spider, r.state, r.created_at, r.settings FROM run r
    WHERE _spider IS NULL OR r.spider = _spider ORDER BY r.id DESC
$$;

-- False when its state is not what it was taken for.
CREATE OR REPLACE FUNCTION set_state(_run integer, _from text, _to text) RETURNS boolean LANGUAGE sql AS $$
    WITH changed AS (UPDATE run r SET state = _to WHERE r.id = _run AND r.state = _from RETURNING 1)
    SELECT EXISTS (SELECT FROM changed)
$$;

-- False when there is none. With all of it locked, whoever works on the run finds its ledger gone, and leaves nothing.
CREATE OR REPLACE FUNCTION delete_run(_run_id text, _offset double precision) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    _run integer;
    _hosts integer[];
    _lanes integer[];
    _now double precision;
BEGIN
    SELECT r.id INTO _run FROM run r WHERE r.run_id = _run_id;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    PERFORM lock_run(_run);
    PERFORM 1 FROM held h WHERE h.run = _run ORDER BY h.token FOR UPDATE;
    _hosts := ARRAY(SELECT h.host FROM held h WHERE h.run = _run AND h.state = 2);
    PERFORM lock_hosts(_hosts);
    _lanes := ARRAY(SELECT l.id FROM lane l WHERE l.host = ANY(_hosts) AND l.place = 3 AND l.run <> _run);
    PERFORM lock_lanes(_lanes || ARRAY(SELECT l.id FROM lane l WHERE l.run = _run));
    PERFORM 1 FROM ledger g WHERE g.run = _run FOR UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    _now := clock(_offset);
    PERFORM free_hosts(_hosts, array_fill(true, ARRAY[cardinality(_hosts)]), _now);
    PERFORM place_lanes(_lanes, _now);
    DELETE FROM ready r USING lane l WHERE l.run = _run AND r.lane = l.id;
    DELETE FROM held h WHERE h.run = _run;
    DELETE FROM outcome o USING request q WHERE q.run = _run AND o.id = q.id;
    DELETE FROM event e USING request q WHERE q.run = _run AND e.request = q.id;
    DELETE FROM request q WHERE q.run = _run;
    DELETE FROM item i WHERE i.run = _run;
    DELETE FROM role r WHERE r.run = _run;
    DELETE FROM fence f WHERE f.run = _run;
    DELETE FROM lane l WHERE l.run = _run;
    DELETE FROM ledger g WHERE g.run = _run;
    DELETE FROM run r WHERE r.id = _run;
    RETURN true;
END
$$;
